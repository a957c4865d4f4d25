"""K follows what earlier rounds accepted, reaches 0, and comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.settings import MAX_DRAFT_TOKENS
from pilotfish_workers.verify.draft_length import (
    LONGEST_AUTO,
    REST_ROUNDS,
    START,
    DraftLength,
)


def rounds_until(length: DraftLength, is_reached: bool, limit: int = 500) -> int:
    """Rounds of plain decoding until K is positive."""
    for count in range(limit):
        if (length.choose(MAX_DRAFT_TOKENS) > 0) is is_reached:
            return count
        length.learn(0, 0)
    pytest.fail(f"K did not change within {limit} rounds")


def test_off_never_drafts_and_wants_no_session() -> None:
    length = DraftLength("off")
    assert length.is_off
    assert length.choose(100) == 0


@pytest.mark.parametrize("wanted", [1, 5, MAX_DRAFT_TOKENS])
def test_a_fixed_k_stays_whatever_is_accepted(wanted: int) -> None:
    length = DraftLength(wanted)
    assert not length.is_off
    for accepted in [0] * 100 + [wanted] * 20:
        assert length.choose(100) == wanted
        length.learn(wanted, accepted)


def test_auto_grows_with_full_acceptance_up_to_its_longest() -> None:
    length = DraftLength("auto")
    assert length.choose(100) == START
    for _ in range(20):
        k = length.choose(100)
        length.learn(k, k)
    assert length.choose(100) == LONGEST_AUTO


def test_auto_reaches_zero_when_nothing_is_accepted_and_comes_back_to_try_again() -> None:
    length = DraftLength("auto")
    seen: list[int] = []
    for _ in range(100):
        k = length.choose(100)
        seen.append(k)
        if k == 0:
            break
        length.learn(k, 0)
    assert seen[-1] == 0, "hardly anything accepted, and still drafting"
    assert rounds_until(length, True) == REST_ROUNDS


def test_after_a_rest_auto_grows_again_when_drafts_become_good() -> None:
    length = DraftLength("auto")
    while (k := length.choose(100)) > 0:
        length.learn(k, 0)
    rounds_until(length, True)
    for _ in range(2 * LONGEST_AUTO):
        k = length.choose(100)
        assert k > 0
        length.learn(k, k)
    assert length.choose(100) == LONGEST_AUTO


def test_a_useless_drafter_costs_few_rounds_in_the_long_run() -> None:
    length = DraftLength("auto")
    drafting = 0
    for _ in range(2000):
        k = length.choose(100)
        drafting += k > 0
        length.learn(k, 0)
    assert drafting < 0.15 * 2000


@pytest.mark.parametrize("speculation", ["auto", 4])
def test_misses_in_a_row_rest_for_longer_each_time_up_to_a_limit(speculation: str | int) -> None:
    length = DraftLength(speculation)
    rests = []
    for _ in range(6):
        length.miss(longest_rest=8)
        rests.append(rounds_until(length, True))
    assert rests == [1, 2, 4, 8, 8, 8]


def test_a_proposal_that_came_ends_the_growing_of_rests() -> None:
    length = DraftLength("auto")
    for _ in range(4):
        length.miss(64)
        rounds_until(length, True)
    length.learn(4, 0)
    length.miss(64)
    assert rounds_until(length, True) == 1


@given(
    speculation=st.one_of(st.sampled_from(["auto", "off"]), st.integers(1, MAX_DRAFT_TOKENS)),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("learn"), st.integers(0, MAX_DRAFT_TOKENS), st.integers(0, 16)),
            st.tuples(st.just("miss"), st.integers(1, 64), st.just(0)),
        ),
        max_size=40,
    ),
    most=st.integers(0, 40),
)
def test_k_never_exceeds_what_can_matter_whatever_happened(
    speculation: str | int, steps: list[tuple[str, int, int]], most: int
) -> None:
    length = DraftLength(speculation)
    for kind, number, accepted in steps:
        if kind == "learn":
            length.learn(number, min(number, accepted))
        else:
            length.miss(number)
        k = length.choose(most)
        assert 0 <= k <= min(most, MAX_DRAFT_TOKENS)
        assert k == length.choose(most), "choosing is no event"
