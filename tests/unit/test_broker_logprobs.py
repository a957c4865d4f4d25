"""Log-probabilities survive the token stream, and no bytes whatever become something else."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.errors import DecodeError
from pilotfish_broker.logprobs import (
    LOGPROBS_VERSION,
    Alternative,
    TokenLogprob,
    join_positions,
    pack_logprobs,
    pack_position,
    unpack_logprobs,
)

alternatives = st.builds(
    Alternative,
    st.integers(0, (1 << 31) - 1),
    st.floats(max_value=0.0, allow_nan=False),
    st.binary(max_size=6),
)
positions = st.builds(TokenLogprob, alternatives, st.lists(alternatives, max_size=3))
LIST = [
    TokenLogprob(Alternative(5, -0.5, b"\xf0\x9f"), [Alternative(6, -0.25, b"a")] * 2),
    TokenLogprob(Alternative(7, -math.inf, b""), []),
]
ITEM = [5, -0.5, b"x", [[6, -0.25, b"y"]]]


def packed(value: Any) -> bytes:
    raw: bytes = msgpack.packb(value)
    return raw


def refused(raw: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        unpack_logprobs(raw)
    assert caught.value.raw is raw
    assert len(str(caught.value)) < 100


@given(st.lists(positions, max_size=5))
def test_log_probabilities_survive_packing(items: list[TokenLogprob]) -> None:
    assert unpack_logprobs(pack_logprobs(items)) == items


def test_the_bytes_are_those_that_the_module_describes() -> None:
    expected = [LOGPROBS_VERSION, [[5, -0.5, b"x", [[6, -0.25, b"y"]]]]]
    item = TokenLogprob(Alternative(5, -0.5, b"x"), [Alternative(6, -0.25, b"y")])
    assert pack_logprobs([item]) == packed(expected)
    assert unpack_logprobs(packed([LOGPROBS_VERSION, [ITEM]])) == [item]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])  # each has another form of array
def test_positions_may_be_packed_one_by_one(count: int) -> None:
    one = pack_position(5, -0.5, b"x", [(6, -0.25, b"y")])
    assert join_positions([one] * count) == packed([LOGPROBS_VERSION, [ITEM] * count])


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_log_probabilities_or_a_decode_error(raw: bytes) -> None:
    try:
        items = unpack_logprobs(raw)
    except DecodeError:
        return
    assert pack_logprobs(items)


@pytest.mark.parametrize("length", range(len(pack_logprobs(LIST))))
def test_truncated_bytes_are_refused(length: int) -> None:
    refused(pack_logprobs(LIST)[:length])


@pytest.mark.parametrize("version", [0, LOGPROBS_VERSION + 1, True, 1.0, "1", None])
def test_another_version_is_refused(version: Any) -> None:
    refused(packed([version, [ITEM]]))


BAD_PARTS: dict[int, list[Any]] = {
    0: [None, True, -1, 1 << 31, 1.0, "5", b"5", [5]],
    1: [None, True, -1, "-0.5", b"", math.nan, math.inf, [-0.5]],
    2: [None, 1, "text", [b"x"]],
    3: [None, 1, "x", b"x", {}, [1], [None], [[6, -0.25]], [[6, -0.25, b"y", []]]],
}


@pytest.mark.parametrize(
    ("place", "value"), [(place, value) for place in BAD_PARTS for value in BAD_PARTS[place]]
)
def test_a_part_of_another_type_is_refused(place: int, value: Any) -> None:
    item: list[Any] = [*ITEM]
    item[place] = value
    refused(packed([LOGPROBS_VERSION, [item]]))
    if place < 3:
        refused(packed([LOGPROBS_VERSION, [[*ITEM[:3], [item[:3]]]]]))


@pytest.mark.parametrize(
    "parts",
    [None, 1, [], [1], {}, [1, None], [1, {}], [1, [None]], [1, [[]]], [1, [ITEM[:3]]], [1, [], 2]],
)
def test_another_shape_is_refused(parts: Any) -> None:
    refused(packed(parts))


def test_deep_nesting_is_refused() -> None:
    refused(b"\x92\x01" + b"\x91" * 100_000)
