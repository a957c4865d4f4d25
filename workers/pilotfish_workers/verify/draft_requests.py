"""Asks draft workers for sessions: one doorbell a job, rung again with back-off."""

from __future__ import annotations

import time
from collections.abc import Iterable

from celery import Celery

from pilotfish_broker.celery_app import DRAFT, ring
from pilotfish_broker.connection import Redis
from pilotfish_broker.keys import Keys, draft_queue

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class DraftRequests:
    """Remembers when each job last asked, so that a lost doorbell rings again and a full fleet of
    draft workers is not drowned in them."""

    def __init__(self, app: Celery, broker: Redis, keys: Keys, model: str) -> None:
        self._app = app
        self._broker = broker
        self._queue = draft_queue(model)
        self._list = keys.celery_queue(self._queue)
        self._asked: dict[str, tuple[float, float]] = {}  # job → (when to ask again, pause)

    def ask(self, jobs: Iterable[str]) -> int:
        """Ring for those of `jobs` (all that want a session) whose time has come."""
        wanted = set(jobs)
        for job in set(self._asked) - wanted:
            del self._asked[job]
        now = time.monotonic()
        due = [job for job in wanted if self._asked.get(job, (0.0, 0.0))[0] <= now]
        again = [job for job in due if job in self._asked]
        if again and self._broker.llen(self._list) > 0:
            due = [job for job in due if job not in self._asked]  # theirs may still be waiting
        for job in due:
            _, pause = self._asked.get(job, (0.0, FIRST_PAUSE_SECONDS / 2))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._asked[job] = (now + pause, pause)
            ring(self._app, DRAFT, self._queue, job, task_id=f"{job}-draft")
        return len(due)
