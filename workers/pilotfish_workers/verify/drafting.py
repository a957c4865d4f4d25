"""The verify engine's talk with draft workers: their frames in, verdicts and syncs out."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping

from pilotfish_broker.messages import Close, Frame, Open, Proposal, Verdict
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.verify.committer import Round
from pilotfish_workers.verify.sequence import Sequence
from pilotfish_workers.verify.sessions import Sessions

LATE_REST_ROUNDS = 64
EMPTY_REST_ROUNDS = 4
MOST_LATE = 8  # proposals in a row; then the session is taken for dead

log = logging.getLogger(__name__)


class Drafting:
    """Handles frames against the active sequences; answers go into the round under way.

    Args:
        active: the engine's jobs by id; read only.
        vocab_size: drafted ids from here up are not the target's.
        inbox_prefix: an Open that names another kind of key is dropped: nothing of ours would
            survive a write to it.
    """

    def __init__(self, active: Mapping[str, Sequence], vocab_size: int, inbox_prefix: str) -> None:
        self._active = active
        self._vocab_size = vocab_size
        self._inbox_prefix = inbox_prefix
        self._sessions = Sessions()
        self.num_stale = 0  # frames that matched no session or no committed prefix

    def receive(self, frames: Iterable[Frame], round_: Round) -> None:
        """Take frames from draft workers."""
        for frame in frames:
            match frame:
                case Open():
                    self._on_open(frame, round_)
                case Proposal():
                    self._on_proposal(frame)
                case Close():
                    self._on_close(frame)
                case _:
                    self.num_stale += 1

    def next_frame(
        self, sequence: Sequence, base: int, drafted: int, outcome: Outcome, round_: Round
    ) -> Frame | None:
        """What the drafter is told after a round that began at `base`, with K for the next.

        None while K is 0 or there is no session; a Sync catches the drafter up later.
        """
        session = sequence.session
        if session is None:
            return None
        if session.is_asked:  # the round went ahead without the proposal it had asked for
            sequence.draft_length.miss(LATE_REST_ROUNDS)
            session.num_late += 1
            if session.num_late >= MOST_LATE:  # the drafter may have forgotten it: start afresh
                self.close(sequence, "no proposal came in time", round_)
                return None
        session.is_asked = False
        k = sequence.draft_length.choose(sequence.most_drafts)
        if k == 0:
            return None
        if drafted and not session.wants_sync and session.known == base:
            frame: Frame = Verdict(session.handle, base, outcome.num_accepted, outcome.token, k)
        else:
            frame = self._sessions.sync(sequence, k)
        self._sessions.ask(sequence, time.monotonic())
        return frame

    def sync_waiting(self, sequences: Iterable[Sequence], round_: Round) -> None:
        """Answer the Opens of sequences between two rounds; the others' next commit does it."""
        for sequence in sequences:
            session = sequence.session
            if session is None or not session.wants_sync or sequence.in_flight:
                continue
            if sequence.num_pending != 1 or sequence.drafted:
                continue
            k = sequence.draft_length.choose(sequence.most_drafts)
            if k > 0:
                round_.post(session.inbox, self._sessions.sync(sequence, k))
                self._sessions.ask(sequence, time.monotonic())

    def close(self, sequence: Sequence, reason: str, round_: Round) -> None:
        """End a sequence's session, if it has one, and tell the drafter."""
        session = self._sessions.close(sequence)
        if session is not None:
            frame = Close(sequence.job, sequence.epoch, session.handle, reason)
            round_.post(session.inbox, frame)

    def close_dead(self, alive: Collection[str], round_: Round) -> None:
        """End the sessions whose draft worker is not among `alive`.

        It is told all the same: a worker whose lease only lapsed would keep a session that
        nobody answers.
        """
        for sequence in self._sessions.of_dead_workers(alive):
            log.warning("job %s: its draft worker is gone", sequence.job)
            self.close(sequence, "the draft worker's lease has ended", round_)

    def _on_open(self, frame: Open, round_: Round) -> None:
        if not frame.inbox.startswith(self._inbox_prefix):
            self.num_stale += 1
            return
        sequence = self._active.get(frame.job)
        if sequence is None or sequence.epoch != frame.epoch or sequence.draft_length.is_off:
            reason = "the job is not drafted for here"
            round_.post(frame.inbox, Close(frame.job, frame.epoch, 0, reason))
            return
        refusal = self._sessions.open(sequence, frame)
        if refusal is not None:
            round_.post(frame.inbox, refusal)

    def _on_proposal(self, frame: Proposal) -> None:
        sequence = self._sessions.find(frame.session)
        if sequence is None or sequence.session is None:
            self.num_stale += 1
            return
        if self._sessions.take(sequence, frame, self._vocab_size, time.monotonic()):
            if not sequence.drafted:
                sequence.draft_length.miss(EMPTY_REST_ROUNDS)
            return
        self.num_stale += 1
        if frame.base == sequence.committed and frame.digest != sequence.digest:
            # the drafter holds other tokens than we committed: give it all of them, after a rest,
            # or one whose tokens never fit would keep the job waiting for ever
            session = sequence.session
            session.known, session.wants_sync, session.is_asked = 0, True, False
            sequence.await_until = None
            sequence.draft_length.miss(LATE_REST_ROUNDS)

    def _on_close(self, frame: Close) -> None:
        sequence = self._sessions.find(frame.session)
        if sequence is not None and sequence.epoch == frame.epoch:
            self._sessions.close(sequence)
