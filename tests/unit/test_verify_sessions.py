"""Draft sessions of a verify worker: who may draft, and which proposals are used."""

from __future__ import annotations

import pytest

from pilotfish_broker.digest import extend
from pilotfish_broker.messages import Close, Frame, Open, Proposal, Sync, Verdict
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.verify.committer import Round
from pilotfish_workers.verify.drafting import MOST_LATE, Drafting
from pilotfish_workers.verify.sequence import Sequence
from pilotfish_workers.verify.sessions import MOST_WAIT_SECONDS, Sessions
from tests.worker_kit import active

HERE = "pf:inbox:d1"
THERE = "pf:inbox:d2"
VOCABULARY = 50


def opened(sequence: Sequence, sessions: Sessions, inbox: str = HERE) -> Close | None:
    return sessions.open(sequence, Open(sequence.job, sequence.epoch, inbox, sequence.committed))


def proposal(sequence: Sequence, tokens: list[int], **changes: int) -> Proposal:
    assert sequence.session is not None
    fields = {
        "session": sequence.session.handle,
        "base": sequence.committed,
        "digest": sequence.digest,
    }
    return Proposal(**{**fields, **changes}, tokens=tokens)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def sequence(sessions: Sessions) -> Sequence:
    """With an open session that has been asked for a proposal."""
    sequence = active(output=[4, 5], limit=20)
    assert opened(sequence, sessions) is None
    sessions.ask(sequence, now=0.0)
    return sequence


class TestOpening:
    def test_the_first_open_wins(self, sessions: Sessions, sequence: Sequence) -> None:
        session = sequence.session
        refusal = opened(sequence, sessions, THERE)
        assert isinstance(refusal, Close)
        assert (refusal.job, refusal.epoch, refusal.session) == (sequence.job, sequence.epoch, 0)
        assert sequence.session is session
        assert sessions.num_open == 1

    def test_a_further_open_of_the_same_drafter_asks_for_a_sync(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        assert sequence.session is not None
        handle = sequence.session.handle
        assert sessions.open(sequence, Open(sequence.job, 1, HERE, 1)) is None
        assert sequence.session.handle == handle
        assert sequence.session.wants_sync
        frame = sessions.sync(sequence, 3)
        assert frame == Sync(sequence.job, 1, handle, 1, [5], 3)

    def test_an_open_from_beyond_the_committed_tokens_counts_as_all_of_them(
        self, sessions: Sessions
    ) -> None:
        sequence = active(output=[4])
        sessions.open(sequence, Open(sequence.job, 1, HERE, 99))
        assert sessions.sync(sequence, 1).base == 1

    def test_handles_of_two_incarnations_do_not_meet(self, sequence: Sequence) -> None:
        other = active()
        opened(other, Sessions())
        assert sequence.session is not None
        assert other.session is not None
        assert other.session.handle != sequence.session.handle

    def test_a_closed_session_leaves_nothing_behind(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        closed = sessions.close(sequence)
        assert closed is not None
        assert sessions.find(closed.handle) is None
        assert sessions.num_open == 0
        assert sequence.is_ready(0.0), "nobody waits for a proposal that will not come"
        assert opened(sequence, sessions, THERE) is None

    def test_sessions_of_dead_workers_are_named(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        other = active(job="other")
        opened(other, sessions, THERE)
        assert sessions.of_dead_workers({"d2", "d3"}) == [sequence]


class TestProposals:
    def test_one_that_continues_the_committed_prefix_is_used_at_once(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        assert not sequence.is_ready(0.001)
        assert sessions.take(sequence, proposal(sequence, [7, 8]), VOCABULARY, 0.001)
        assert sequence.drafted == [7, 8]
        assert sequence.is_ready(0.001)

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"base": 1}, id="late: the round went ahead"),
            pytest.param({"base": 3}, id="ahead of what is committed"),
            pytest.param({"digest": 12345}, id="of other tokens"),
        ],
    )
    def test_one_that_does_not_fit_changes_nothing(
        self, sessions: Sessions, sequence: Sequence, changes: dict[str, int]
    ) -> None:
        assert not sessions.take(sequence, proposal(sequence, [7], **changes), VOCABULARY, 0.001)
        assert sequence.drafted == []
        assert not sequence.is_ready(0.001), "the right one may still come"
        assert sessions.take(sequence, proposal(sequence, [8]), VOCABULARY, 0.002)

    def test_a_copy_is_refused(self, sessions: Sessions, sequence: Sequence) -> None:
        frame = proposal(sequence, [7])
        assert sessions.take(sequence, frame, VOCABULARY, 0.001)
        assert not sessions.take(sequence, frame, VOCABULARY, 0.001)
        assert sequence.drafted == [7]

    def test_one_that_answers_a_withdrawn_question_is_refused(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        frame = proposal(sequence, [7])
        sessions.open(sequence, Open(sequence.job, 1, HERE, 1))  # it knows less than was thought
        assert not sessions.take(sequence, frame, VOCABULARY, 0.001)

    def test_an_open_that_waited_behind_a_long_pass_withdraws_nothing(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        frame = proposal(sequence, [7])
        for _ in range(3):
            assert opened(sequence, sessions) is None
        assert sequence.session is not None
        assert not sequence.session.wants_sync
        assert sessions.take(sequence, frame, VOCABULARY, 0.001)

    @pytest.mark.parametrize(
        ("tokens", "kept"),
        [
            ([49, 50, 1], [49, 50]),
            ([1000], [1000]),
            ([0, 1, 2], [0, 1, 2]),
            ([1] * 40, [1] * 16),
        ],
    )
    def test_the_first_id_that_the_target_does_not_have_is_the_last_that_is_judged(
        self, sessions: Sessions, sequence: Sequence, tokens: list[int], kept: list[int]
    ) -> None:
        """Cut off before its test, it would change the output's law for what it is."""
        assert sessions.take(sequence, proposal(sequence, tokens), VOCABULARY, 0.001)
        assert sequence.drafted == kept


class TestPatience:
    def test_it_follows_the_measured_latency_within_limits(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        assert sessions.take(sequence, proposal(sequence, [1]), VOCABULARY, 0.1)
        assert sessions.wait_seconds == pytest.approx(0.4)
        for step in range(50):
            sessions.ask(sequence, float(step))
            sessions.take(sequence, proposal(sequence, [1]), VOCABULARY, step + 1e-6)
        assert 0 < sessions.wait_seconds < 0.05

    def test_a_late_proposal_makes_it_grow(self, sessions: Sessions, sequence: Sequence) -> None:
        late = proposal(sequence, [1])
        sequence.tokens.append(9)
        assert not sessions.take(sequence, late, VOCABULARY, 0.3)
        assert sessions.wait_seconds == pytest.approx(1.2)

    def test_one_terrible_latency_does_not_hold_jobs_up(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        sessions.take(sequence, proposal(sequence, [1]), VOCABULARY, 3600.0)
        assert sessions.wait_seconds == MOST_WAIT_SECONDS

    def test_asking_again_within_a_round_does_not_make_it_longer(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        deadline = sequence.await_until
        assert deadline is not None
        for step in range(1, 100):
            sessions.ask(sequence, step * deadline / 100)
        assert sequence.is_ready(deadline)

    def test_questions_that_nobody_answers_are_not_kept_for_ever(
        self, sessions: Sessions, sequence: Sequence
    ) -> None:
        for token in range(500):
            sequence.tokens.append(token)
            sessions.ask(sequence, float(token))
        assert sequence.session is not None
        assert len(sequence.session.asked) <= 64


class Talk:
    """A Drafting with one sequence, and the frames it sends."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.jobs = {sequence.job: sequence}
        self.drafting = Drafting(self.jobs, VOCABULARY, "")

    def receive(self, *frames: Frame) -> list[Frame]:
        round_ = Round()
        self.drafting.receive(frames, round_)
        self.drafting.sync_waiting(self.jobs.values(), round_)
        return [frame for batch in round_.frames.values() for frame in batch]

    def decode(self, num_accepted: int = 0, token: int = 9) -> list[Frame]:
        """One round over what is drafted."""
        sequence, base = self.sequence, self.sequence.committed
        drafted, sequence.drafted = sequence.drafted, []
        outcome = Outcome(num_accepted, token)
        tokens = outcome.tokens(drafted)
        sequence.tokens.extend(tokens)
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.digest = extend(sequence.digest, tokens)
        sequence.await_until = None
        sequence.draft_length.learn(len(drafted), num_accepted)
        round_ = Round()
        frame = self.drafting.next_frame(sequence, base, len(drafted), outcome, round_)
        loose = [frame for batch in round_.frames.values() for frame in batch]
        return loose + ([] if frame is None else [frame])


@pytest.fixture
def talk() -> Talk:
    sequence = active(output=[4, 5], limit=10_000)
    sequence.num_computed = len(sequence.tokens) - 1
    talk = Talk(sequence)
    talk.receive(Open(sequence.job, 1, HERE, 2))
    return talk


class TestTalk:
    def test_an_open_is_answered_with_a_sync_that_asks(self) -> None:
        sequence = active(output=[4, 5], limit=10_000)
        sequence.num_computed = 4
        frames = Talk(sequence).receive(Open(sequence.job, 1, HERE, 1))
        assert [type(frame) for frame in frames] == [Sync]
        assert isinstance(frames[0], Sync)
        assert frames[0].tokens == [5]
        assert frames[0].k > 0

    @pytest.mark.parametrize(
        ("job", "epoch"), [("other", 1), ("job", 2), ("job", 0)], ids=["job", "newer", "older"]
    )
    def test_an_open_for_another_job_or_epoch_is_refused(self, job: str, epoch: int) -> None:
        talk = Talk(active())
        frames = talk.receive(Open(job, epoch, HERE, 0))
        assert [(type(frame), frame.epoch) for frame in frames] == [(Close, epoch)]  # type: ignore[union-attr]
        assert talk.sequence.session is None

    def test_an_open_for_a_job_without_speculation_is_refused(self) -> None:
        frames = Talk(active(speculation="off")).receive(Open("job", 1, HERE, 0))
        assert [type(frame) for frame in frames] == [Close]

    def test_a_round_over_a_proposal_is_answered_with_its_verdict(self, talk: Talk) -> None:
        talk.receive(proposal(talk.sequence, [7, 8]))
        frames = talk.decode(num_accepted=1, token=9)
        assert frames == [Verdict(talk.sequence.session.handle, 2, 1, 9, frames[0].k)]  # type: ignore[union-attr]

    def test_a_round_without_the_awaited_proposal_rests_and_then_syncs(self, talk: Talk) -> None:
        assert talk.decode() == []
        frames = talk.decode(token=10)
        assert [type(frame) for frame in frames] == [Sync]
        assert isinstance(frames[0], Sync)
        assert (frames[0].base, frames[0].tokens) == (2, [9, 10])

    def test_frames_of_unknown_sessions_are_counted_and_dropped(self, talk: Talk) -> None:
        assert talk.receive(proposal(talk.sequence, [1], session=1)) == []
        assert talk.receive(Verdict(1, 2, 0, 1, 1)) == []
        assert talk.drafting.num_stale == 2
        assert talk.sequence.drafted == []

    def test_a_proposal_of_a_closed_session_is_dropped(self, talk: Talk) -> None:
        frame = proposal(talk.sequence, [1])
        round_ = Round()
        talk.drafting.close(talk.sequence, "test", round_)
        talk.receive(frame)
        assert talk.sequence.drafted == []

    def test_a_wrong_digest_is_healed_by_all_committed_tokens(self, talk: Talk) -> None:
        talk.receive(proposal(talk.sequence, [7], digest=1))
        frames = talk.decode() or talk.decode()
        assert isinstance(frames[0], Sync)
        assert frames[0].base == 0
        assert frames[0].tokens == talk.sequence.tokens[talk.sequence.num_prompt :]

    def test_a_drafter_that_never_fits_does_not_keep_the_job_waiting(self, talk: Talk) -> None:
        for _ in range(100):
            talk.receive(proposal(talk.sequence, [7], digest=1))
            assert talk.sequence.is_ready(0.0), "the job waits for a drafter that cannot help it"
            talk.decode()

    def test_a_drafter_that_only_ever_opens_does_not_keep_the_job_waiting(self, talk: Talk) -> None:
        deadline = talk.sequence.await_until
        assert deadline is not None
        for _ in range(50):
            talk.receive(Open(talk.sequence.job, 1, HERE, 2))
        assert talk.sequence.is_ready(deadline)

    def test_empty_proposals_rest_and_come_back(self, talk: Talk) -> None:
        ks = []
        for _ in range(40):
            if talk.sequence.session is not None and talk.sequence.session.is_asked:
                talk.receive(proposal(talk.sequence, []))
            frames = talk.decode()
            ks.append(bool(frames))
        assert 0 < sum(ks[-10:]) <= 4
        assert talk.sequence.session is not None

    def test_a_session_that_never_answers_is_closed_in_the_end(self, talk: Talk) -> None:
        frames: list[Frame] = []
        for _ in range(1 << MOST_LATE):
            frames = talk.decode()
            if talk.sequence.session is None:
                break
        assert talk.sequence.session is None, "a drafter that forgot the session holds it for ever"
        assert [type(frame) for frame in frames] == [Close]

    def test_one_answer_keeps_a_session_open(self, talk: Talk) -> None:
        answers = 0
        for step in range(2000):
            asked = talk.decode()
            if asked and step >= 100 * answers:
                answers += 1
                talk.receive(proposal(talk.sequence, [1]))
        assert answers > 5
        assert talk.sequence.session is not None

    def test_a_dead_workers_session_is_closed_and_it_is_told_in_case_it_lives(
        self, talk: Talk
    ) -> None:
        round_ = Round()
        talk.drafting.close_dead({"d2"}, round_)
        assert talk.sequence.session is None
        assert [type(frame) for frame in round_.frames[HERE]] == [Close]

    def test_a_drafter_may_close_its_session_and_only_its_own(self, talk: Talk) -> None:
        session = talk.sequence.session
        assert session is not None
        talk.receive(Close(talk.sequence.job, 1, session.handle + 1, "not this one"))
        assert talk.sequence.session is session
        talk.receive(Close(talk.sequence.job, 2, session.handle, "another epoch"))
        assert talk.sequence.session is session
        talk.receive(Close(talk.sequence.job, 1, session.handle, "leaving"))
        assert talk.sequence.session is None
