"""n-gram prompt lookup: what followed the last few tokens when they occurred before.

After Saxena, "Prompt Lookup Decoding" (2023). Costs a dictionary look-up a token, needs no model,
and does well where text repeats: summaries, rewriting, code edits. Each token is certain, given
those before it, whatever law the target samples from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish_workers.draft.source import Draft, Drafted

LONGEST = 5
SHORTEST = 2


@dataclass(slots=True)
class _Index:
    """n-gram → position after its latest occurrence, over the first `length` tokens."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0


class NgramSource:
    """Proposes the continuation of the longest earlier match of the last tokens."""

    def propose(self, drafts: Sequence[Draft], ks: Sequence[int]) -> list[Drafted | None]:
        """See `DraftSource.propose`; never None."""
        return [Drafted(self._propose(draft, k)) for draft, k in zip(drafts, ks, strict=True)]

    def learn(self, draft: Draft, num_valid: int | None) -> None:
        """See `DraftSource.learn`; an index that covers tokens that fell is built anew."""
        index: _Index | None = draft.memory
        if num_valid is None or (index is not None and index.length > num_valid):
            draft.memory = None

    def _propose(self, draft: Draft, k: int) -> list[int]:
        index = self._indexed(draft)
        tokens = draft.tokens
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            start = index.after.get(tuple(tokens[-size:]))
            if start is not None:
                drafted: list[int] = []
                for position in range(start, start + k):
                    inside = position < len(tokens)  # a match near the end repeats itself
                    drafted.append(tokens[position] if inside else drafted[position - len(tokens)])
                return drafted
        return []

    def _indexed(self, draft: Draft) -> _Index:
        index: _Index = draft.memory or _Index()
        draft.memory = index
        tokens = draft.tokens
        for end in range(max(index.length, 1), len(tokens)):
            # the n-grams that end before `end` are continued by the token there
            for size in range(SHORTEST, LONGEST + 1):
                if size <= end:
                    index.after[tuple(tokens[end - size : end])] = end
        index.length = len(tokens)
        return index
