"""The n samples of one request: a job each, named after the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pilotfish_broker.spec import JobSpec, Status

#: What a request is whose samples have all ended: the first of these that one of them is.
WORST_FIRST = (Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.SUCCEEDED)


def sample_id(job: str, sample: int) -> str:
    """Id of a sample's record; the first one's is that of the request."""
    return f"{job}.{sample}" if sample else job


def sample_ids(job: str, spec: JobSpec) -> list[str]:
    """Ids of the records behind one id, in the order of the samples. A later sample's own id
    stands for that sample alone."""
    return [sample_id(job, sample) for sample in range(spec.params.n)] if not spec.sample else [job]


def spread(job: str, spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """The jobs to queue for a request. The first sample comes last, so that whoever finds its
    record finds all of them."""
    if spec.sample:
        yield job, spec
        return
    for sample in reversed(range(1, spec.params.n)):
        yield sample_id(job, sample), replace(spec, sample=sample)
    yield job, spec


def overall(statuses: Iterable[Status]) -> Status:
    """Where a request stands, by its samples: queued until one runs, running until all have
    ended, and then as the worst of them did."""
    found = set(statuses)
    if found == {Status.QUEUED}:
        return Status.QUEUED
    if not all(status.is_terminal for status in found):
        return Status.RUNNING
    return next(status for status in WORST_FIRST if status in found)
