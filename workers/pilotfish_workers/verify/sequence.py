"""One active job in the verify engine: its tokens, its place in the KV pool, its draft session."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from pilotfish_broker.spec import JobSpec
from pilotfish_workers.verify.draft_length import DraftLength


class Detokenizer(Protocol):
    """Turns token ids into text, piece by piece, never half a character."""

    def push(self, ids: Tokens[int]) -> str: ...
    def flush(self) -> str: ...


@dataclass(slots=True, eq=False)
class Session:
    """A draft worker's session for one sequence.

    Attributes:
        handle: stands for (job, epoch, draft worker) in frames.
        known: committed output tokens that the drafter will know once it has read our frames.
        is_asked: a proposal is outstanding.
        asked: base → when a proposal for it was asked for (monotonic seconds), recent ones only.
        wants_sync: the drafter asked for the tokens from `known` on.
        num_late: rounds in a row that went ahead without the proposal they had asked for.
    """

    handle: int
    inbox: str
    worker: str
    known: int
    is_asked: bool = False
    asked: dict[int, float] = field(default_factory=dict)
    wants_sync: bool = True
    num_late: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one job on this worker; the engine thread owns it.

    Attributes:
        tokens: prompt, then output; the last committed token is the last one.
        limit: most output tokens, at least 1.
        digest: prefix digest of `tokens`.
        blocks: block table; num_computed tokens of it hold KV of `tokens`.
        drafted: proposal that the next pass verifies.
        await_until: no pass before this time (monotonic seconds) unless a proposal arrives.
        in_flight: a round is being committed.
    """

    job: str
    epoch: int
    spec: JobSpec
    tokens: list[int]
    num_prompt: int
    limit: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    digest: int
    draft_length: DraftLength
    future: Future[dict[str, Any]] = field(default_factory=Future)
    arrival: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: list[int] = field(default_factory=list)
    session: Session | None = None
    await_until: float | None = None
    in_flight: bool = False
    is_cancelled: bool = False
    rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def committed(self) -> int:
        """Output tokens so far, a round in flight included."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.limit - self.committed

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed before the next token is known; 1 in decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def most_drafts(self) -> int:
        """Drafted tokens that can matter: the round commits one token of its own."""
        return max(0, self.remaining - 1)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sequences by who is served first and preempted last."""
        return (-self.spec.priority, self.arrival)

    def is_ready(self, now: float) -> bool:
        """Whether the next pass may advance it."""
        return self.await_until is None or bool(self.drafted) or now >= self.await_until
