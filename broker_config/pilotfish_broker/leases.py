"""Worker records and their leases, on Redis's own clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pilotfish_broker.connection import Redis
from pilotfish_broker.keys import Keys
from pilotfish_broker.ownership import Identity
from pilotfish_broker.scripts import Scripts


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker as it registered itself, and whether its lease is live."""

    id: str
    kind: str
    model: str
    slots: int
    is_alive: bool
    fields: Mapping[str, str]


class Leases:
    """The lease of one worker process."""

    def __init__(
        self, client: Redis, keys: Keys, identity: Identity, kind: str, model: str, seconds: float
    ) -> None:
        self._keys = keys
        self._scripts = Scripts(client)
        self._identity = identity
        self._kind = kind
        self._model = model
        self._lease_ms = int(seconds * 1000)

    def register(self, slots: int, fields: Mapping[str, str | int]) -> None:
        """Announce the worker with `fields` for people to read, and take the first lease."""
        worker = self._identity.worker
        keys = [
            self._keys.leases,
            self._keys.worker(worker),
            self._keys.workers(self._kind, self._model),
        ]
        record = {
            **fields,
            "kind": self._kind,
            "model": self._model,
            "nonce": self._identity.nonce,
            "slots": slots,
        }
        flat = [part for pair in record.items() for part in pair]
        self._scripts.run("register", keys, [worker, self._lease_ms, slots, *flat])

    def renew(self, held: Mapping[str, int]) -> dict[str, str] | None:
        """Renew for the jobs really held (id → epoch).

        Returns:
            job → "ok", "cancel" or "fenced"; None when the worker is not known any more and
            has to register again.
        """
        jobs = list(held)
        keys = [self._keys.leases, self._keys.worker(self._identity.worker)]
        keys += [self._keys.job(job) for job in jobs]
        args = [self._identity.worker, self._identity.nonce, self._lease_ms]
        reply = self._scripts.run("renew", keys, [*args, *held.values()])
        if reply[0] == b"lost":
            return None
        return dict(zip(jobs, (part.decode() for part in reply[1:]), strict=True))

    def leave(self) -> bool:
        """Take the worker off the record. False: it still owns jobs, or is not known."""
        worker = self._identity.worker
        args = [worker, self._identity.nonce]
        keys = forget_keys(self._keys, worker, self._kind, self._model)
        reply: bytes = self._scripts.run("forget", keys, args)
        return reply == b"forgotten"


def forget_keys(keys: Keys, worker: str, kind: str, model: str) -> list[str]:
    """The keys of forget.lua for one worker."""
    return [
        keys.leases,
        keys.worker(worker),
        keys.workers(kind, model),
        keys.worker_jobs(worker),
        keys.inbox(worker),
    ]


def list_workers(client: Redis, keys: Keys) -> list[WorkerRecord]:
    """All registered workers, dead ones included until they are reaped."""
    until_by_id = client.zrange(keys.leases, 0, -1, withscores=True)
    leases = [(raw.decode(), until) for raw, until in until_by_id]
    now_ms = _now_ms(client)
    pipeline = client.pipeline(transaction=False)
    for worker, _ in leases:
        pipeline.hgetall(keys.worker(worker))
    workers = []
    for (worker, until), raw in zip(leases, pipeline.execute(), strict=True):
        fields = {k.decode(): v.decode() for k, v in raw.items()}
        fields.pop("nonce", None)  # it is what fences the worker; nobody else needs it
        workers.append(
            WorkerRecord(
                id=worker,
                kind=fields.get("kind", ""),
                model=fields.get("model", ""),
                slots=int(fields.get("slots", 0)),
                is_alive=until > now_ms,
                fields=fields,
            )
        )
    return workers


def live_workers(client: Redis, keys: Keys, kind: str, model: str) -> set[str]:
    """Ids of the live workers of one kind and model."""
    known = client.hkeys(keys.workers(kind, model))
    if not known:
        return set()
    now_ms = _now_ms(client)
    untils = client.zmscore(keys.leases, known)
    pairs = zip(known, untils, strict=True)
    return {worker.decode() for worker, until in pairs if until is not None and until > now_ms}


def _now_ms(client: Redis) -> float:
    """Redis's own clock, the only one that leases compare with."""
    seconds, micros = client.time()
    return float(seconds * 1000 + micros / 1000)
