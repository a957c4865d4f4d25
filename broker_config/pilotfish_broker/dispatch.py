"""Rings doorbells: publishes one Celery message a job when a live worker has a free slot for it."""

from __future__ import annotations

from celery import Celery

from pilotfish_broker.celery_app import GENERATE, ring
from pilotfish_broker.connection import Redis
from pilotfish_broker.keys import Keys, verify_queue
from pilotfish_broker.scripts import Scripts

MOST_AT_ONCE = 256
RING_AGAIN_MS = 2000


class Dispatcher:
    """Tops up the doorbells of any model. Whoever changes the number of queued jobs, free slots
    or workers calls :meth:`top_up`; calling it too often is harmless."""

    def __init__(self, app: Celery, broker: Redis, client: Redis, keys: Keys) -> None:
        self._app = app
        self._broker = broker
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client)

    def top_up(self, model: str) -> int:
        """Ring for the next jobs of `model`; returns for how many."""
        keys = [
            self._keys.pending(model),
            self._keys.dispatched(model),
            self._keys.running(model),
            self._keys.workers("verify", model),
            self._keys.leases,
        ]
        ids = self._scripts.run("dispatch", keys, [MOST_AT_ONCE])
        self._ring(model, ids)
        return len(ids)

    def ring_lost(self, model: str) -> int:
        """Ring again where a doorbell was lost: fewer messages wait than ids are dispatched."""
        dispatched = self._client.zcard(self._keys.dispatched(model))
        waiting = self._broker.llen(self._keys.celery_queue(verify_queue(model)))
        if waiting >= dispatched:
            return 0
        keys = [self._keys.dispatched(model)]
        ids = self._scripts.run("ring_again", keys, [RING_AGAIN_MS, MOST_AT_ONCE])
        self._ring(model, ids)
        return len(ids)

    def _ring(self, model: str, ids: list[bytes]) -> None:
        for raw in ids:
            job = raw.decode()
            ring(self._app, GENERATE, verify_queue(model), job, task_id=job)
