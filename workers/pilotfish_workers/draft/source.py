"""Where drafted tokens come from: one seam with two methods, propose and learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Sampler


@dataclass(slots=True, eq=False)
class Draft:
    """The tokens of one session: prompt and committed output, nothing uncommitted.

    `sampler` draws as the job asks for, over the same list; None where only the argmax will do.
    `memory` belongs to the source: whatever it keeps for this draft between calls.
    """

    tokens: list[int]
    sampler: Sampler | None = None
    memory: Any = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that a source drafted, and the law that each was drawn from (q).

    `laws` is None where each token was certain, given those before it, or where the job's rule
    asks for no laws (greedy, coupled).
    """

    tokens: list[int]
    laws: list[SparseLaw] | None = None


class DraftSource(Protocol):
    """A way to guess what comes next."""

    def propose(self, drafts: Sequence[Draft], ks: Sequence[int]) -> list[Drafted | None]:
        """Draft up to `ks[i]` tokens after `drafts[i].tokens`, for all of them at once.

        k = 0 only prepares (a model computes the KV of the prompt). Returns for each draft the
        drafted tokens, perhaps fewer than k or none, where how many there are may depend on the
        tokens before, never on one that is left out; None where the source needs another call
        before it can tell, because it works off a long prefix in pieces.
        """
        ...

    def learn(self, draft: Draft, num_valid: int | None) -> None:
        """Take in an outcome: of the draft's tokens and what was drafted after them, the first
        `num_valid` stand. None: the session is over, and what is kept for it can go."""
        ...
