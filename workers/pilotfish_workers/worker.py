"""What both kinds of worker share: identity, lease, inbox, and the threads that keep house."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import redis
from celery import Celery

from pilotfish_broker.connection import check_server, connect
from pilotfish_broker.dispatch import Dispatcher
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.inbox import InboxReader
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.ownership import Identity
from pilotfish_broker.reaper import TICK_SECONDS, Reaper
from pilotfish_broker.settings import Settings
from pilotfish_workers.engine_thread import EngineThread
from pilotfish_workers.loop import Every, Loop

WATCH_SECONDS = 0.1
CHORE_SECONDS = 0.1
RENEWAL_RETRY_SECONDS = 0.5
DRAIN_SECONDS = 15.0
ENGINE_DIED = 70  # exit statuses (EX_SOFTWARE and the one after it)
DRAIN_FAILED = 71

log = logging.getLogger(__name__)


class Worker(ABC):
    """One incarnation of one worker process.

    The order of a life: `start` (load, register, read the inbox), `drain` from the signal
    handler, `stop`. One thread renews the lease and watches the engine, whose death ends the
    process so that its jobs go to others. Another does the chores that may have to wait for a
    slow broker; the lease never does.
    """

    kind: str

    def __init__(self, settings: Settings, app: Celery) -> None:
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self.app = app
        self.identity = Identity(f"{self.kind}-{secrets.token_hex(5)}", secrets.token_hex(16))
        self.client = connect(settings.redis_url)
        self.is_draining = False  # a plain flag: it is set in a signal handler
        self._has_started = False
        self._slot_freed = threading.Event()
        self._drain_ends: float | None = None
        self._progress = (-1, 0.0)  # of the engine, and when it was first seen
        self._renewal = Every(settings.lease_seconds / 3)
        # the reaper takes half a lease without a look at Redis for a gap in Redis's service
        self._reaping = Every(min(TICK_SECONDS, settings.lease_seconds / 4))
        self._watch = Loop("lease", WATCH_SECONDS, self._keep_lease)
        self._chores = Loop("chores", CHORE_SECONDS, self._do_chores)

    @property
    def model_name(self) -> str:
        """The served name."""
        return self.settings.served_name

    @property
    def inbox(self) -> str:
        """Key of this worker's inbox."""
        return self.keys.inbox(self.identity.worker)

    # --- what a kind of worker adds ------------------------------------------------------------

    @property
    @abstractmethod
    def engine(self) -> EngineThread[Any]:
        """The engine, once `open` has built it."""

    @abstractmethod
    def open(self) -> dict[str, str | int]:
        """Load the model and build the engine; returns fields for the worker record."""

    @abstractmethod
    def reader(self) -> InboxReader:
        """A reader that hands this worker's frames to the engine."""

    def held(self) -> Mapping[str, int]:
        """Jobs that this worker owns (id → epoch)."""
        return {}

    @abstractmethod
    def on_renewal(self, held: Mapping[str, int], outcomes: Mapping[str, str]) -> None:
        """Learn what a renewal said of the jobs that were held when it was asked for."""

    @abstractmethod
    def tick(self) -> None:
        """A chore: called about ten times a second, and when something changed."""

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Load, register and serve.

        Raises:
            PilotfishError: it cannot start; the message says what to do.
        """
        settings, name = self.settings, self.model_name
        check_server(self.client, settings.redis_url)
        self._broker = connect(settings.broker_url)
        if settings.broker_url != settings.redis_url:
            check_server(self._broker, settings.broker_url)
        fields = self.open()
        if self.is_draining:
            return  # told to end while the model was loading: nobody may ring for it
        self.dispatcher = Dispatcher(self.app, self._broker, self.client, self.keys)
        self._reaper = Reaper(self.client, self.keys, settings, self.dispatcher)
        self._leases = Leases(
            self.client, self.keys, self.identity, self.kind, name, settings.lease_seconds
        )
        self._fields = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "inbox": self.inbox,
            "started_ms": int(time.time() * 1000),
            **fields,
        }
        self._register()
        self._reader = self.reader()
        self.engine.start()
        self._reader.start()
        self._watch.start()
        self._chores.start()
        self._has_started = True
        log.info("%s serves %s with %d slots", self.identity.worker, name, settings.slots)

    def drain(self) -> None:
        """Take nothing new and let go of what runs. Safe in a signal handler."""
        self.is_draining = True

    def stop(self) -> None:
        """End the engine and leave the records. Called once, after the slots are empty."""
        self.drain()
        if not self._has_started:
            return
        self.engine.stop()
        self.engine.join(timeout=10)
        self._chores.stop()
        self._watch.stop()
        self._reader.stop()
        try:
            self._leases.leave()
        except redis.RedisError:
            log.warning("could not take the worker off the record; its lease will end")

    def slot_freed(self) -> None:
        """A slot became free: ring for the next job now."""
        self._slot_freed.set()
        self._chores.wake()

    def _register(self) -> None:
        self._leases.register(self.settings.slots, self._fields)
        self._slot_freed.set()

    # --- the lease's thread --------------------------------------------------------------------

    def _keep_lease(self) -> None:
        self._watch_engine()
        if self._renewal.is_due():
            self._renewal.repeat_in(RENEWAL_RETRY_SECONDS)  # unless this one goes through
            self._renew()
            self._renewal.repeat_in(self.settings.lease_seconds / 3)

    def _renew(self) -> None:
        held = self.held()
        outcomes = self._leases.renew(held)
        if outcomes is None:
            log.warning("this worker had been forgotten; it registers again")
            self._register()
            outcomes = dict.fromkeys(held, "fenced")
        self.on_renewal(held, outcomes)

    def _watch_engine(self) -> None:
        if self.is_draining:
            self._watch_drain()
        elif not self.engine.is_alive or not self._reader.is_alive:
            log.critical("the engine has died; ending the process so that others take over")
            os._exit(ENGINE_DIED)
        else:
            self._watch_progress()

    def _watch_drain(self) -> None:
        if self._drain_ends is None:
            self._drain_ends = time.monotonic() + DRAIN_SECONDS
            self.engine.stop()
        elif time.monotonic() > self._drain_ends and self.engine.is_alive:
            log.critical("the engine does not let go of its jobs; their lease will end")
            os._exit(DRAIN_FAILED)

    def _watch_progress(self) -> None:
        progress, now = self.engine.progress, time.monotonic()
        if progress != self._progress[0]:
            self._progress = (progress, now)
        elif now - self._progress[1] > self.settings.hang_seconds:
            log.critical("the engine hangs; ending the process so that others take over")
            os._exit(ENGINE_DIED)

    # --- the chores' thread --------------------------------------------------------------------

    def _do_chores(self) -> None:
        if self._slot_freed.is_set() and not self.is_draining:
            self._slot_freed.clear()
            self.dispatcher.top_up(self.model_name)
        if self._reaping.is_due():
            self._reaper.tick()
        self.tick()


def require_target(settings: Settings) -> str:
    """The target setting.

    Raises:
        ConfigError: it is missing.
    """
    if not settings.target:
        raise ConfigError("PILOTFISH_TARGET (--target) must name the model to serve")
    return settings.target
