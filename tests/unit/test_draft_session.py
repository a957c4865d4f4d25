"""A draft session follows the committed tokens, or knows that it has to ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_broker.digest import extend
from pilotfish_broker.messages import Open, Proposal, Sync, Verdict
from pilotfish_workers.draft.session import DraftSession
from pilotfish_workers.draft.source import Drafted
from pilotfish_workers.speculative.history import History
from pilotfish_workers.speculative.law import SparseLaw
from tests.worker_kit import drafting

PROMPT = [1, 2, 3]
HANDLE = 77


def synced(output: list[int] | None = None, k: int = 4, **params: Any) -> DraftSession:
    session = drafting(PROMPT, output or [], **params)
    assert session.on_sync(Sync("job", 1, HANDLE, len(output or []), [], k)) is not None
    return session


def output(session: DraftSession) -> list[int]:
    return session.draft.tokens[len(PROMPT) :]


def digests_are_right(session: DraftSession) -> bool:
    return session.digests == [
        extend(0, session.draft.tokens[: len(PROMPT) + count])
        for count in range(session.committed + 1)
    ]


def test_it_opens_from_what_the_record_already_holds() -> None:
    session = drafting(PROMPT, [7, 8])
    assert session.open_frame("pf:inbox:d") == Open("job", 1, "pf:inbox:d", 2)


def test_a_proposal_names_the_prefix_it_continues() -> None:
    session = synced([7, 8])
    assert session.propose(Drafted([9])) == Proposal(HANDLE, 2, extend(0, [1, 2, 3, 7, 8]), [9])
    assert session.k == 0, "one proposal a question"


def test_a_proposal_carries_the_law_of_each_token() -> None:
    laws = [
        SparseLaw(np.array([9, 4]), np.array([3, 1], dtype=np.float32)),
        SparseLaw(np.array([5]), np.array([0.25], dtype=np.float32)),
    ]
    proposal = synced().propose(Drafted([4, 5], laws))
    assert proposal.tokens == [4, 5]
    back = [SparseLaw.from_bytes(raw) for raw in proposal.q or ()]
    assert [law.ids.tolist() for law in back] == [[9, 4], [5]]
    assert [law.weights.tolist() for law in back] == [[3, 1], [0.25]]


def test_tokens_that_were_certain_travel_without_laws() -> None:
    assert synced().propose(Drafted([4, 5])).q is None


def test_it_rests_only_while_nothing_is_asked_or_awaited() -> None:
    session = drafting(PROMPT, [7])
    assert not session.is_resting, "it is not prepared"
    session.is_prepared, session.is_opened = True, True
    assert not session.is_resting, "an Open is to be answered"
    session.on_sync(Sync("job", 1, HANDLE, 1, [], 0))
    assert session.is_resting
    session.on_sync(Sync("job", 1, HANDLE, 1, [8], 2))
    assert not session.is_resting, "a proposal is wanted"
    session.propose(Drafted([9]))
    assert not session.is_resting, "a verdict is awaited"
    session.on_verdict(Verdict(HANDLE, 2, 1, 5, 0))
    assert session.is_resting


def test_without_a_handle_nothing_can_be_proposed() -> None:
    with pytest.raises(ValueError, match="no handle"):
        drafting().propose(Drafted([1]))


@pytest.mark.parametrize(
    ("accepted", "token", "expected", "num_valid"),
    [(0, 5, [5], 3), (1, 5, [10, 5], 4), (3, 13, [10, 11, 12, 13], 6)],
    ids=["nothing", "one", "all, with the bonus"],
)
def test_a_verdict_says_which_of_the_proposal_stands(
    accepted: int, token: int, expected: list[int], num_valid: int
) -> None:
    session = synced()
    session.propose(Drafted([10, 11, 12]))
    assert session.on_verdict(Verdict(HANDLE, 0, accepted, token, 2)) == num_valid
    assert output(session) == expected
    assert (session.k, session.proposed) == (2, None)
    assert (session.rounds, session.num_drafted, session.num_accepted) == (1, 3, accepted)
    assert digests_are_right(session)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(Verdict(HANDLE, 1, 0, 5, 2), id="of a later round: one was lost"),
        pytest.param(Verdict(HANDLE, 0, 4, 5, 2), id="accepts more than was proposed"),
    ],
)
def test_a_verdict_that_does_not_fit_changes_nothing_and_asks(frame: Verdict) -> None:
    session = synced([])
    session.propose(Drafted([10, 11, 12]))
    assert session.on_verdict(frame) is None
    assert output(session) == []
    assert session.proposed == [10, 11, 12]


def test_a_copy_of_a_verdict_changes_nothing() -> None:
    session = synced()
    session.propose(Drafted([10]))
    frame = Verdict(HANDLE, 0, 1, 11, 2)
    session.on_verdict(frame)
    assert session.on_verdict(frame) is None
    assert output(session) == [10, 11]


@pytest.mark.parametrize(
    ("base", "tokens", "expected", "num_valid"),
    [
        pytest.param(2, [9], [7, 8, 9], 5, id="goes on"),
        pytest.param(2, [], [7, 8], 5, id="nothing new"),
        pytest.param(1, [8, 9], [7, 8, 9], 5, id="overlaps and agrees"),
        pytest.param(0, [7, 6, 5], [7, 6, 5], 4, id="from the start, and differs"),
        pytest.param(2, [50, 51, 9], [7, 8, 50, 51, 9], 7, id="agrees with the proposal"),
        pytest.param(2, [50, 9], [7, 8, 50, 9], 6, id="agrees with half of the proposal"),
        pytest.param(0, [], [], 3, id="takes everything back"),
    ],
)
def test_a_sync_replaces_what_follows_its_base(
    base: int, tokens: list[int], expected: list[int], num_valid: int
) -> None:
    session = synced([7, 8])
    session.propose(Drafted([50, 51]))
    assert session.on_sync(Sync("job", 1, HANDLE, base, tokens, 3)) == num_valid
    assert output(session) == expected
    assert (session.k, session.proposed) == (3, None)
    assert digests_are_right(session)


def test_a_sync_from_beyond_what_is_known_asks_for_more() -> None:
    session = synced([7])
    assert session.on_sync(Sync("job", 1, HANDLE, 2, [9], 3)) is None
    assert output(session) == [7]
    assert session.k == 4, "the question before still stands"


def test_no_more_than_the_agreed_most_is_ever_drafted() -> None:
    session = synced(k=1000)
    assert session.k <= 16


FRAMES = st.one_of(
    st.tuples(st.just("round"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("plain"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("sync"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("old verdict"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("old sync"), st.integers(0, 30), st.booleans()),
)


class Remembering:
    """A constraint that knows its output and takes only what continues it."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> Any:
        assert list(output[: len(self.output)]) == self.output, "it was not told of the change"
        self.output = list(output)
        return np.zeros((len(drafted) + 1, 1), dtype=np.int32)

    def rewind(self) -> None:
        self.output = []


def sampler_is_right(session: DraftSession) -> bool:
    """It counts and constrains as one that has never seen other tokens."""
    sampler = session.draft.sampler
    assert sampler is not None
    sampler.masks([])
    fresh = History(list(session.draft.tokens), session.num_prompt)
    expected, counted = (
        dict(zip(ids.tolist(), counts.tolist(), strict=True))
        for ids, counts in (fresh.counts([]), sampler.history.counts([]))
    )
    return sampler.tokens is session.draft.tokens and counted == expected


class Verifier:
    """The other side: commits, and says what it committed in frames that may get lost."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.tokens: list[int] = []
        self.sent: list[Any] = []
        self.has_asked = False

    def deliver(self, frame: Any, arrives: bool) -> None:
        self.sent.append(frame)
        if arrives:
            self.hand_over(frame)

    def hand_over(self, frame: Any) -> None:
        session = self.session
        answer = session.on_sync(frame) if isinstance(frame, Sync) else session.on_verdict(frame)
        if answer is None:
            self.has_asked = True
        elif isinstance(frame, Sync) and frame.base + len(frame.tokens) == len(self.tokens):
            self.has_asked = False

    def step(self, kind: str, number: int, arrives: bool) -> None:
        base = len(self.tokens)
        if kind == "round":
            drafted = self.session.proposed
            if drafted is None and self.session.k:
                start = 100 + self.session.committed  # a source repeats itself
                drafted = [start + place for place in range(self.session.k)]
                proposal = self.session.propose(Drafted(drafted))
                if (proposal.base, proposal.digest) != (base, extend(0, PROMPT + self.tokens)):
                    return  # refused
            if drafted is None or self.session.committed != base:
                return
            accepted = min(number, len(drafted))
            self.tokens += [*drafted[:accepted], 50 + number]
            self.deliver(Verdict(HANDLE, base, accepted, 50 + number, 4), arrives)
        elif kind == "plain":
            self.tokens += [number] * number
        elif kind == "sync":
            start = min(number, base)
            self.deliver(Sync("job", 1, HANDLE, start, self.tokens[start:], 4), arrives)
        else:
            wanted = Verdict if kind == "old verdict" else Sync
            old = [frame for frame in self.sent if isinstance(frame, wanted)]
            if old and arrives:
                self.hand_over(old[number % len(old)])


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(FRAMES, max_size=30))
def test_after_any_frames_it_holds_committed_tokens_or_a_prefix_that_heals(
    steps: list[tuple[str, int, bool]],
) -> None:
    """Lost, repeated and old frames in any order: what it holds is always a prefix of what is
    committed, its digests tell the truth, and one Sync from there puts everything right."""
    session = synced(temperature=1.0, presence_penalty=0.5)
    assert session.draft.sampler is not None
    session.draft.sampler.constraint = Remembering()
    verifier = Verifier(session)
    for kind, number, arrives in steps:
        verifier.step(kind, number, arrives)
        assert output(session) == verifier.tokens[: session.committed], "not what was committed"
        assert digests_are_right(session)
        assert sampler_is_right(session)
    base = min(session.open_frame("inbox").base, len(verifier.tokens))
    verifier.hand_over(Sync("job", 1, HANDLE, base, verifier.tokens[base:], 4))
    assert output(session) == verifier.tokens
