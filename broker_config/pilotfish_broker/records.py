"""The job record as readers see it, and where clients submit, look and cancel."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redis.exceptions import NoScriptError

from pilotfish_broker.connection import Redis
from pilotfish_broker.errors import InvalidRequest, JobNotFound
from pilotfish_broker.keys import Keys
from pilotfish_broker.scripts import Scripts
from pilotfish_broker.settings import MODEL_NAME
from pilotfish_broker.spec import JobSpec, Status
from pilotfish_broker.stream import unpack_ids

SUBMIT_PIPELINE = 500
SUBMIT_TRIES = 3


def new_job_id() -> str:
    """A fresh job id: 96 random bits, hexadecimal."""
    return secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One reading of a job record. Times are milliseconds of Redis's clock, 0 where not yet.

    `committed`, `rounds`, `drafted`, `accepted` and `near_ties` count tokens (rounds: target passes
    that committed tokens of this job; near ties: docs/sampling.md); `visible` counts characters.
    The owner's nonce is not among them: whoever has it can commit, and readers need not.
    """

    id: str
    spec: JobSpec
    status: Status
    worker: str
    epoch: int
    attempts: int
    committed: int
    visible: int
    rounds: int
    drafted: int
    accepted: int
    near_ties: int
    prompt_ids: list[int] | None
    fingerprint: str
    submitted_ms: int
    started_ms: int
    finished_ms: int
    finish_reason: str
    error: str

    @classmethod
    def from_hash(cls, job: str, fields: Mapping[bytes, bytes]) -> JobRecord:
        def text(name: str) -> str:
            return fields.get(name.encode(), b"").decode()

        def number(name: str) -> int:
            return int(fields.get(name.encode(), 0))

        prompt = fields.get(b"prompt_ids")
        return cls(
            id=job,
            spec=JobSpec.from_bytes(fields[b"spec"]),
            status=Status(text("status")),
            worker=text("worker"),
            epoch=number("epoch"),
            attempts=number("attempts"),
            committed=number("committed"),
            visible=number("visible"),
            rounds=number("rounds"),
            drafted=number("drafted"),
            accepted=number("accepted"),
            near_ties=number("near_ties"),
            prompt_ids=None if prompt is None else unpack_ids(prompt),
            fingerprint=text("fingerprint"),
            submitted_ms=number("submitted_ms"),
            started_ms=number("started_ms"),
            finished_ms=number("finished_ms"),
            finish_reason=text("finish_reason"),
            error=text("error"),
        )


class JobRecords:
    """Submit, read and cancel jobs. Redis errors pass through untranslated."""

    def __init__(self, client: Redis, keys: Keys, result_ttl_seconds: float) -> None:
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client)
        self._ttl_ms = int(result_ttl_seconds * 1000)

    def submit(self, jobs: Iterable[tuple[str, JobSpec]]) -> int:
        """Queue jobs by (id, spec); those that exist already stay as they are.

        Returns:
            how many were new.

        Raises:
            InvalidRequest: an id is malformed, or belongs to a job with another spec; jobs
                before it in the same call may have been queued.
        """
        created = 0
        pending: list[tuple[str, JobSpec]] = []
        for job, spec in jobs:
            if not MODEL_NAME.fullmatch(job):
                raise InvalidRequest(f"{job!r} is no job id", field="id")
            pending.append((job, spec))
            if len(pending) == SUBMIT_PIPELINE:
                created += self._submit(pending)
                pending = []
        return created + self._submit(pending)

    def _submit(self, jobs: list[tuple[str, JobSpec]]) -> int:
        for _ in range(SUBMIT_TRIES - 1):
            try:
                return self._submit_once(jobs)
            except NoScriptError:  # the server restarted between the script and its use
                continue
        return self._submit_once(jobs)

    def _submit_once(self, jobs: list[tuple[str, JobSpec]]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for job, spec in jobs:
            raw = spec.to_bytes()
            keys = [self._keys.job(job), self._keys.pending(spec.model), self._keys.sequence]
            checksum = hashlib.sha256(raw).hexdigest()
            args = [job, raw, checksum, spec.model, spec.priority, spec.group]
            self._scripts.run("submit", keys, args, client=pipeline)
        replies = pipeline.execute() if jobs else []
        for (job, _), reply in zip(jobs, replies, strict=True):
            if reply == b"conflict":
                raise InvalidRequest(f"job id {job} belongs to another request", field="id")
        return replies.count(b"created")

    def get(self, job: str) -> JobRecord:
        """Read a record.

        Raises:
            JobNotFound: there is none.
        """
        fields = self._client.hgetall(self._keys.job(job))
        if b"spec" not in fields:
            raise JobNotFound(job, f"there is no job {job}: a wrong id, or its results expired")
        return JobRecord.from_hash(job, fields)

    def cancel(self, job: str) -> str:
        """Cancel a job: "cancelled" at once, "flagged" for its worker, or "ended" before.

        Raises:
            JobNotFound: there is none.
        """
        fields = self._client.hmget(self._keys.job(job), "model", "group", "worker")
        model, group, worker = ((value or b"").decode() for value in fields)
        keys = [
            self._keys.job(job),
            self._keys.pending(model),
            self._keys.dispatched(model),
            self._keys.tokens(job),
            self._keys.running(model),
            self._keys.worker_jobs(worker),
            self._keys.done(group),
        ]
        outcome: str = self._scripts.run("cancel", keys, [job, self._ttl_ms]).decode()
        if outcome == "missing":
            raise JobNotFound(job, f"there is no job {job}: a wrong id, or its results expired")
        return outcome
