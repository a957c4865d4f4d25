"""Ties a worker to Celery: a bootstep that starts it before any message is consumed, and signals.

The engine outlives the consumer: on SIGTERM Celery stops consuming, then waits for the slots,
which the drained engine empties; only then is the engine joined.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from celery import Celery, bootsteps, signals
from celery.worker import state

from pilotfish_broker.celery_app import make_app
from pilotfish_broker.connection import translated
from pilotfish_broker.errors import (
    BrokerMisconfigured,
    BrokerUnavailable,
    ConfigError,
    PilotfishError,
)
from pilotfish_broker.settings import Settings
from pilotfish_workers.transport import install_transport
from pilotfish_workers.worker import Worker

BAD_CONFIGURATION = 2  # exit statuses, the same as the command line's
BROKER_UNAVAILABLE = 3

Kind = TypeVar("Kind", bound=Worker)
log = logging.getLogger(__name__)


def settings_or_exit() -> Settings:
    """Settings from the environment; a bad value ends the process with one line."""
    try:
        return Settings.from_env()
    except ConfigError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        raise SystemExit(BAD_CONFIGURATION) from None


def served_name_or_none(settings: Settings) -> str | None:
    """The served name; None where none is set, as for ``celery inspect`` and Flower."""
    if not settings.target and not settings.model:
        return None
    try:
        return settings.served_name
    except ConfigError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        raise SystemExit(BAD_CONFIGURATION) from None


def build(
    kind: Callable[[Settings, Celery], Kind], queue_of: Callable[[str], str]
) -> tuple[Celery, Kind]:
    """App and worker of one kind, from the environment; what an app module consists of.

    Args:
        kind: the worker's class.
        queue_of: the queue that it consumes, by served name.
    """
    settings = settings_or_exit()
    name = served_name_or_none(settings)
    app = make_app(settings, queue=queue_of(name) if name else None, slots=settings.slots)
    worker = kind(settings, app)
    install(app, worker)
    return app, worker


def check_command_line(settings: Settings, pool: str, concurrency: int) -> None:
    """Refuse what makes a worker that is not as its settings say.

    Raises:
        ConfigError: the pool is not of threads, or its size is not the number of slots.
    """
    _ = settings.served_name  # without one there is no queue, and so no number of slots
    if pool != "thread":
        raise ConfigError(f"this worker runs with --pool threads only, not {pool}")
    if concurrency != settings.slots:
        raise ConfigError(
            f"--concurrency {concurrency} does not equal PILOTFISH_SLOTS={settings.slots}"
        )


def stop_process(reason: str) -> None:
    """End this worker process in good order, for a reason that a person has to mend."""
    print(f"pilotfish: {reason}", file=sys.stderr, flush=True)
    state.should_stop = BAD_CONFIGURATION


def install(app: Celery, worker: Worker) -> None:
    """Make `app`'s worker process run `worker`."""

    install_transport()

    class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]
        """Loads the model and starts the engine; refuses another pool or number of slots."""

        # after the pool, so that this step is stopped before it; the consumer always comes last
        requires = ("celery.worker.components:Pool",)

        def start(self, parent: Any) -> None:
            pool = parent.pool_cls.__module__.rpartition(".")[2]
            try:
                check_command_line(worker.settings, pool, parent.concurrency)
                with translated(worker.settings.redis_url):
                    worker.start()
            except (BrokerUnavailable, BrokerMisconfigured) as error:
                print(f"pilotfish: {error}", file=sys.stderr, flush=True)
                raise SystemExit(BROKER_UNAVAILABLE) from error
            except PilotfishError as error:
                print(f"pilotfish: {error}", file=sys.stderr, flush=True)
                raise SystemExit(BAD_CONFIGURATION) from error

        def close(self, parent: Any) -> None:
            worker.drain()

    def on_shutting_down(**_: Any) -> None:
        worker.drain()

    def on_shutdown(**_: Any) -> None:
        worker.stop()

    app.steps["worker"].add(EngineStep)
    signals.worker_shutting_down.connect(on_shutting_down, weak=False)
    signals.worker_shutdown.connect(on_shutdown, weak=False)
