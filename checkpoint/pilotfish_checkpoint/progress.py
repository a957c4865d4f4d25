"""A job's durable progress, read back by the worker that continues it.

The token stream is the truth: positions in order, without a gap. Random numbers need no saving,
and KV is a cache that can be computed again, so tokens are all that a resume needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish_broker.connection import Redis
from pilotfish_broker.errors import JobError
from pilotfish_broker.keys import Keys
from pilotfish_broker.records import JobRecord, JobRecords
from pilotfish_broker.stream import Entry


class ProgressDamaged(JobError):
    """The job's token stream has a gap, holds something else, or disagrees with its record; the
    job cannot be continued."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A job record with the output tokens that are committed so far."""

    record: JobRecord
    output: list[int]


def read_progress(client: Redis, keys: Keys, records: JobRecords, job: str) -> Progress:
    """Record and committed output of a job; its log-probabilities are for clients alone.

    Raises:
        JobNotFound: there is no such job.
        ProgressDamaged: the token stream is not what the record says.
    """
    record = records.get(job)
    output: list[int] = []
    for _, fields in client.xrange(keys.tokens(job)):
        try:
            entry = Entry.from_fields(fields, details=False)
        except ValueError as error:  # UnicodeDecodeError too
            message = f"token stream cannot be read from position {len(output)} on: {error}"
            raise ProgressDamaged(job, message) from error
        if entry.end is not None:
            break
        if entry.position != len(output):
            raise ProgressDamaged(
                job, f"token stream jumps from position {len(output)} to {entry.position}"
            )
        output += entry.tokens
    if len(output) < record.committed:
        raise ProgressDamaged(
            job, f"token stream holds {len(output)} of {record.committed} committed tokens"
        )
    return Progress(record, output)
