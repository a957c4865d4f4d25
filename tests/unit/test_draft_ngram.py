"""n-gram prompt lookup proposes what followed the last tokens before."""

from __future__ import annotations

import pytest

from pilotfish_workers.draft.ngram import NgramSource
from pilotfish_workers.draft.source import Draft, Drafted


def propose(tokens: list[int], k: int) -> Drafted | None:
    return NgramSource().propose([Draft(tokens)], [k])[0]


@pytest.mark.parametrize(
    ("tokens", "k", "drafted"),
    [
        pytest.param([1, 2, 3, 4, 1, 2], 2, [3, 4], id="what followed"),
        pytest.param([1, 2, 3, 4, 1, 2], 4, [3, 4, 1, 2], id="up to the end of the text"),
        pytest.param([1, 2, 3, 4, 1, 2], 7, [3, 4, 1, 2, 3, 4, 1], id="and around again"),
        pytest.param([7, 7, 7], 5, [7, 7, 7, 7, 7], id="a run of one token"),
        pytest.param([1, 2, 3, 4, 5], 4, [], id="nothing repeats"),
        pytest.param([1, 2, 3, 9, 2, 3, 5, 1, 2, 3], 1, [9], id="the longest match wins"),
        pytest.param([2, 3, 9, 2, 3, 5, 2, 3], 1, [5], id="then the latest"),
        pytest.param([5, 1, 5], 3, [], id="one equal token is no match"),
        pytest.param([5], 3, [], id="one token"),
        pytest.param([], 3, [], id="no token"),
    ],
)
def test_a_proposal_is_what_followed_the_longest_latest_match(
    tokens: list[int], k: int, drafted: list[int]
) -> None:
    assert propose(tokens, k) == Drafted(drafted)


def test_matches_in_the_output_count_like_those_in_the_prompt() -> None:
    source, draft = NgramSource(), Draft([1, 2, 3])
    assert source.propose([draft], [2]) == [Drafted([])]
    draft.tokens += [8, 9, 4, 8, 9]
    source.learn(draft, 3)
    assert source.propose([draft], [2]) == [Drafted([4, 8])]


def test_tokens_that_fell_are_forgotten() -> None:
    source, draft = NgramSource(), Draft([1, 2, 3, 1, 2])
    assert source.propose([draft], [1]) == [Drafted([3])]
    draft.tokens[2:] = [7, 1, 2]
    source.learn(draft, 2)
    assert source.propose([draft], [1]) == [Drafted([7])]


def test_an_ended_draft_keeps_no_memory() -> None:
    source, draft = NgramSource(), Draft([1, 2, 1, 2])
    source.propose([draft], [1])
    assert draft.memory is not None
    source.learn(draft, None)
    assert draft.memory is None
