"""Celery app of the verify worker: ``celery -A pilotfish_workers.verify.app worker`` is complete.

Pool, queue and number of slots follow from the settings (``PILOTFISH_*``).
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

from pilotfish_broker.celery_app import GENERATE
from pilotfish_broker.errors import JobCancelled, JobFailed
from pilotfish_broker.keys import verify_queue
from pilotfish_workers.lifecycle import build
from pilotfish_workers.verify.worker import NotMine, VerifyWorker

app, worker = build(VerifyWorker, verify_queue)


@app.task(name=GENERATE, bind=True, throws=(JobFailed,))  # type: ignore[untyped-decorator]
def generate(self: Any, job: str) -> dict[str, Any]:
    """Run one job; the return value is a summary for Flower, never text."""
    try:
        return worker.run(job)
    except JobCancelled:
        self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        raise Ignore from None
    except NotMine:
        # never by returning: a duplicate's success would stay in the dashboard for ever
        raise Ignore from None
