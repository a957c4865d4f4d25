"""The draft sessions of one verify worker: who drafts for whom, and how long an answer takes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection

from pilotfish_broker.messages import Close, Open, Proposal, Sync
from pilotfish_broker.settings import MAX_DRAFT_TOKENS
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.verify.sequence import Sequence, Session

FIRST_WAIT_SECONDS = 0.5
LEAST_WAIT_SECONDS = 0.02
MOST_WAIT_SECONDS = 2.0
PATIENCE = 4.0
SMOOTHING = 0.2
ASKS_KEPT = 64

log = logging.getLogger(__name__)


class Sessions:
    """Assigns handles, matches proposals to sequences, and keeps the recent draft latency.

    Handles start at a random number, so that a frame meant for an earlier incarnation of this
    worker, or for another worker, matches nothing here.
    """

    def __init__(self) -> None:
        self._next = secrets.randbits(48)
        self._by_handle: dict[int, Sequence] = {}
        self._latency: float | None = None  # seconds from asking to the proposal, smoothed

    @property
    def num_open(self) -> int:
        """Sessions that are open now."""
        return len(self._by_handle)

    def open(self, sequence: Sequence, frame: Open) -> Close | None:
        """Answer an Open: a new session, a Sync of the one it has, or a refusal.

        The first Open wins; a further one of the same drafter asks for a Sync from `base` on.
        """
        session = sequence.session
        base = min(frame.base, sequence.committed)
        if session is not None and session.inbox == frame.inbox:
            if session.is_asked and session.known == base:
                return None  # it was asked already; this Open waited behind a long pass
            session.known, session.wants_sync, session.is_asked = base, True, False
            return None
        if session is not None:
            return Close(frame.job, frame.epoch, 0, "another draft worker was first")
        self._next += 1
        worker = frame.inbox.rpartition(":")[2]
        sequence.session = Session(self._next, frame.inbox, worker, base)
        self._by_handle[self._next] = sequence
        return None

    def close(self, sequence: Sequence) -> Session | None:
        """Forget a sequence's session; returns it."""
        session, sequence.session = sequence.session, None
        sequence.await_until = None
        if session is not None:
            self._by_handle.pop(session.handle, None)
        return session

    def find(self, handle: int) -> Sequence | None:
        """The sequence of a session."""
        return self._by_handle.get(handle)

    def of_dead_workers(self, alive: Collection[str]) -> list[Sequence]:
        """Sequences whose draft worker's lease is gone."""
        return [
            sequence
            for sequence in self._by_handle.values()
            if sequence.session is not None and sequence.session.worker not in alive
        ]

    def take(self, sequence: Sequence, frame: Proposal, vocab_size: int, now: float) -> bool:
        """Use a proposal for the next pass. False: it does not continue the committed prefix.

        Whether a drafted token gets judged may depend on the tokens before it and on earlier
        rounds only: dropping one for what it is would change the output's law (Leviathan et al.,
        arXiv 2211.17192, has the test see every draft). So a token that the target does not have
        is kept, and rejected by the rule; what follows it could never count.
        """
        session = sequence.session
        if session is None:
            return False
        self._observe(session, frame.base, now)
        if frame.base != sequence.committed or frame.digest != sequence.digest:
            return False
        if not session.is_asked:
            return False  # a copy, or an answer to a question that was withdrawn
        session.is_asked, session.num_late = False, 0
        sequence.await_until = None
        drafted = _up_to_unknown(frame.tokens[:MAX_DRAFT_TOKENS], vocab_size)
        try:
            laws = _laws(sequence, drafted, frame)
        except ValueError as error:
            log.warning("job %s: a proposal without meaning: %s", sequence.job, error)
            drafted, laws = [], None
        sequence.drafted, sequence.laws = drafted, laws
        return True

    def ask(self, sequence: Sequence, now: float) -> None:
        """Note that a proposal was asked for, and until when the sequence waits for it."""
        session = sequence.session
        if session is None:
            return
        session.is_asked = True
        session.wants_sync = False
        session.known = sequence.committed
        session.asked[sequence.committed] = now
        if len(session.asked) > ASKS_KEPT:
            del session.asked[next(iter(session.asked))]
        deadline = now + self.wait_seconds
        if sequence.await_until is not None:  # asking again must not make the job wait longer
            deadline = min(deadline, sequence.await_until)
        sequence.await_until = deadline

    @property
    def wait_seconds(self) -> float:
        """How long a sequence waits for its proposal before it decodes plainly."""
        if self._latency is None:
            return FIRST_WAIT_SECONDS
        return min(max(PATIENCE * self._latency, LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS)

    def sync(self, sequence: Sequence, k: int) -> Sync:
        """The committed tokens that the drafter does not know yet."""
        session = sequence.session
        if session is None:
            raise ValueError(f"job {sequence.job} has no session")
        tokens = sequence.tokens[sequence.num_prompt + session.known :]
        return Sync(sequence.job, sequence.epoch, session.handle, session.known, tokens, k)

    def _observe(self, session: Session, base: int, now: float) -> None:
        """Late proposals count too; otherwise patience would never grow to a slower drafter."""
        asked_at = session.asked.pop(base, None)
        if asked_at is not None:
            seconds, old = now - asked_at, self._latency
            self._latency = seconds if old is None else old + SMOOTHING * (seconds - old)


def _up_to_unknown(tokens: list[int], vocab_size: int) -> list[int]:
    """Drafted ids up to and with the first that the target does not have (padded vocabularies
    differ)."""
    for index, token in enumerate(tokens):
        if token >= vocab_size:
            return tokens[: index + 1]
    return tokens


def _laws(sequence: Sequence, drafted: list[int], frame: Proposal) -> list[SparseLaw] | None:
    """The laws that the drafted tokens were drawn from, where the job's rule looks at them.

    Raises:
        ValueError: they are no laws, or cannot have given these tokens.
    """
    if frame.q is None or sequence.sampler.rule not in ("rejection", "block"):
        return None
    laws = [SparseLaw.from_bytes(raw) for raw in frame.q[: len(drafted)]]
    for token, law in zip(drafted, laws, strict=True):
        if law.probability(token) <= 0:
            raise ValueError(f"token {token} was drafted from a law that does not have it")
    return laws
