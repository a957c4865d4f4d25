"""Where drafted tokens come from: one seam with two methods, propose and learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True, eq=False)
class Draft:
    """The tokens of one session: prompt and committed output, nothing uncommitted.

    `memory` belongs to the source: whatever it keeps for this draft between calls.
    """

    tokens: list[int]
    memory: Any = None


class DraftSource(Protocol):
    """A way to guess what comes next."""

    def propose(self, drafts: Sequence[Draft], ks: Sequence[int]) -> list[list[int] | None]:
        """Draft up to `ks[i]` tokens after `drafts[i].tokens`, for all of them at once.

        k = 0 only prepares (a model computes the KV of the prompt). Returns for each draft the
        drafted tokens, perhaps fewer than k or none; None where the source needs another call
        before it can tell, because it works off a long prefix in pieces.
        """
        ...

    def learn(self, draft: Draft, num_valid: int | None) -> None:
        """Take in an outcome: of the draft's tokens and what was drafted after them, the first
        `num_valid` stand. None: the session is over, and what is kept for it can go."""
        ...
