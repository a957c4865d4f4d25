"""Reads a job's token stream as it grows, across reconnects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pilotfish.connection import Connection
from pilotfish_broker.connection import Redis
from pilotfish_broker.errors import BrokerUnavailable, JobNotFound, JobTimeout
from pilotfish_broker.stream import Entry

BLOCK_SECONDS = 1.0
MOST_ENTRIES = 512
OUTAGE_SECONDS = 15.0
RETRY_SECONDS = 0.3


class Deadline:
    """A point in time on the monotonic clock; None seconds means never."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self, most: float) -> float:
        """Seconds until then, at most `most` and never below 0."""
        if self._end is None:
            return most
        return max(0.0, min(most, self._end - time.monotonic()))

    @property
    def has_passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def __str__(self) -> str:
        return f"{self._seconds:g} s"


def entries(connection: Connection, job: str, deadline: Deadline) -> Iterator[Entry]:
    """Entries of a job's stream from the first on, the end marker last.

    Raises:
        JobNotFound: there is no record of the job, or it went away meanwhile.
        JobTimeout: the deadline passed first.
        BrokerUnavailable: the server was away for longer than a short outage.
    """
    with connection.answering():
        _require(connection, job)
    last: Any = "0"
    with connection.blocking(BLOCK_SECONDS) as client:
        while True:
            batch = _read_patiently(connection, client, job, last, deadline)
            for identity, fields in batch:
                last = identity
                entry = Entry.from_fields(fields)
                yield entry
                if entry.end is not None:
                    return
            if not batch:
                with connection.answering():
                    _require(connection, job)
            if deadline.has_passed and len(batch) < MOST_ENTRIES:
                raise JobTimeout(job, f"job {job} was not done within {deadline}; it goes on")


def not_found(job: str) -> JobNotFound:
    """The error of a job without a record."""
    return JobNotFound(job, f"there is no job {job}: a wrong id, or its results expired")


def _require(connection: Connection, job: str) -> None:
    if not connection.redis.exists(connection.keys.job(job)):
        raise not_found(job)


def _read_patiently(
    connection: Connection, client: Redis, job: str, last: Any, deadline: Deadline
) -> list[tuple[Any, dict[bytes, bytes]]]:
    outage = Deadline(OUTAGE_SECONDS)
    key = connection.keys.tokens(job)
    while True:
        try:
            with connection.answering():
                return read_stream(client, key, last, deadline.left(BLOCK_SECONDS))
        except BrokerUnavailable:
            if outage.has_passed or deadline.has_passed:
                raise
            time.sleep(deadline.left(RETRY_SECONDS))


def read_stream(
    client: Redis, key: str, last: Any, block_seconds: float
) -> list[tuple[Any, dict[bytes, bytes]]]:
    """Entries after `last` (id, fields); waits up to `block_seconds` for the first."""
    block_ms = int(block_seconds * 1000) or None  # redis takes 0 for "for ever"
    reply = client.xread({key: last}, count=MOST_ENTRIES, block=block_ms)
    if not reply:
        return []
    if isinstance(reply, dict):  # RESP3: key → a list of lists of entries
        return [entry for part in next(iter(reply.values())) for entry in part]
    return list(reply[0][1])
