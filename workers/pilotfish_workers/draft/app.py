"""Celery app of the draft worker: ``celery -A pilotfish_workers.draft.app worker`` is complete.

Pool, queue and number of slots follow from the settings (``PILOTFISH_*``).
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

from pilotfish_broker.celery_app import DRAFT
from pilotfish_broker.keys import draft_queue
from pilotfish_workers.draft.worker import DraftWorker, NotDrafted, TokenizerMismatch
from pilotfish_workers.lifecycle import build

app, worker = build(DraftWorker, draft_queue)


@app.task(name=DRAFT, bind=True, throws=(TokenizerMismatch,))  # type: ignore[untyped-decorator]
def draft(self: Any, job: str) -> dict[str, Any]:
    """Draft for one job until its session closes; the return value is a summary for Flower."""
    try:
        return worker.run(job)
    except NotDrafted:
        raise Ignore from None
