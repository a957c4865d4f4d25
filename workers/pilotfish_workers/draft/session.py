"""One draft session: a job in one epoch, as its draft worker sees it. Pure state, no I/O."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pilotfish_broker.digest import extend
from pilotfish_broker.messages import Open, Proposal, Sync, Verdict
from pilotfish_broker.settings import MAX_DRAFT_TOKENS
from pilotfish_workers.draft.source import Draft, Drafted

OPEN_AGAIN_SECONDS = 1.0  # doubled with every Open that nothing answers


@dataclass(slots=True, eq=False)
class DraftSession:
    """State of one session; the draft engine's thread owns it.

    Attributes:
        handle: assigned by the verify worker's first Sync; None until then.
        digests: prefix digests of the prompt and 0, 1, … output tokens.
        k: drafted tokens wanted now; 0 when nothing is to be done.
        proposed: the proposal that a verdict is awaited for.
        is_opened: an Open has been sent since the session was last out of step.
    """

    job: str
    epoch: int
    verify_worker: str
    verify_inbox: str
    num_prompt: int
    draft: Draft
    future: Future[dict[str, Any]] = field(default_factory=Future)
    handle: int | None = None
    digests: list[int] = field(default_factory=list)
    k: int = 0
    proposed: list[int] | None = None
    is_prepared: bool = False
    is_opened: bool = False
    last_frame: float = 0.0
    last_open: float = 0.0
    open_pause: float = OPEN_AGAIN_SECONDS
    rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        tokens = self.draft.tokens
        self.digests = [extend(0, tokens[: self.num_prompt])]
        self._append_digests(tokens[self.num_prompt :])

    @property
    def committed(self) -> int:
        """Committed output tokens known here."""
        return len(self.draft.tokens) - self.num_prompt

    @property
    def is_resting(self) -> bool:
        """Nothing is asked of it, and it waits for no answer: K is 0 for now."""
        is_waiting = self.proposed is not None or self.is_opened or self.handle is None
        return self.is_prepared and self.k == 0 and not is_waiting

    def open_frame(self, inbox: str) -> Open:
        """The frame that opens the session, or asks for a Sync from where it stands."""
        return Open(self.job, self.epoch, inbox, self.committed)

    def propose(self, drafted: Drafted) -> Proposal:
        """Note a proposal and wrap it; empty when the source has no idea."""
        if self.handle is None:
            raise ValueError("the session has no handle yet")
        self.proposed, self.k = drafted.tokens, 0
        self.num_drafted += len(drafted.tokens)
        q = None if drafted.laws is None else [law.to_bytes() for law in drafted.laws]
        return Proposal(self.handle, self.committed, self.digests[-1], drafted.tokens, q)

    def on_sync(self, frame: Sync) -> int | None:
        """Take the committed tokens over.

        Returns:
            how many leading tokens of the old prefix and proposal still stand, or None when the
            frame starts beyond what is known here and an Open has to ask for more.
        """
        self.handle = frame.session
        if frame.base > self.committed:
            return None
        start = self.num_prompt + frame.base
        num_known = len(self.draft.tokens)
        old = self.draft.tokens + (self.proposed or [])
        num_valid = start
        for before, now in zip(old[start:], frame.tokens, strict=False):
            if before != now:
                break
            num_valid += 1
        del self.draft.tokens[start:]
        del self.digests[frame.base + 1 :]
        self.draft.tokens += frame.tokens
        self._append_digests(frame.tokens)
        if num_valid < num_known and self.draft.sampler is not None:
            self.draft.sampler.rewind()
        self.proposed, self.is_opened = None, False
        self.k = min(frame.k, MAX_DRAFT_TOKENS)
        return num_valid

    def on_verdict(self, frame: Verdict) -> int | None:
        """Take a verdict on the outstanding proposal.

        Returns:
            how many leading tokens of prefix and proposal stand, or None when the verdict is not
            about that proposal and an Open has to ask for a Sync.
        """
        proposed = self.proposed
        if proposed is None or frame.base != self.committed or frame.accepted > len(proposed):
            return None
        num_valid = len(self.draft.tokens) + frame.accepted
        tokens = [*proposed[: frame.accepted], frame.token]
        self.draft.tokens += tokens
        self._append_digests(tokens)
        self.proposed, self.k = None, min(frame.k, MAX_DRAFT_TOKENS)
        self.rounds += 1
        self.num_accepted += frame.accepted
        return num_valid

    def summary(self, reason: str) -> dict[str, Any]:
        """What the Celery task returns."""
        return {
            "reason": reason,
            "rounds": self.rounds,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
        }

    def _append_digests(self, tokens: list[int]) -> None:
        for token in tokens:
            self.digests.append(extend(self.digests[-1], (token,)))
