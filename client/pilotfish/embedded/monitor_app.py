"""A Celery app without tasks, for tools that only watch: ``celery -A …monitor_app flower``."""

from __future__ import annotations

from pilotfish_broker.celery_app import make_app
from pilotfish_broker.settings import Settings

app = make_app(Settings.from_env())
