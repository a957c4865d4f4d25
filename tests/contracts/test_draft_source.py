"""What every draft source promises, whatever it drafts by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.draft.ngram import NgramSource
from pilotfish_workers.draft.source import Draft, DraftSource
from tests.worker_kit import FunctionModel


def model_source() -> DraftSource:
    """By a model that repeats itself with a period of three."""
    following = lambda digest, position, token: (position + 1) % 3  # noqa: E731
    return ModelSource(FunctionModel(following, num_blocks=64), prefill_tokens=8)


@pytest.fixture(params=[NgramSource, model_source], ids=["ngram", "model"])
def make(request: pytest.FixtureRequest) -> Callable[[], DraftSource]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def source(make: Callable[[], DraftSource]) -> DraftSource:
    return make()


def patient(source: DraftSource, drafts: list[Draft], ks: list[int]) -> list[list[int]]:
    """Propose again while the source asks for another call."""
    for _ in range(50):
        answers = source.propose(drafts, ks)
        if all(answer is not None for answer in answers):
            return [answer.tokens for answer in answers if answer is not None]
    pytest.fail("the source never gets ready")


def periodic(length: int) -> Draft:
    return Draft([position % 3 for position in range(length)])


@pytest.mark.parametrize("k", [1, 4, 16])
def test_it_continues_periodic_text(source: DraftSource, k: int) -> None:
    draft = periodic(20)
    assert patient(source, [draft], [k]) == [[position % 3 for position in range(20, 20 + k)]]


def test_nothing_is_drafted_where_nothing_is_wanted(source: DraftSource) -> None:
    drafts = [periodic(20), periodic(12)]
    assert patient(source, drafts, [0, 2]) == [[], [0, 1]]


def test_no_drafts_are_no_work(source: DraftSource) -> None:
    assert source.propose([], []) == []


def test_preparing_changes_no_answer(make: Callable[[], DraftSource]) -> None:
    prepared, fresh = make(), make()
    draft = periodic(17)
    patient(prepared, [draft], [0])
    assert patient(prepared, [draft], [5]) == patient(fresh, [periodic(17)], [5])


def test_asking_twice_gives_the_same_answer(source: DraftSource) -> None:
    draft = periodic(17)
    first = patient(source, [draft], [5])
    assert patient(source, [draft], [0]) == [[]]
    assert patient(source, [draft], [5]) == first


def test_the_tokens_of_a_draft_are_never_changed(source: DraftSource) -> None:
    draft = periodic(10)
    patient(source, [draft], [4])
    source.learn(draft, 12)
    assert draft.tokens == periodic(10).tokens


def test_an_ended_draft_can_end_again_and_another_begins(source: DraftSource) -> None:
    draft = periodic(20)
    patient(source, [draft], [4])
    source.learn(draft, None)
    source.learn(draft, None)
    source.learn(periodic(4), 3)
    assert patient(source, [draft], [4]) == [[2, 0, 1, 2]]


def test_ids_that_it_does_not_know_do_no_harm_to_it_or_to_others(source: DraftSource) -> None:
    strange = Draft([5, 1_000_000, 6, 1_000_000, 6])
    other = periodic(12)
    answers = patient(source, [strange, other], [3, 3])
    assert answers[1] == [0, 1, 2]
    assert answers[0] in ([], [1_000_000, 6, 1_000_000])


def test_a_rejection_is_rolled_back(make: Callable[[], DraftSource]) -> None:
    source, fresh = make(), make()
    draft = periodic(20)
    patient(source, [draft], [6])
    draft.tokens += [2, 0, 9]  # two accepted, then a recovered token
    source.learn(draft, 22)
    assert patient(source, [draft], [6]) == patient(fresh, [Draft(list(draft.tokens))], [6])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("verdict"), st.integers(0, 16), st.integers(0, 3)),
        st.tuples(st.just("plain"), st.integers(1, 3), st.integers(0, 3)),
        st.tuples(st.just("back"), st.integers(0, 12), st.integers(0, 3)),
        st.tuples(st.just("again"), st.just(0), st.just(0)),
        st.tuples(st.just("end"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(scripts=st.lists(STEPS, min_size=1, max_size=3), k=st.integers(1, 16))
def test_history_never_changes_an_answer(
    make: Callable[[], DraftSource], scripts: list[Any], k: int
) -> None:
    """Whatever was accepted, rejected, taken back, forgotten: the next proposal is the one that a
    fresh source makes for the same tokens."""
    source = make()
    drafts = [periodic(5 + 4 * number) for number in range(len(scripts))]
    for turn in range(max(map(len, scripts))):
        answers = patient(source, drafts, [k] * len(drafts))
        for draft, answer, script in zip(drafts, answers, scripts, strict=True):
            assert answer == patient(make(), [Draft(list(draft.tokens))], [k])[0]
            assert len(answer) <= k
            if turn < len(script):
                _apply(source, draft, answer, *script[turn])


def _apply(
    source: DraftSource, draft: Draft, drafted: list[int], kind: str, n: int, t: int
) -> None:
    old = draft.tokens + drafted
    if kind == "verdict":
        draft.tokens += [*drafted[:n], t]
    elif kind == "plain":
        draft.tokens += [t] * n
    elif kind == "back":
        del draft.tokens[max(1, len(draft.tokens) - n) :]
    if kind in ("verdict", "plain", "back"):
        same = [a == b for a, b in zip(old, draft.tokens, strict=False)]
        source.learn(draft, same.index(False) if False in same else len(same))
    elif kind == "end":
        source.learn(draft, None)
    if isinstance(source, ModelSource):
        source.check_integrity()
