"""The greedy accept rule is equality with the target's argmax, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.interface import BAD_LOGITS, Rows
from pilotfish_workers.speculative.accept import (
    NOT_JUDGED,
    Outcome,
    accept_greedy,
    draw_plain,
    verify_plain,
)
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn, Sampler

TOKENS = st.integers(0, 3)  # few, so that equal ones are common


@pytest.mark.parametrize(
    ("drafted", "targets", "num_accepted", "token"),
    [
        pytest.param([], [7], 0, 7, id="plain decoding"),
        pytest.param([7], [7, 8], 1, 8, id="one accepted, then the bonus"),
        pytest.param([7], [6, 8], 0, 6, id="one rejected: recovered, and no bonus"),
        pytest.param([1, 2, 3], [1, 2, 3, 4], 3, 4, id="all accepted"),
        pytest.param([1, 2, 3], [1, 9, 3, 4], 1, 9, id="nothing after the first rejection counts"),
        pytest.param([2, 3, 4], [1, 2, 3, 4], 0, 1, id="a draft shifted by one is rejected"),
        pytest.param([5, 5], [5, 5, 5], 2, 5, id="repeats are judged one by one"),
        pytest.param([1, 2], [1, BAD_LOGITS, 3], 1, BAD_LOGITS, id="bad logits accept nothing"),
    ],
)
def test_the_longest_prefix_that_the_target_would_have_chosen_stands(
    drafted: list[int], targets: list[int], num_accepted: int, token: int
) -> None:
    assert accept_greedy(drafted, targets) == Outcome(num_accepted, token)


def test_a_draft_of_length_one_is_compared_with_the_last_committed_tokens_logits() -> None:
    assert accept_greedy([3], [4, 3]).tokens([3]) == [4]


@pytest.mark.parametrize("num_targets", [0, 1, 2, 4])
def test_another_number_of_targets_is_a_mistake_of_the_caller(num_targets: int) -> None:
    with pytest.raises(ValueError, match="need 3 targets"):
        accept_greedy([1, 2], list(range(num_targets)))


@given(drafted=st.lists(TOKENS, max_size=8), data=st.data())
def test_the_rule_equals_its_definition_token_by_token(
    drafted: list[int], data: st.DataObject
) -> None:
    size = len(drafted) + 1
    targets = data.draw(st.lists(TOKENS, min_size=size, max_size=size))
    committed: list[int] = []
    for place, wanted in enumerate(targets):
        committed.append(wanted)  # what plain decoding would have chosen here
        if place == len(drafted) or drafted[place] != wanted:
            break
    outcome = accept_greedy(drafted, targets)
    assert outcome.tokens(drafted) == committed
    assert outcome.num_accepted == len(committed) - 1


@given(prefix=st.lists(TOKENS, max_size=4), drafted=st.lists(TOKENS, max_size=6))
def test_what_is_committed_equals_plain_decoding_of_any_target(
    prefix: list[int], drafted: list[int]
) -> None:
    def target(tokens: list[int]) -> int:
        return (sum(tokens) * 7 + len(tokens)) % 4

    targets = [target(prefix + drafted[:count]) for count in range(len(drafted) + 1)]
    tokens = accept_greedy(drafted, targets).tokens(drafted)
    expected = list(prefix)
    for _ in tokens:
        expected.append(target(expected))
    assert prefix + tokens == expected


def plain(**params: object) -> Sampler:
    return Sampler(SamplingParams.from_mapping(params), Coins(1), [1], 1)


def rows_of(num_logits: int) -> Rows:
    return Rows(tokens=[1] * 8, start=0, blocks=[0], num_logits=num_logits)


def test_a_model_without_logits_judges_and_draws_by_its_argmax() -> None:
    rows = [rows_of(3), rows_of(0), rows_of(1)]
    cases = [Case(plain(), (5, 6)), None, Case(plain())]
    assert verify_plain([[5, 7, 8], [], [9]], rows, cases) == [Outcome(1, 7), None, Outcome(0, 9)]
    drawn = draw_plain(
        [[5], [], [BAD_LOGITS]],
        [rows_of(1), rows_of(0), rows_of(1)],
        [Draw(plain()), None, Draw(plain(), (3,))],
    )
    assert drawn == [Drawn(5), None, Drawn(BAD_LOGITS)]


def test_a_chunk_that_is_not_judged_has_no_token() -> None:
    case = Case(plain(), is_judged=False)
    assert verify_plain([[]], [rows_of(0)], [case]) == [Outcome(0, NOT_JUDGED)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1},
    ],
)
def test_a_model_without_logits_does_nothing_but_the_argmax(params: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="shows its logits"):
        verify_plain([[1]], [rows_of(1)], [Case(plain(**params))])
    with pytest.raises(ValueError, match="shows its logits"):
        draw_plain([[1]], [rows_of(1)], [Draw(plain(**params))])


def test_a_model_without_logits_scores_no_prompt_and_answers_as_often_as_asked() -> None:
    with pytest.raises(ValueError, match="shows its logits"):
        verify_plain([[1, 2]], [rows_of(2)], [Case(plain(), scored=(1,))])
    with pytest.raises(ValueError, match="2 answers for a row that wants 1"):
        verify_plain([[1, 2]], [rows_of(1)], [Case(plain())])
    with pytest.raises(ValueError, match="need 3 targets"):
        verify_plain([[1]], [rows_of(1)], [Case(plain(), (1, 2))])
