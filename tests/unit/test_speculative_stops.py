"""An output ends at its first stop token, its limit, or its first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_workers.speculative.stops import StopStrings, cut

STOP = 99


@pytest.mark.parametrize(
    ("tokens", "remaining", "kept", "reason"),
    [
        pytest.param([10, 11], 5, [10, 11], None, id="goes on"),
        pytest.param([10, 11, STOP, 20, 21, 22], 5, [10, 11, STOP], "stop", id="stop inside"),
        pytest.param([STOP, 1], 5, [STOP], "stop", id="stop first"),
        pytest.param([10, STOP], 2, [10, STOP], "stop", id="stop as the last allowed token"),
        pytest.param([10, 11, STOP], 2, [10, 11], "length", id="stop beyond the limit"),
        pytest.param([10, 11, 12], 3, [10, 11, 12], "length", id="exactly the limit"),
        pytest.param([10, 11, 12], 2, [10, 11], "length", id="beyond the limit"),
        pytest.param([10], 1, [10], "length", id="a limit of one"),
        pytest.param([STOP], 1, [STOP], "stop", id="a limit of one that stops"),
        pytest.param([STOP, STOP], 5, [STOP], "stop", id="the first stop of two"),
    ],
)
def test_a_round_is_cut_where_the_output_ends(
    tokens: list[int], remaining: int, kept: list[int], reason: str | None
) -> None:
    assert cut(tokens, {STOP}, remaining) == (kept, reason)


def test_without_stop_tokens_only_the_limit_ends_an_output() -> None:
    assert cut([STOP, STOP], (), 3) == ([STOP, STOP], None)


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    stop_ids=st.frozensets(st.integers(0, 5), max_size=2),
    remaining=st.integers(1, 9),
)
def test_a_cut_equals_plain_decoding_that_checks_after_each_token(
    tokens: list[int], stop_ids: frozenset[int], remaining: int
) -> None:
    kept: list[int] = []
    reason = None
    for token in tokens:
        kept.append(token)
        reason = "stop" if token in stop_ids else "length" if len(kept) == remaining else None
        if reason:
            break
    assert cut(tokens, stop_ids, remaining) == (kept, reason)


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    stop_ids=st.frozensets(st.integers(0, 5), max_size=2),
    limit=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_the_end_does_not_depend_on_how_the_tokens_fall_into_rounds(
    tokens: list[int], stop_ids: frozenset[int], limit: int, sizes: list[int]
) -> None:
    whole, reason = cut(tokens, stop_ids, limit)
    output: list[int] = []
    ended = None
    start = 0
    for size in sizes:
        part = tokens[start : start + size]
        start += size
        if part and ended is None:
            kept, ended = cut(part, stop_ids, limit - len(output))
            output += kept
    assert (output, ended) == (whole, reason)


STRINGS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5)


@given(strings=STRINGS, pieces=st.lists(st.text("abc", max_size=6), max_size=8))
def test_the_first_complete_string_is_found_and_the_longest_of_those(
    strings: list[str], pieces: list[str]
) -> None:
    finder, state, text = StopStrings(strings), 0, ""
    for piece in pieces:
        state, end, length = finder.find(state, piece)
        ends = [
            (place, max(len(s) for s in strings if (text + piece)[:place].endswith(s)))
            for place in range(len(text) + 1, len(text + piece) + 1)
            if (text + piece)[:place].endswith(tuple(strings))
        ]
        if ends:
            assert (len(text) + end, length) == ends[0]
            return
        assert (end, length) == (0, 0)
        text += piece


@given(strings=STRINGS, pieces=st.lists(st.text("abc", max_size=12), max_size=8))
def test_what_may_still_become_a_string_is_the_longest_end_that_begins_one(
    strings: list[str], pieces: list[str]
) -> None:
    finder, state, text = StopStrings(strings), 0, ""
    for piece in pieces:
        state = finder.skip(state, piece)
        text += piece
        beginnings = {string[:size] for string in strings for size in range(1, len(string))}
        longest = max((len(part) for part in beginnings if text.endswith(part)), default=0)
        assert finder.num_open(state) == longest


def test_an_empty_string_is_never_found() -> None:
    assert StopStrings([""]).find(0, "abc")[1:] == (0, 0)
