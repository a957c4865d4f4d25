"""The Celery side: one app factory for clients and for both kinds of worker.

A message is a doorbell: it carries a job id and nothing else, it is acknowledged early, and
losing or doubling it is harmless because the truth stands in the job record.
"""

from __future__ import annotations

import ssl

from celery import Celery
from kombu import Exchange, Queue

from pilotfish_broker.keys import Keys
from pilotfish_broker.settings import Settings

GENERATE = "pilotfish.generate"
DRAFT = "pilotfish.draft"


def declared_queue(name: str) -> Queue:
    """A queue on the default exchange, so that publishing needs no binding to exist."""
    return Queue(name, Exchange("", type="direct"), routing_key=name)


def transport_url(url: str) -> str:
    """A Redis URL as Celery's transport writes it: Unix sockets have another form there."""
    if not url.startswith("unix://"):
        return url
    return url.replace("unix://", "redis+socket://", 1).replace("?db=", "?virtual_host=")


def make_app(settings: Settings, *, queue: str | None = None, slots: int | None = None) -> Celery:
    """A Celery app. Workers name the one queue that they consume and their number of slots."""
    app = Celery("pilotfish", broker=transport_url(settings.broker_url), set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        task_ignore_result=True,
        task_acks_late=False,
        task_create_missing_queues=False,
        worker_disable_prefetch=True,
        worker_prefetch_multiplier=1,
        worker_pool="threads",
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "global_keyprefix": Keys(settings.namespace).broker_prefix,
            "visibility_timeout": 3600,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        enable_utc=True,
    )
    if settings.broker_url.startswith("rediss://") and "ssl_" not in settings.broker_url:
        # left alone, Celery's transport takes any certificate; redis-py checks it
        app.conf.broker_use_ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    if queue is not None:
        app.conf.task_queues = [declared_queue(queue)]
        app.conf.task_default_queue = queue
        app.conf.worker_concurrency = slots
    return app


def ring(app: Celery, task: str, queue: str, job: str, *, task_id: str) -> None:
    """Publish a doorbell for a job."""
    app.send_task(
        task,
        args=[job],
        task_id=task_id,
        queue=declared_queue(queue),
        ignore_result=True,
        retry=True,
        retry_policy={"max_retries": 2, "interval_start": 0, "interval_step": 0.2},
    )
