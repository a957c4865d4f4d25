"""A handle on one job, with all samples of it. It holds nothing but the id; the truth is in
Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pilotfish.bulk import read_statuses
from pilotfish.reading import Deadline, entries, not_found
from pilotfish.result import Chunk, Cursor, Result, error_of
from pilotfish.samples import overall, sample_ids
from pilotfish_broker.errors import InvalidRequest, JobNotFound
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import Status

if TYPE_CHECKING:
    from pilotfish.connection import Connection


class Job:
    """A submitted job, made by :meth:`Client.submit` and :meth:`Client.job`.

    Each of the `n` samples that its parameters ask for is a record of its own, run and kept by
    itself: sample 0 under the job's id, sample i under ``ID.i``. The handle speaks for all of
    them; a handle on ``ID.i`` speaks for that sample alone.
    """

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
        """The job record as it stands; that of sample 0 where there are several.

        Raises:
            JobNotFound: there is none.
        """
        return self._record(self.id)

    def sample_ids(self) -> list[str]:
        """Ids of all samples' records, by sample; the job's own id alone where it has one.

        Raises:
            JobNotFound: there is no record of the job.
        """
        return sample_ids(self.id, self.record().spec)

    def status(self) -> Status:
        """Where the job stands: queued until one of its samples runs, running until all have
        ended, failed when one of them failed.

        Raises:
            JobNotFound: there is no record of it, or of one of its samples.
        """
        record = self.record()
        others = sample_ids(self.id, record.spec)[1:]
        statuses = [record.status]
        for other, status in zip(others, read_statuses(self._connection, others), strict=True):
            if status is None:
                raise not_found(other)
            statuses.append(status)
        return overall(statuses)

    def stream(self, timeout: float | None = None, *, sample: int = 0) -> Iterator[Chunk]:
        """The output of one sample as it is committed, from its beginning, each token once.

        Args:
            timeout: seconds for the whole of it; the job itself goes on when they have passed.
            sample: which of the job's samples.

        Raises:
            JobFailed, JobCancelled, JobExpired: after the last chunk, when the sample ended so.
            JobTimeout: the seconds passed first.
            JobNotFound: there is no record of the job.
            InvalidRequest: the job has no such sample.
        """
        job = self._sample(sample)
        cursor = Cursor()
        for entry in entries(self._connection, job, Deadline(timeout)):
            if entry.end is not None:
                self._raise_for(job, entry.end)
                return
            chunk = cursor.fresh(entry)
            if chunk.text or chunk.token_ids or chunk.prompt_logprobs:
                yield chunk

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of all samples and give their whole output.

        Raises:
            JobFailed, JobCancelled, JobExpired: one of them ended so.
            JobTimeout: `timeout` seconds passed first; the job itself goes on.
            JobNotFound: there is no record of the job.
        """
        return self.wait(timeout).raise_for_status()

    def wait(self, timeout: float | None = None) -> Result:
        """Like :meth:`result`, but the result of an unsuccessful job is given, not raised."""
        deadline = Deadline(timeout)
        collected = list(entries(self._connection, self.id, deadline))
        record = self.record()
        others = []
        for other in sample_ids(self.id, record.spec)[1:]:
            stream = list(entries(self._connection, other, deadline))
            others.append(Result.from_record(self._record(other), stream))
        return Result.from_record(record, collected, others)

    def cancel(self) -> str:
        """Ask for the end of all samples: "cancelled" at once, "flagged" for a worker, which
        drops a sample within a round, or "ended", all of them, before.

        Raises:
            JobNotFound: there is no record of the job.
        """
        outcomes = set()
        for job in self.sample_ids():
            try:
                with self._connection.answering():
                    outcomes.add(self._connection.records.cancel(job))
            except JobNotFound:
                if job == self.id:
                    raise
                outcomes.add("ended")  # so long ago that its record has gone
        return next(word for word in ("flagged", "cancelled", "ended") if word in outcomes)

    def _record(self, job: str) -> JobRecord:
        with self._connection.answering():
            return self._connection.records.get(job)

    def _sample(self, sample: int) -> str:
        """Id of one sample's record; sample 0 needs no look at the job's own."""
        if sample == 0:
            return self.id
        ids = self.sample_ids()
        if not 0 <= sample < len(ids):
            raise InvalidRequest(
                f"job {self.id} has samples 0 to {len(ids) - 1}, not {sample}", field="sample"
            )
        return ids[sample]

    def _raise_for(self, job: str, status: Status) -> None:
        reason = self._record(job).error if status is Status.FAILED else ""
        if (error := error_of(job, status, reason)) is not None:
            raise error
