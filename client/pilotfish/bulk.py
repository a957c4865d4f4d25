"""Reads many jobs in few round trips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeGuard

from pilotfish.connection import Connection
from pilotfish.result import Result
from pilotfish.samples import sample_ids
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import Entry

READ_PIPELINE = 200


def read_records(connection: Connection, ids: Iterable[str]) -> list[JobRecord | None]:
    """Records by id; None where there is none."""
    keys = connection.keys
    replies = _pipelined(connection, ids, lambda pipe, job: pipe.hgetall(keys.job(job)))
    return [_record(job, fields) for job, fields in replies]


def read_results(connection: Connection, ids: Iterable[str]) -> list[Result | None]:
    """Results by id; None where a job has a sample that has not ended, or is not known."""
    listed = list(ids)
    firsts = [record for record in read_records(connection, listed) if _has_ended(record)]
    samples = {record.id: sample_ids(record.id, record.spec) for record in firsts}
    others = [job for found in samples.values() for job in found[1:]]
    later = [record for record in read_records(connection, others) if _has_ended(record)]
    records = {record.id: record for record in [*later, *firsts]}
    whole = {job: found for job, found in samples.items() if records.keys() >= set(found)}
    needed = dict.fromkeys(job for found in whole.values() for job in found)
    keys = connection.keys
    streams = {
        job: [Entry.from_fields(fields) for _, fields in raw]
        for job, raw in _pipelined(
            connection, needed, lambda pipe, job: pipe.xrange(keys.tokens(job))
        )
    }

    def result(job: str) -> Result | None:
        if job not in whole:
            return None
        alone = [Result.from_record(records[one], streams[one]) for one in whole[job]]
        return replace(alone[0], others=tuple(alone[1:]))

    return [result(job) for job in listed]


def read_statuses(connection: Connection, ids: Iterable[str]) -> list[Status | None]:
    """Where records stand, by id; None where there is none. Far cheaper than whole records."""
    keys = connection.keys
    replies = _pipelined(connection, ids, lambda pipe, job: pipe.hget(keys.job(job), "status"))
    return [None if status is None else Status(status.decode()) for _, status in replies]


def count_committed(connection: Connection, ids: Iterable[str]) -> int:
    """Committed output tokens of some jobs together; unknown ones count nothing."""
    keys = connection.keys
    replies = _pipelined(connection, ids, lambda pipe, job: pipe.hget(keys.job(job), "committed"))
    return sum(int(committed or 0) for _, committed in replies)


def _pipelined(
    connection: Connection, ids: Iterable[str], command: Callable[[Any, str], Any]
) -> Iterator[tuple[str, Any]]:
    """Each id with the reply to its command."""
    listed = list(ids)
    for start in range(0, len(listed), READ_PIPELINE):
        part = listed[start : start + READ_PIPELINE]
        with connection.answering():
            pipeline = connection.redis.pipeline(transaction=False)
            for job in part:
                command(pipeline, job)
            replies = pipeline.execute()
        yield from zip(part, replies, strict=True)


def _has_ended(record: JobRecord | None) -> TypeGuard[JobRecord]:
    return record is not None and record.status.is_terminal


def _record(job: str, fields: dict[bytes, bytes]) -> JobRecord | None:
    return JobRecord.from_hash(job, fields) if b"spec" in fields else None
