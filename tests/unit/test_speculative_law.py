"""A sparse law says the same on both sides, and bytes that are no law are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_workers.speculative.law import SparseLaw

TINY = 2.0**-149  # the least float32
HUGE = 3.4028234663852886e38  # the greatest
WEIGHTS = st.one_of(
    st.floats(TINY, HUGE, width=32),
    st.floats(0.0625, 1.0, width=32),
    st.sampled_from([TINY, HUGE, 1.0]),
)


def law_of(weights: dict[int, float]) -> SparseLaw:
    return SparseLaw(
        np.array(list(weights), dtype=np.int64), np.array(list(weights.values()), dtype=np.float32)
    )


LAWS = st.dictionaries(st.integers(0, (1 << 32) - 1), WEIGHTS, min_size=1, max_size=70).map(law_of)


@given(law=LAWS)
def test_bytes_bring_back_the_very_same_law(law: SparseLaw) -> None:
    raw = law.to_bytes()
    again = SparseLaw.from_bytes(raw)
    assert (again.ids.dtype, again.weights.dtype) == (np.int64, np.float32)
    assert again.ids.tolist() == law.ids.tolist()
    assert again.weights.tolist() == law.weights.tolist()
    assert again.probabilities.tolist() == law.probabilities.tolist()
    assert again.to_bytes() == raw


def test_bytes_are_the_ids_and_then_the_weights_little_endian() -> None:
    law = law_of({7: 0.5, 70_000: 0.25})
    assert law.to_bytes() == struct.pack("<IIff", 7, 70_000, 0.5, 0.25)


@given(law=LAWS)
def test_probabilities_are_those_of_the_weights(law: SparseLaw) -> None:
    exact = [float(weight) for weight in law.weights]
    total = sum(exact)
    assert law.probabilities.dtype == np.float64
    assert law.probabilities.sum() == pytest.approx(1)
    for token, weight, p in zip(law.ids.tolist(), exact, law.probabilities, strict=True):
        assert p == pytest.approx(weight / total, rel=1e-12)
        assert law.probability(token) == pytest.approx(p, rel=1e-12)
    assert law.probability(1 << 40) == 0


@given(law=LAWS, uniform=st.floats(2.0**-53, 1 - 2.0**-53))
def test_a_draw_is_the_inverse_of_the_cumulated_probabilities(
    law: SparseLaw, uniform: float
) -> None:
    place = law.ids.tolist().index(law.draw(uniform))
    before = float(law.probabilities[:place].sum())
    assert before - 1e-12 <= uniform <= before + law.probabilities[place] + 1e-12
    assert law.probabilities[place] > 0


def test_draws_on_a_fine_grid_come_as_often_as_the_law_says() -> None:
    law = law_of({9: 3.0, 2: 1.0, 5: 4.0})
    drawn = [law.draw((i + 0.5) / 8000) for i in range(8000)]
    assert [drawn.count(token) for token in (9, 2, 5)] == [3000, 1000, 4000]


def test_a_certain_law_has_one_token() -> None:
    law = SparseLaw.certain(12)
    assert (law.draw(0.99), law.probability(12), law.probability(11)) == (12, 1.0, 0.0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(b"", "8 bytes an entry", id="empty"),
        pytest.param(b"\0" * 7, "8 bytes an entry", id="torn"),
        pytest.param(b"\0" * 12, "8 bytes an entry", id="an entry and a half"),
        pytest.param(struct.pack("<If", 1, 0.0), "above 0", id="weight 0"),
        pytest.param(struct.pack("<If", 1, -0.0), "above 0", id="weight minus 0"),
        pytest.param(struct.pack("<If", 1, -1.0), "above 0", id="negative"),
        pytest.param(struct.pack("<If", 1, float("nan")), "finite", id="NaN"),
        pytest.param(struct.pack("<If", 1, float("inf")), "finite", id="infinite"),
        pytest.param(struct.pack("<IIff", 1, 2, 1.0, float("nan")), "finite", id="one of them"),
        pytest.param(struct.pack("<IIff", 4, 4, 1.0, 1.0), "twice", id="repeated"),
    ],
)
def test_what_is_no_law_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseLaw.from_bytes(raw)


def test_the_greatest_weights_do_not_overflow() -> None:
    law = law_of(dict.fromkeys(range(64), HUGE))
    assert law.probability(3) == 1 / 64
    assert law.draw(0.999) == 63


@given(raw=st.binary(max_size=64))
def test_any_bytes_are_a_law_or_refused(raw: bytes) -> None:
    try:
        law = SparseLaw.from_bytes(raw)
    except ValueError:
        return
    assert law.probabilities.sum() == pytest.approx(1)
    assert law.draw(0.5) in law.ids
