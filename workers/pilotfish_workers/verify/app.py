"""Celery app of the verify worker: ``celery -A pilotfish_workers.verify.app worker`` is complete.

Pool, queue and number of slots follow from the settings (``PILOTFISH_*``).
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

from pilotfish_broker.celery_app import GENERATE, make_app
from pilotfish_broker.errors import JobCancelled, JobFailed
from pilotfish_broker.keys import verify_queue
from pilotfish_workers.lifecycle import install, served_name_or_none, settings_or_exit
from pilotfish_workers.verify.worker import NotMine, VerifyWorker

settings = settings_or_exit()
_name = served_name_or_none(settings)
app = make_app(settings, queue=verify_queue(_name) if _name else None, slots=settings.slots)
worker = VerifyWorker(settings, app)
install(app, worker)


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
