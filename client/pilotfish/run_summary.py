"""What a run did, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pilotfish_broker.records import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts over the jobs of a run.

    Attributes:
        failed: jobs that ended in another way than well.
        seconds: from the first admission to the last completion.
        rounds: job rounds: target passes that committed tokens, counted for each job.
        startup_seconds: until all workers were ready; 0 where they ran already.
    """

    jobs: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    startup_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, start-up apart."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_tokens_per_round(self) -> float:
        """Tokens that one target pass committed of one job, on average; 1 without drafting."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, the ratios included."""
        return {
            **asdict(self),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "mean_tokens_per_round": round(self.mean_tokens_per_round, 4),
        }


def summarise(
    records: Iterable[JobRecord | None], *, failed: int, startup_seconds: float
) -> Summary:
    """Add up records; those that are gone count as jobs only."""
    listed = list(records)
    known = [record for record in listed if record is not None]
    starts = [record.started_ms for record in known if record.started_ms]
    ends = [record.finished_ms for record in known if record.started_ms and record.finished_ms]
    seconds = (max(ends) - min(starts)) / 1000 if starts and ends else 0.0
    return Summary(
        jobs=len(listed),
        failed=failed,
        prompt_tokens=sum(len(record.prompt_ids or ()) for record in known),
        completion_tokens=sum(record.committed for record in known),
        seconds=round(seconds, 3),
        rounds=sum(record.rounds for record in known),
        drafted=sum(record.drafted for record in known),
        accepted=sum(record.accepted for record in known),
        startup_seconds=round(startup_seconds, 3),
    )
