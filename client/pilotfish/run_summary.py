"""What a run did, in numbers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.records import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts over the jobs of a run, all samples of each together.

    Attributes:
        failed: jobs of which a sample ended in another way than well.
        prompt_tokens: those of each job once.
        seconds: from the first admission to the last completion, without the pauses between the
            parts of a run that was stopped and continued.
        rounds: job rounds: target passes that committed tokens, counted for each sample.
        near_ties: output tokens that rounding in half precision may have decided.
        startup_seconds: until all workers were ready, at the last start of a continued run; 0
            where they ran already.
    """

    jobs: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    near_ties: int
    startup_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, start-up apart."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_tokens_per_round(self) -> float:
        """Tokens that one target pass committed of one sample, on average; 1 without drafting."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, the ratios included."""
        return {
            **asdict(self),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "mean_tokens_per_round": round(self.mean_tokens_per_round, 4),
        }


def summarise(
    records: Iterable[JobRecord | None],
    *,
    jobs: int,
    failed: int,
    startup_seconds: float,
    pauses: Sequence[tuple[int, int]] = (),
) -> Summary:
    """Add up records; those that are gone add nothing.

    Args:
        jobs, failed: how many there were, and how many of them did not succeed.
        pauses: from when to when (milliseconds of Redis's clock) nothing ran, in order.
    """
    first, last = 0, 0
    sums: Counter[str] = Counter()
    for record in records:
        if record is None:
            continue
        if record.spec.sample == 0:
            sums["prompt"] += len(record.prompt_ids or ())
        for name in ("committed", "rounds", "drafted", "accepted", "near_ties"):
            sums[name] += getattr(record, name)
        if record.started_ms:
            first = min(first or record.started_ms, record.started_ms)
            last = max(last, record.finished_ms)
    return Summary(
        jobs=jobs,
        failed=failed,
        prompt_tokens=sums["prompt"],
        completion_tokens=sums["committed"],
        seconds=round(running_ms(first, last, pauses) / 1000, 3),
        rounds=sums["rounds"],
        drafted=sums["drafted"],
        accepted=sums["accepted"],
        near_ties=sums["near_ties"],
        startup_seconds=round(startup_seconds, 3),
    )


def check_place(path: Path, others: Iterable[Path]) -> None:
    """Refuse a file for the summary that cannot be written, or that is one of `others`.

    Raises:
        InvalidRequest: it is one, or a folder, or its folder is missing.
    """
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent} for the summary")
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder; name a file for the summary")
    for other in others:
        is_linked = path.exists() and other.exists() and path.samefile(other)
        if is_linked or os.path.realpath(path) == os.path.realpath(other):
            raise InvalidRequest(f"the summary would overwrite {other}; choose another --summary")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that is either whole or as it was before.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(values, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a terminal, which must not be replaced
        path.write_text(text)
        return
    whole = Path(os.path.realpath(path))
    partial = whole.with_name(f"{whole.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(whole)
    finally:
        partial.unlink(missing_ok=True)


def running_ms(first: int, last: int, pauses: Iterable[tuple[int, int]]) -> int:
    """Milliseconds from `first` to `last` without what of the pauses lies between them."""
    paused = sum(max(0, min(end, last) - max(start, first)) for start, end in pauses)
    return max(0, last - first - paused)
