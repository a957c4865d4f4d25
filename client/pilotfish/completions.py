"""Which jobs of a group have ended, in the order in which they did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pilotfish.connection import Connection
from pilotfish.reading import BLOCK_SECONDS, Deadline, read_stream
from pilotfish_broker.spec import Status


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one job of a group, or of one sample of it. Reading can go on `after` its
    cursor."""

    job_id: str
    status: Status
    cursor: str


def read_completions(
    connection: Connection, group: str, after: str, block_seconds: float
) -> list[Completion]:
    """Completions after a cursor; waits up to `block_seconds` (0: not at all) for the first."""
    with connection.answering():
        client = connection.redis
        found = read_stream(client, connection.keys.done(group), after, block_seconds)
    return [
        Completion(fields[b"job"].decode(), Status(fields[b"status"].decode()), identity.decode())
        for identity, fields in found
    ]


def completions(
    connection: Connection, group: str, after: str, timeout: float | None
) -> Iterator[Completion]:
    """Completions after a cursor, for ever or until `timeout` seconds passed without one."""
    deadline = Deadline(timeout)
    while True:
        found = read_completions(connection, group, after, deadline.left(BLOCK_SECONDS))
        for completion in found:
            after = completion.cursor
            yield completion
        if found:
            deadline = Deadline(timeout)
        elif deadline.has_passed:
            return
