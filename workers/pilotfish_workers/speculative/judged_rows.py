"""The rows of logits that one case has in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish_workers.speculative.accept import NOT_JUDGED, NOTHING_ALLOWED, Outcome
from pilotfish_workers.speculative.sampler import Case

_UNDECIDED = Outcome(0, NOT_JUDGED)


@dataclass(slots=True, eq=False)
class JudgedRows:
    """One case in a pass.

    Attributes:
        start: its first row.
        num_rows: rows that judge, from `judged` on; fewer than K + 1 where one has no token.
        ending: what stands for the token after the last of `num_rows`, if they are fewer.
        place: the first judging row in the tensor at hand, which may hold some rows only.
        outcome: what is decided so far.
        leads: how far the chosen token of each judging row was ahead, where that is looked at.
    """

    case: Case
    start: int
    num_rows: int
    ending: int = NOTHING_ALLOWED
    place: int = 0
    outcome: Outcome = _UNDECIDED
    leads: list[float] = field(default_factory=list)

    @classmethod
    def split(cls, cases: Sequence[Case | None], counts: Sequence[int]) -> list[JudgedRows | None]:
        """Rows one after the other, `counts[i]` for each case.

        Raises:
            ValueError: a case speaks of another number of rows, or of laws.
        """
        parts: list[JudgedRows | None] = []
        start = 0
        for case, count in zip(cases, counts, strict=True):
            if case is None:
                parts.append(None)
            else:
                num_rows = 1 + len(case.drafted) if case.is_judged else 0
                if count != len(case.scored) + num_rows:
                    raise ValueError(f"{count} rows for {len(case.scored)} and {num_rows} wanted")
                if case.laws is not None and len(case.laws) != len(case.drafted):
                    raise ValueError(f"{len(case.laws)} laws for {len(case.drafted)} tokens")
                parts.append(cls(case, start, num_rows))
            start += count
        return parts

    @property
    def judged(self) -> int:
        """The first row that judges; those before it are scored."""
        return self.start + len(self.case.scored)

    @property
    def drafted(self) -> Sequence[int]:
        """The drafted tokens that have a row to be judged by."""
        return self.case.drafted[: self.num_rows]

    @property
    def needs_chain(self) -> bool:
        """Whether more is to be looked at than the argmax of the model's own logits."""
        params = self.case.sampler.params
        return self.case.is_judged and (params.temperature > 0 or params.changes_logits)

    def end_at(self, index: int, ending: int) -> None:
        """No token follows the first `index` drafted ones."""
        if index < self.num_rows:
            self.num_rows, self.ending = index, ending
