"""The client: submits jobs, finds them again, and looks at the deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pilotfish.bulk import count_committed, read_records, read_results, read_statuses
from pilotfish.completions import Completion, completions, read_completions
from pilotfish.connection import Connection
from pilotfish.job import Job
from pilotfish.result import Result
from pilotfish.samples import sample_id, spread
from pilotfish.served import ServedModels
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.leases import WorkerRecord, list_workers, live_workers
from pilotfish_broker.models import ModelRecord
from pilotfish_broker.records import JobRecord, new_job_id
from pilotfish_broker.settings import MODEL_NAME, Settings
from pilotfish_broker.spec import JobSpec, Prompt, SamplingParams, Status


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """Jobs of one model: `queued` waits in Redis, `ringing` has a doorbell out, `running` is
    owned by a worker."""

    model: str
    queued: int
    ringing: int
    running: int


class Client:
    """A client of one deployment. It opens connections on first use and keeps no thread.

    Args:
        url: Redis server of the broker, and of the job records unless `data_url` is given.
        data_url: Redis server of job records and inboxes, where it is another one.
        namespace: prefix of all keys; that of the workers.
        timeout: seconds that one command may take before the server counts as unavailable.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        data_url: str | None = None,
        namespace: str = "pf",
        timeout: float = 10.0,
    ) -> None:
        settings = Settings.from_env({}, broker_url=url, data_url=data_url, namespace=namespace)
        self._use(settings, timeout)

    @classmethod
    def from_settings(cls, settings: Settings, *, timeout: float = 10.0) -> Client:
        """A client of the deployment that `settings` describe."""
        client = cls.__new__(cls)
        client._use(settings, timeout)
        return client

    @classmethod
    def from_env(cls, **overrides: Any) -> Client:
        """A client set up by ``PILOTFISH_BROKER_URL`` and its like; keywords win.

        Raises:
            ConfigError: a variable has a value that cannot be used.
        """
        return cls.from_settings(Settings.from_env(**overrides))

    def _use(self, settings: Settings, timeout: float) -> None:
        self._connection = Connection(settings, timeout)
        self._models = ServedModels(self._connection)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str | None = None,
        priority: int = 0,
        id: str | None = None,
        group: str = "",
        wait_for_model: bool = False,
    ) -> Job:
        """Queue one job, with all samples that `params` ask for.

        Args:
            prompt: a text, a list of chat messages ({"role", "content"}) or of token ids.
            params: how tokens are chosen; greedy with 256 tokens at most where left out. Of its
                `n` samples the first has the job's id, another ``ID.i``, see :class:`Job`.
            model: served name; may be left out where only one was ever served.
            priority: -100 … 100; a higher one is served first.
            id: job id, for submissions that may be repeated; a fresh one where left out.
            group: jobs of one group report their end together, each sample by itself, see
                :meth:`completions`.
            wait_for_model: queue it even if no worker has ever served the model.

        Raises:
            InvalidRequest: refused, nothing was written.
            UnknownModel: likewise; nobody ever served that name.
            BrokerUnavailable, BrokerMisconfigured: the server cannot be used.
        """
        spec = JobSpec(
            model=self.choose_model(model),
            prompt=prompt,
            params=params or SamplingParams(),
            priority=priority,
            group=group,
        )
        ids = None if id is None else [id]
        return self.submit_many([spec], ids=ids, wait_for_model=wait_for_model)[0]

    def submit_many(
        self,
        specs: Iterable[JobSpec],
        *,
        ids: Iterable[str] | None = None,
        wait_for_model: bool = False,
    ) -> list[Job]:
        """Queue many jobs in few round trips; all are checked before the first is written.

        Repeating a submission under the same ids changes nothing. A spec whose `sample` is not 0
        is that sample alone.

        Raises:
            InvalidRequest: refused; where an id belongs to a job with another spec, jobs before
                it may have been queued.
        """
        listed = list(specs)
        for spec in listed:
            self._models.check(spec, wait_for_model=wait_for_model)
        names = [new_job_id() for _ in listed] if ids is None else list(ids)
        if len(names) != len(listed):
            raise InvalidRequest(f"{len(listed)} jobs, but {len(names)} ids", field="id")
        pairs = list(zip(names, listed, strict=True))
        for name, spec in pairs:
            # the longest of its ids, since each sample but the first has a longer one
            if not MODEL_NAME.fullmatch(sample_id(name, 0 if spec.sample else spec.params.n - 1)):
                raise InvalidRequest(f"{name!r} is no job id", field="id")
        jobs = (job for name, spec in pairs for job in spread(name, spec))
        with self._connection.answering():
            self._connection.records.submit(jobs)
        for model in {spec.model for spec in listed}:
            self._connection.top_up(model)
        return [self.job(name) for name in names]

    def job(self, id: str) -> Job:
        """A handle on a job by its id; whether it exists is seen on first use."""
        return Job(id, self._connection)

    def cancel(self, id: str) -> str:
        """Cancel a job, all samples of it; see :meth:`Job.cancel`."""
        return self.job(id).cancel()

    def choose_model(self, model: str | None = None) -> str:
        """`model` itself, or the only one ever served where it is None.

        Raises:
            UnknownModel: it is None and there is not exactly one.
        """
        return self._models.choose(model)

    def model(self, name: str) -> ModelRecord:
        """The record of a served name.

        Raises:
            UnknownModel: no worker has ever served it.
        """
        return self._models.require(name)

    def is_served(self, model: str) -> bool:
        """Whether a live verify worker serves the model right now."""
        with self._connection.answering():
            redis, keys = self._connection.redis, self._connection.keys
            return bool(live_workers(redis, keys, "verify", model))

    def models(self) -> list[ModelRecord]:
        """All models ever served."""
        return self._models.list()

    def workers(self) -> list[WorkerRecord]:
        """All registered workers, dead ones included until they are reaped."""
        with self._connection.answering():
            return list_workers(self._connection.redis, self._connection.keys)

    def queues(self) -> list[QueueLengths]:
        """How many jobs of each model wait and run."""
        names = [record.name for record in self.models()]
        keys = self._connection.keys
        with self._connection.answering():
            pipeline = self._connection.redis.pipeline(transaction=False)
            for name in names:
                pipeline.zcard(keys.pending(name))
                pipeline.zcard(keys.dispatched(name))
                pipeline.scard(keys.running(name))
            counts = pipeline.execute()
        return [
            QueueLengths(name, *counts[3 * index : 3 * index + 3])
            for index, name in enumerate(names)
        ]

    def records(self, ids: Iterable[str]) -> list[JobRecord | None]:
        """Records by their ids in few round trips; None where there is none. A job with several
        samples has as many, see :meth:`Job.sample_ids`."""
        return read_records(self._connection, ids)

    def statuses(self, ids: Iterable[str]) -> list[Status | None]:
        """Where many records stand, by their ids; None where there is none. Cheaper than
        :meth:`records`."""
        return read_statuses(self._connection, ids)

    def running(self, model: str) -> set[str]:
        """Ids of the jobs of a model that workers own right now."""
        with self._connection.answering():
            found = self._connection.redis.smembers(self._connection.keys.running(model))
        return {job.decode() for job in found}

    def results(self, ids: Iterable[str]) -> list[Result | None]:
        """Results of many jobs that have ended, all samples in each; None where a job has a
        sample that has not ended, or is not known."""
        return read_results(self._connection, ids)

    def committed(self, ids: Iterable[str]) -> int:
        """Committed output tokens of some records together; unknown ones count nothing."""
        return count_committed(self._connection, ids)

    def completions(
        self, group: str, *, after: str = "0", timeout: float | None = None
    ) -> Iterator[Completion]:
        """Jobs of a group as they end, those that ended before first; each sample by itself.

        Args:
            after: cursor of the last completion that was handled, to go on behind it.
            timeout: seconds without a completion after which the iterator ends.
        """
        return completions(self._connection, group, after, timeout)

    def read_completions(
        self, group: str, *, after: str = "0", block_seconds: float = 0.0
    ) -> list[Completion]:
        """Completions after a cursor that are there by now, or within `block_seconds`
        (below the client's timeout)."""
        return read_completions(self._connection, group, after, block_seconds)
