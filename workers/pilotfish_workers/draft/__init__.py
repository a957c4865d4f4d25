"""The draft worker: one Celery worker with one engine that drafts for many sessions."""
