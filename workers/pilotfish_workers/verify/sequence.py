"""One active job in the verify engine: its tokens, its place in the KV pool, its draft session."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pilotfish_broker.spec import JobSpec
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Sampler
from pilotfish_workers.verify.draft_length import DraftLength
from pilotfish_workers.verify.output_text import OutputText


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
        sampler: chooses its tokens; it holds the token list.
        output: its visible text.
        token_bytes: what a token stands for, for those who want log-probabilities.
        limit: most output tokens, at least 1.
        digest: prefix digest of `tokens`.
        blocks: block table; num_computed tokens of it hold KV of `tokens`.
        drafted: proposal that the next pass verifies. Only its last token may be one that the
            target does not have.
        laws: q for each of `drafted`; None where each was certain, or the rule needs none.
        awaited: another sequence that computes what both begin with, and how many blocks of that
            this one waits for.
        prompt_logprobs: of the prompt's tokens from the second on, where the job wants them; one
            piece of bytes a token (see `pack_position`).
        await_until: no pass before this time (monotonic seconds) unless a proposal arrives.
        in_flight: a round is being committed.
    """

    job: str
    epoch: int
    spec: JobSpec
    sampler: Sampler
    output: OutputText
    token_bytes: Callable[[int], bytes]
    limit: int
    digest: int
    draft_length: DraftLength
    future: Future[dict[str, Any]] = field(default_factory=Future)
    arrival: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: list[int] = field(default_factory=list)
    laws: list[SparseLaw] | None = None
    awaited: tuple[Sequence, int] | None = None
    prompt_logprobs: list[bytes] = field(default_factory=list)
    session: Session | None = None
    await_until: float | None = None
    in_flight: bool = False
    is_cancelled: bool = False
    rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt, then output; the last committed token is the last one."""
        return self.sampler.tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.sampler.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the pass over its prompt has to give log-probabilities; once the first token is
        committed they are too."""
        return self.spec.params.prompt_logprobs is not None and self.committed == 0

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
