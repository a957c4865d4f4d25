"""Drafting by a model: its cache holds exactly what stands, whatever was accepted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.draft.source import Draft, Drafted
from pilotfish_workers.model.interface import BAD_LOGITS
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.speculative.accept import accept_greedy
from tests.tiny_models import build_tiny
from tests.worker_kit import FunctionModel, plain


def memory(source: ModelSource, draft: Draft) -> Any:
    return source._live[id(draft)][1]


def propose(source: ModelSource, draft: Draft, k: int, *, most_calls: int = 100) -> list[int]:
    for _ in range(most_calls):
        (answer,) = source.propose([draft], [k])
        source.check_integrity()
        if answer is not None:
            return answer.tokens
    pytest.fail(f"no answer within {most_calls} calls")


def settle(
    source: ModelSource, draft: Draft, drafted: list[int], accepted: int, token: int
) -> None:
    """What the draft engine does with a verdict."""
    num_valid = len(draft.tokens) + accepted
    draft.tokens += [*drafted[:accepted], token]
    source.learn(draft, num_valid)


def check_cache(source: ModelSource, model: FunctionModel, draft: Draft) -> None:
    """The cache holds a prefix of the committed tokens, all but the newest two at most, in no
    more blocks than that takes."""
    held = memory(source, draft)
    assert model.held(held.blocks, held.num_computed) == draft.tokens[: held.num_computed]
    assert len(held.blocks) == model.pool.num_blocks_for(held.num_computed)
    source.check_integrity()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = build_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_layers=1, hidden=32)
    return ModelRunner.load(str(folder), device="cpu", num_threads=1, kv_tokens=4096)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [7, 90, 33, 150, 201, 8, 77]


@pytest.fixture(scope="module")
def reference(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """Plain greedy output, one token a pass."""
    return plain(runner, prompt, 900)


@pytest.mark.parametrize("k", range(1, 17))
def test_a_self_draft_is_accepted_whole_at_every_k(
    runner: ModelRunner, prompt: list[int], reference: list[int], k: int
) -> None:
    source, draft, output = ModelSource(runner, 64), Draft(list(prompt)), list(reference)
    for _ in range(12):
        drafted = propose(source, draft, k)
        done = len(draft.tokens) - len(prompt)
        assert drafted == output[done : done + k]
        settle(source, draft, drafted, k, output[done + k])
        held = memory(source, draft)
        assert held.num_computed == len(draft.tokens) - 2, "the last draft was never run"
    source.learn(draft, None)
    runner.pool.check_integrity([])


def test_acceptance_is_flat_over_two_hundred_rounds(
    runner: ModelRunner, prompt: list[int], reference: list[int]
) -> None:
    source, draft, k = ModelSource(runner, 64), Draft(list(prompt)), 3
    for number in range(200):
        drafted = propose(source, draft, k)
        done = len(draft.tokens) - len(prompt)
        outcome = accept_greedy(drafted, reference[done : done + k + 1])
        assert outcome.num_accepted == k, f"round {number}: the cache has drifted"
        settle(source, draft, drafted, k, outcome.token)
    source.learn(draft, None)
    runner.pool.check_integrity([])


def test_acceptance_is_as_before_after_rejections_and_rounds_without_drafts(
    runner: ModelRunner, prompt: list[int], reference: list[int]
) -> None:
    source, draft = ModelSource(runner, 64), Draft(list(prompt))
    for number in range(60):
        k = 1 + number % 5
        done = len(draft.tokens) - len(prompt)
        drafted = propose(source, draft, k)
        assert drafted == reference[done : done + k]
        accepted = number % (k + 1)
        # what the target is said to have chosen is its own choice all the same
        settle(source, draft, drafted, accepted, reference[done + accepted])
        if number % 7 == 0:  # K was 0 for some rounds; then the drafter catches up
            done = len(draft.tokens) - len(prompt)
            draft.tokens += reference[done : done + 4]
    source.learn(draft, None)
    runner.pool.check_integrity([])


@settings(max_examples=80, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16), st.integers(0, 9))),
    size=st.integers(1, 20),
)
def test_after_each_round_the_cache_holds_exactly_what_stands(
    rounds: list[tuple[int, int, int]], size: int
) -> None:
    model = FunctionModel(context=1000, num_blocks=200)
    source, draft = ModelSource(model, 512), Draft(list(range(size)))
    for k, accepted, token in rounds[:20]:
        drafted = propose(source, draft, k)
        assert drafted == plain(model, draft.tokens, k)
        settle(source, draft, drafted, min(accepted, k), token)
        check_cache(source, model, draft)
        # all that was accepted and run is kept: only the newest token, and the last draft of a
        # proposal that was accepted whole, are to be computed
        missing = 2 if accepted >= k else 1
        assert memory(source, draft).num_computed == len(draft.tokens) - missing


def test_a_long_prefix_is_worked_off_in_pieces_while_others_draft() -> None:
    model = FunctionModel(num_blocks=64, context=200)
    source = ModelSource(model, prefill_tokens=16)
    short, long = Draft([1, 2]), Draft([3] * 50)
    source.propose([short], [2])
    answers = [source.propose([short, long], [2, 2]) for _ in range(4)]
    assert all(answer[0] is not None for answer in answers)
    assert [answer[1] is None for answer in answers] == [True, True, True, False]
    assert answers[-1][1] == Drafted(plain(model, long.tokens, 2))


def test_no_pass_takes_more_prompt_tokens_than_allowed() -> None:
    class Counting(FunctionModel):
        most = 0

        def greedy(self, rows: Any) -> list[list[int]]:
            self.most = max(self.most, sum(len(row.tokens) for row in rows))
            return super().greedy(rows)

    model = Counting(num_blocks=64)
    source = ModelSource(model, prefill_tokens=10)
    drafts = [Draft([number] * 23) for number in range(4)]
    while None in source.propose(drafts, [0] * 4):
        pass
    assert model.most <= 10


def test_a_full_pool_evicts_the_draft_that_was_not_used_for_longest() -> None:
    model = FunctionModel(num_blocks=8, block_size=4)
    source = ModelSource(model, 64)
    drafts = [Draft([number] * 11) for number in range(3)]
    for draft in drafts[:2]:
        propose(source, draft, 2)
    propose(source, drafts[0], 2)
    propose(source, drafts[2], 2)
    assert [id(draft) in source._live for draft in drafts] == [True, False, True]
    assert propose(source, drafts[1], 2) == plain(FunctionModel(), drafts[1].tokens, 2), (
        "an evicted draft is computed again"
    )


def test_drafts_of_one_call_never_evict_each_other() -> None:
    model = FunctionModel(num_blocks=8, block_size=4)
    source = ModelSource(model, 64)
    drafts = [Draft([number] * 11) for number in range(4)]
    answers = source.propose(drafts, [2] * 4)
    source.check_integrity()
    assert None not in answers, "nothing to wait for while the others are there"
    assert [len(answer.tokens) for answer in answers if answer] == [2, 2, 0, 0]
    for draft in drafts[:2]:
        source.learn(draft, None)
    assert [len(answer.tokens) for answer in source.propose(drafts[2:], [2] * 2) if answer] == [
        2,
        2,
    ]


def test_what_cannot_fit_costs_nobody_his_cache() -> None:
    model = FunctionModel(num_blocks=8, block_size=4)
    source = ModelSource(model, 64)
    small, huge = Draft([1] * 11), Draft([2] * 50)
    propose(source, small, 2)
    assert propose(source, huge, 2) == []
    assert id(small) in source._live


@pytest.mark.parametrize(("length", "most"), [(27, 4), (30, 3), (31, 2), (32, 1), (33, 0), (40, 0)])
def test_drafts_end_where_the_models_context_ends(length: int, most: int) -> None:
    model = FunctionModel(context=32, num_blocks=64)
    source = ModelSource(model, 64)
    draft = Draft([1] * length)
    drafted = propose(source, draft, 4)
    assert len(drafted) == most
    settle(source, draft, drafted, len(drafted), 2)
    propose(source, draft, 4)
    source.learn(draft, None)
    model.pool.check_integrity([])


@pytest.mark.parametrize("place", [0, 5, 19])
def test_a_token_that_the_model_does_not_have_means_no_drafts(place: int) -> None:
    model = FunctionModel(vocab_size=50)
    source = ModelSource(model, 8)
    tokens = [1] * 20
    tokens[place] = 50
    assert propose(source, Draft(tokens), 4) == []
    assert propose(source, Draft([1, 2, 3]), 4) == plain(model, [1, 2, 3], 4)


def test_bad_logits_end_a_proposal_and_only_that_one() -> None:
    def following(digest: int, position: int, token: int) -> int:
        return BAD_LOGITS if token == 13 else token + 1

    source = ModelSource(FunctionModel(following), 64)
    drafts = [Draft([10]), Draft([13]), Draft([20])]
    expected = [[11, 12, 13], [], [21, 22, 23, 24, 25, 26]]
    assert source.propose(drafts, [6] * 3) == [Drafted(tokens) for tokens in expected]
    source.check_integrity()


def test_ended_drafts_leave_the_pool_empty() -> None:
    model = FunctionModel()
    source = ModelSource(model, 64)
    drafts = [Draft([number] * 9) for number in range(5)]
    source.propose(drafts, [3] * 5)
    for draft in drafts:
        source.learn(draft, None)
    assert model.pool.num_free == model.pool.num_blocks
    assert source._live == {}
