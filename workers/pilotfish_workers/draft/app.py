"""Celery app of the draft worker: ``celery -A pilotfish_workers.draft.app worker`` is complete.

Pool, queue and number of slots follow from the settings (``PILOTFISH_*``).
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

from pilotfish_broker.celery_app import DRAFT, make_app
from pilotfish_broker.keys import draft_queue
from pilotfish_workers.draft.worker import DraftWorker, NotDrafted, TokenizerMismatch
from pilotfish_workers.lifecycle import install, served_name_or_none, settings_or_exit

settings = settings_or_exit()
_name = served_name_or_none(settings)
app = make_app(settings, queue=draft_queue(_name) if _name else None, slots=settings.slots)
worker = DraftWorker(settings, app)
install(app, worker)


@app.task(name=DRAFT, bind=True, throws=(TokenizerMismatch,))  # type: ignore[untyped-decorator]
def draft(self: Any, job: str) -> dict[str, Any]:
    """Draft for one job until its session closes; the return value is a summary for Flower."""
    try:
        return worker.run(job)
    except NotDrafted:
        raise Ignore from None
