"""Takes jobs back from dead workers. Every worker runs one; a short lock lets one act."""

from __future__ import annotations

import logging
import time

import redis

from pilotfish_broker.connection import Redis, is_passing
from pilotfish_broker.dispatch import Dispatcher
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import forget_keys, list_workers
from pilotfish_broker.scripts import Scripts
from pilotfish_broker.settings import Settings

TICK_SECONDS = 1.0

log = logging.getLogger(__name__)


class Reaper:
    """Call :meth:`tick` about once a second.

    After a gap in Redis's own service it takes no job for one full lease, since until then
    nobody's renewal can have gone through. A new reaper cannot know of such a gap, so it begins
    with that wait.
    """

    def __init__(
        self, client: Redis, keys: Keys, settings: Settings, dispatcher: Dispatcher
    ) -> None:
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client)
        self._settings = settings
        self._dispatcher = dispatcher
        self._last_answer = time.monotonic()
        self._not_before = time.monotonic() + settings.lease_seconds
        self._next_full = 0.0

    def tick(self) -> int:
        """Re-queue what dead workers owned and ring lost doorbells again.

        Returns:
            how many jobs were taken back.
        """
        if self._waits():
            self._top_up()
            return 0
        if not self._client.set(self._keys.reaper, "1", nx=True, px=int(TICK_SECONDS * 900)):
            return 0
        taken = self._reap()
        self._top_up()
        return taken

    def _waits(self) -> bool:
        """Whether renewals may not have gone through for a full lease."""
        lease = self._settings.lease_seconds
        started = time.monotonic()
        try:
            self._client.ping()
        except redis.RedisError:
            self._not_before = time.monotonic() + lease
            raise
        now = time.monotonic()
        if started - self._last_answer > lease / 2 or now - started > lease / 3:
            self._not_before = now + lease
        self._last_answer = now
        return now < self._not_before

    def _reap(self) -> int:
        taken = 0
        now = time.monotonic()
        is_full = now >= self._next_full  # also jobs that a live owner no longer lists
        if is_full:
            self._next_full = now + self._settings.lease_seconds
        for worker in list_workers(self._client, self._keys):
            if is_full or not worker.is_alive:
                taken += self._reap_jobs(worker.id)
            if not worker.is_alive:
                keys = forget_keys(self._keys, worker.id, worker.kind, worker.model)
                if self._scripts.run("forget", keys, [worker.id, ""]) == b"forgotten":
                    log.warning("worker %s is gone", worker.id)
        return taken

    def _top_up(self) -> None:
        for raw in self._client.smembers(self._keys.models):
            self._dispatcher.top_up(raw.decode())
            self._dispatcher.ring_lost(raw.decode())

    def _reap_jobs(self, worker: str) -> int:
        taken = 0
        for raw in self._client.smembers(self._keys.worker_jobs(worker)):
            job = raw.decode()
            try:
                outcome = self._requeue(job, worker)
            except redis.ResponseError as error:
                if is_passing(error):
                    raise
                log.error("job %s cannot be taken from %s: %s", job, worker, error)
                continue  # one damaged record must not keep the others where they are
            if outcome != "kept":
                taken += 1
                log.warning("job %s: %s, its worker %s does not hold it", job, outcome, worker)
        return taken

    def _requeue(self, job: str, worker: str) -> str:
        fields = self._client.hmget(self._keys.job(job), "model", "group")
        model, group = ((value or b"").decode() for value in fields)
        keys = [
            self._keys.job(job),
            self._keys.pending(model),
            self._keys.running(model),
            self._keys.worker_jobs(worker),
            self._keys.leases,
            self._keys.tokens(job),
            self._keys.done(group),
            self._keys.worker(worker),
        ]
        args = [
            job,
            worker,
            self._settings.max_attempts,
            int(self._settings.result_ttl_seconds * 1000),
        ]
        outcome: str = self._scripts.run("requeue", keys, args).decode()
        return outcome
