"""What tests of the broker side share: one model's records, workers, dispatcher and reaper."""

from __future__ import annotations

from typing import Any

from pilotfish_broker.celery_app import make_app
from pilotfish_broker.dispatch import Dispatcher
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.messages import Frame
from pilotfish_broker.ownership import Commit, Ending, Identity, Ownership, Tail
from pilotfish_broker.reaper import Reaper
from pilotfish_broker.records import JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import JobSpec, SamplingParams, Status
from pilotfish_broker.stream import Entry

MODEL = "m"
TTL_SECONDS = 100


def spec(prompt: str = "hi", *, priority: int = 0, group: str = "", model: str = MODEL) -> JobSpec:
    return JobSpec(
        model=model, prompt=prompt, params=SamplingParams(), priority=priority, group=group
    )


class Worker:
    """One incarnation of a verify worker, as far as Redis sees it."""

    def __init__(self, client: Any, keys: Keys, name: str, lease_seconds: float) -> None:
        self._client = client
        self._keys = keys
        self.name = name
        self.identity = Identity(name, f"nonce-of-{name}")
        self.leases = Leases(client, keys, self.identity, "verify", MODEL, lease_seconds)
        self.own = Ownership(
            client, keys, self.identity, MODEL, result_ttl_seconds=TTL_SECONDS, inbox_frames=4
        )

    def commit(
        self,
        job: str,
        epoch: int,
        expected: int,
        tokens: list[int],
        text: str = "",
        *,
        drafted: int = 0,
        accepted: int = 0,
        near_ties: int = 0,
        logprobs: bytes = b"",
        prompt_logprobs: bytes = b"",
        frame: Frame | None = None,
        inbox: str = "",
    ) -> str:
        tail = Tail(
            job,
            epoch,
            expected,
            tokens,
            text,
            drafted,
            accepted,
            near_ties,
            logprobs,
            prompt_logprobs,
        )
        return self.own.commit([Commit(tail, frame, inbox)])[0]

    def finish(
        self,
        job: str,
        epoch: int,
        expected: int,
        tokens: list[int],
        text: str = "",
        *,
        logprobs: bytes = b"",
        prompt_logprobs: bytes = b"",
        status: Status = Status.SUCCEEDED,
        group: str = "",
    ) -> str:
        tail = Tail(
            job,
            epoch,
            expected,
            tokens,
            text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return self.own.finish(tail, Ending(status, "stop"), group)

    def expire(self) -> None:
        """Let its lease end now."""
        self._client.zadd(self._keys.leases, {self.name: 1}, xx=True)


class Bench:
    """Everything around one namespace of one server."""

    def __init__(self, client: Any, keys: Keys, settings: Settings) -> None:
        self.client = client
        self.keys = keys
        self.settings = settings
        self.records = JobRecords(client, keys, TTL_SECONDS)
        self.dispatcher = Dispatcher(make_app(settings), client, client, keys)

    def submit(self, *jobs: str, **options: Any) -> None:
        self.records.submit([(job, spec(**options)) for job in jobs])

    def worker(self, name: str, slots: int = 4) -> Worker:
        worker = Worker(self.client, self.keys, name, self.settings.lease_seconds)
        worker.leases.register(slots, {"pid": 1})
        return worker

    def reaper(self) -> Reaper:
        """A reaper that is past the wait with which every reaper begins."""
        self.client.delete(self.keys.reaper)
        reaper = Reaper(self.client, self.keys, self.settings, self.dispatcher)
        reaper._not_before = 0.0
        return reaper

    def reap(self) -> int:
        return self.reaper().tick()

    def stream(self, job: str) -> list[Entry]:
        return [
            Entry.from_fields(fields) for _, fields in self.client.xrange(self.keys.tokens(job))
        ]

    def tokens(self, job: str) -> list[int]:
        return [token for entry in self.stream(job) for token in entry.tokens]

    def text(self, job: str) -> str:
        return "".join(entry.text for entry in self.stream(job))

    def ids(self, key: str) -> set[str]:
        """Members of a set or sorted set."""
        kind = self.client.type(key)
        raw = self.client.smembers(key) if kind == b"set" else self.client.zrange(key, 0, -1)
        return {item.decode() for item in raw}

    def pending(self) -> set[str]:
        return self.ids(self.keys.pending(MODEL))

    def dispatched(self) -> set[str]:
        return self.ids(self.keys.dispatched(MODEL))

    def running(self) -> set[str]:
        return self.ids(self.keys.running(MODEL))

    def dump(self) -> dict[bytes, Any]:
        """All that the server holds besides the time-dependent leases, to compare."""
        return {
            key: self.client.dump(key)
            for key in sorted(self.client.scan_iter())
            if key.decode() not in (self.keys.leases, self.keys.reaper)
        }
