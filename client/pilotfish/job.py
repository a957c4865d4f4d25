"""A handle on one job. It holds nothing but the id; the truth is in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pilotfish.reading import entries
from pilotfish.result import Chunk, Cursor, Result, error_of
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import Entry

if TYPE_CHECKING:
    from pilotfish.connection import Connection


class Job:
    """A submitted job, made by :meth:`Client.submit` and :meth:`Client.job`."""

    def __init__(self, job_id: str, connection: Connection) -> None:
        self.id = job_id
        self._connection = connection

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def record(self) -> JobRecord:
        """The job record as it stands.

        Raises:
            JobNotFound: there is none.
        """
        with self._connection.answering():
            return self._connection.records.get(self.id)

    def status(self) -> Status:
        """Where the job stands.

        Raises:
            JobNotFound: there is no record of it.
        """
        return self.record().status

    def stream(self, timeout: float | None = None) -> Iterator[Chunk]:
        """The output as it is committed, from its beginning, each token once.

        Args:
            timeout: seconds for the whole of it; the job itself goes on when they have passed.

        Raises:
            JobFailed, JobCancelled, JobExpired: after the last chunk, when the job ended so.
            JobTimeout: the seconds passed first.
            JobNotFound: there is no record of the job.
        """
        cursor = Cursor()
        for entry in entries(self._connection, self.id, timeout):
            if entry.end is not None:
                self._raise_for(entry.end)
                return
            chunk = cursor.fresh(entry)
            if chunk.text or chunk.token_ids:
                yield chunk

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and give the whole output.

        Raises:
            JobFailed, JobCancelled, JobExpired: it ended so.
            JobTimeout: `timeout` seconds passed first; the job itself goes on.
            JobNotFound: there is no record of the job.
        """
        return self.wait(timeout).raise_for_status()

    def wait(self, timeout: float | None = None) -> Result:
        """Like :meth:`result`, but the result of an unsuccessful job is given, not raised."""
        collected: list[Entry] = list(entries(self._connection, self.id, timeout))
        return Result.from_record(self.record(), collected)

    def cancel(self) -> str:
        """Ask for the job's end: "cancelled" at once, "flagged" for its worker, which drops it
        within a round, or "ended" before.

        Raises:
            JobNotFound: there is no record of it.
        """
        with self._connection.answering():
            return self._connection.records.cancel(self.id)

    def _raise_for(self, status: Status) -> None:
        reason = self.record().error if status is Status.FAILED else ""
        if (error := error_of(self.id, status, reason)) is not None:
            raise error
