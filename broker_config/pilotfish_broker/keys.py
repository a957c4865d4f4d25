"""Every Redis key that pilotfish uses. `<ns>` is the namespace (``pf`` unless set).

| key                        | type   | written by              | what, and how long it lives |
|----------------------------|--------|-------------------------|-----------------------------|
| <ns>:job:<id>              | hash   | submit, claim, commit…  | the job record (fields: see records.py); TTL from its end |
| <ns>:job:<id>:tokens       | stream | commit, finish          | one entry a commit (see stream.py); durable progress and what clients read; TTL as above |
| <ns>:pending:<model>       | zset   | submit, release, requeue| queued ids without a doorbell; score: priority, then age |
| <ns>:dispatched:<model>    | zset   | dispatch                | queued ids whose doorbell rings; score: when it rang (ms) |
| <ns>:running:<model>       | set    | claim                   | ids that a worker owns |
| <ns>:sequence              | string | submit                  | counter that orders jobs of one priority by age |
| <ns>:leases                | zset   | register, renew         | worker id → end of its lease (ms of Redis's clock) |
| <ns>:worker:<id>           | hash   | register                | kind, model, nonce, slots, pid, host, inbox…; removed with the lease |
| <ns>:worker:<id>:jobs      | set    | claim                   | ids that this worker owns |
| <ns>:workers:<kind>:<model>| hash   | register                | worker id → slots |
| <ns>:models                | set    | write_model              | all names ever served |
| <ns>:model:<name>          | hash   | write_model             | context, vocabulary size, tokenizer fingerprint…; stays |
| <ns>:model:<name>:vocab    | string | write_model             | zlib'd msgpack list of the tokens, to name the first difference |
| <ns>:inbox:<worker>        | list   | outboxes, commit        | entries of msgpack frames for one reader; bounded, TTL one minute |
| <ns>:done:<group>          | stream | finish, cancel, requeue, release | (job, status) of each job of a group as it ends; TTL from the last end |
| <ns>:reaper                | string | reaper                  | short lock with a TTL |
| <ns>:broker:*              | –      | Celery                  | queues and bindings of the control plane |
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Builders of all keys of one namespace."""

    namespace: str = "pf"

    def _name(self, *parts: str) -> str:
        return ":".join((self.namespace, *parts))

    def job(self, job: str) -> str:
        return self._name("job", job)

    def tokens(self, job: str) -> str:
        return self._name("job", job, "tokens")

    def pending(self, model: str) -> str:
        return self._name("pending", model)

    def dispatched(self, model: str) -> str:
        return self._name("dispatched", model)

    def running(self, model: str) -> str:
        return self._name("running", model)

    def workers(self, kind: str, model: str) -> str:
        return self._name("workers", kind, model)

    def worker(self, worker: str) -> str:
        return self._name("worker", worker)

    def worker_jobs(self, worker: str) -> str:
        return self._name("worker", worker, "jobs")

    def model(self, name: str) -> str:
        return self._name("model", name)

    def vocabulary(self, name: str) -> str:
        return self._name("model", name, "vocab")

    def inbox(self, worker: str) -> str:
        return self._name("inbox", worker)

    def done(self, group: str) -> str:
        return self._name("done", group)

    @property
    def models(self) -> str:
        return self._name("models")

    @property
    def leases(self) -> str:
        return self._name("leases")

    @property
    def sequence(self) -> str:
        return self._name("sequence")

    @property
    def reaper(self) -> str:
        return self._name("reaper")

    @property
    def broker_prefix(self) -> str:
        """Prefix of Celery's own keys."""
        return self._name("broker") + ":"

    def celery_queue(self, queue: str) -> str:
        """The list in which the Redis transport keeps the messages of `queue`."""
        return self.broker_prefix + queue


def verify_queue(model: str) -> str:
    """Celery queue that rings for jobs of `model`."""
    return f"verify.{model}"


def draft_queue(model: str) -> str:
    """Celery queue that asks for draft sessions for jobs of `model`."""
    return f"draft.{model}"
