"""What both kinds of worker share: identity, lease, inbox, and the thread that keeps house."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from pilotfish_broker.connection import check_server, connect
from pilotfish_broker.dispatch import Dispatcher
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.inbox import InboxReader
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.messages import Frame
from pilotfish_broker.ownership import Identity
from pilotfish_broker.reaper import TICK_SECONDS, Reaper
from pilotfish_broker.settings import Settings

HOUSEKEEPING_SECONDS = 0.1
DRAIN_SECONDS = 15.0
ENGINE_DIED = 70  # exit statuses (EX_SOFTWARE and the one after it)
DRAIN_FAILED = 71
# what Redis or Celery's transport gets over
PASSING = (redis.RedisError, OperationalError, OSError)

log = logging.getLogger(__name__)


class Worker(ABC):
    """One incarnation of one worker process.

    The order of a life: `start` (load, register, read the inbox), `drain` from the signal
    handler, `stop`. A thread renews the lease every third of its life, runs the reaper, and ends
    the process when the engine has died, so that its jobs go to others.
    """

    kind: str

    def __init__(self, settings: Settings, app: Celery) -> None:
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self.app = app
        self.identity = Identity(f"{self.kind}-{secrets.token_hex(5)}", secrets.token_hex(16))
        self.client = connect(settings.redis_url)
        self.is_draining = threading.Event()
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._drain_ends: float | None = None
        self._progress = (-1, 0.0)  # of the engine, and when it was first seen
        self._renewal = Every(settings.lease_seconds / 3)
        # the reaper takes half a lease without a look at Redis for a gap in Redis's service
        self._reaping = Every(min(TICK_SECONDS, settings.lease_seconds / 4))

    @property
    def model_name(self) -> str:
        """The served name."""
        return self.settings.served_name

    @property
    def inbox(self) -> str:
        """Key of this worker's inbox."""
        return self.keys.inbox(self.identity.worker)

    # --- what a kind of worker adds ------------------------------------------------------------

    @abstractmethod
    def open(self) -> dict[str, str | int]:
        """Load the model and build the engine; returns fields for the worker record."""

    @abstractmethod
    def start_engine(self) -> None:
        """Start the engine's threads."""

    @abstractmethod
    def stop_engine(self) -> None:
        """Ask the engine to end after the iteration under way. Must not block."""

    @abstractmethod
    def join_engine(self, timeout: float) -> None:
        """Wait for the engine to end."""

    @property
    @abstractmethod
    def is_engine_alive(self) -> bool:
        """Whether the engine works."""

    @property
    @abstractmethod
    def engine_progress(self) -> int:
        """A number that changes with every iteration of the engine, idle ones too."""

    @abstractmethod
    def deliver(self, frames: list[Frame]) -> None:
        """Hand frames to the engine."""

    def held(self) -> Mapping[str, int]:
        """Jobs that this worker owns (id → epoch)."""
        return {}

    @abstractmethod
    def on_renewal(self, outcomes: Mapping[str, str]) -> None:
        """Learn what a renewal said of the held jobs."""

    @abstractmethod
    def on_lost(self) -> None:
        """The worker had been forgotten: everything it held has another owner."""

    @abstractmethod
    def tick(self) -> None:
        """Called about ten times a second."""

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Load, register and serve.

        Raises:
            PilotfishError: it cannot start; the message says what to do.
        """
        name = self.model_name
        check_server(self.client, self.settings.redis_url)
        if self.settings.broker_url != self.settings.redis_url:
            check_server(connect(self.settings.broker_url), self.settings.broker_url)
        fields = self.open()
        self._broker = connect(self.settings.broker_url)
        self.dispatcher = Dispatcher(self.app, self._broker, self.client, self.keys)
        self._reaper = Reaper(self.client, self.keys, self.settings, self.dispatcher)
        self._leases = Leases(
            self.client,
            self.keys,
            self.identity,
            self.kind,
            name,
            self.settings.lease_seconds,
        )
        self._fields = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "inbox": self.inbox,
            "started_ms": int(time.time() * 1000),
            **fields,
        }
        self._register()
        self._reader = InboxReader(self.settings.redis_url, self.inbox, self.deliver)
        self.start_engine()
        self._reader.start()
        self._thread = threading.Thread(
            target=self._keep_house, name="pilotfish-house", daemon=True
        )
        self._thread.start()
        log.info("%s serves %s with %d slots", self.identity.worker, name, self.settings.slots)

    def drain(self) -> None:
        """Take nothing new and let go of what runs. Safe in a signal handler."""
        self.is_draining.set()
        self._wake.set()

    def stop(self) -> None:
        """End the engine and leave the records. Called once, after the slots are empty."""
        self.drain()
        if not hasattr(self, "_thread"):
            return
        self.stop_engine()
        self.join_engine(timeout=10)
        self._stopped.set()
        self._wake.set()
        self._reader.stop()
        self._thread.join(timeout=10)
        try:
            self._leases.leave()
        except redis.RedisError:
            log.warning("could not take the worker off the record; its lease will end")

    def wake(self) -> None:
        """Do the chores now: a slot became free, or a job came in."""
        self._wake.set()

    def _register(self) -> None:
        self._leases.register(self.settings.slots, self._fields)
        self.dispatcher.top_up(self.model_name)

    def _keep_house(self) -> None:
        while not self._stopped.is_set():
            self._watch_engine()
            try:
                self._do_chores()
            except PASSING as error:
                log.warning("housekeeping: %s; trying again", type(error).__name__)
            except Exception:
                # without its lease the worker would only pretend to work
                log.exception("housekeeping failed; ending the process so that others take over")
                os._exit(ENGINE_DIED)
            self._wake.wait(HOUSEKEEPING_SECONDS)

    def _watch_engine(self) -> None:
        if not self.is_draining.is_set():
            if not self.is_engine_alive:
                log.critical("the engine has died; ending the process so that others take over")
                os._exit(ENGINE_DIED)
            self._watch_progress()
            return
        if self._drain_ends is None:
            self._drain_ends = time.monotonic() + DRAIN_SECONDS
            self.stop_engine()
        elif time.monotonic() > self._drain_ends and self.is_engine_alive:
            log.critical("the engine does not let go of its jobs; their lease will end")
            os._exit(DRAIN_FAILED)

    def _watch_progress(self) -> None:
        progress, now = self.engine_progress, time.monotonic()
        if progress != self._progress[0]:
            self._progress = (progress, now)
        elif now - self._progress[1] > self.settings.hang_seconds:
            log.critical("the engine hangs; ending the process so that others take over")
            os._exit(ENGINE_DIED)

    def _do_chores(self) -> None:
        woken = self._wake.is_set()
        self._wake.clear()
        if self._renewal.is_due():
            self._renew()
        if woken and not self.is_draining.is_set():
            self.dispatcher.top_up(self.model_name)
        if self._reaping.is_due():
            self._reaper.tick()
        self.tick()

    def _renew(self) -> None:
        outcomes = self._leases.renew(self.held())
        if outcomes is None:
            log.warning("this worker had been forgotten; it registers again")
            self.on_lost()
            self._register()
        else:
            self.on_renewal(outcomes)


class Every:
    """Says when something is to be done that is done every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def is_due(self) -> bool:
        """Whether it is time; if so, the next time is a period from now."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


def require_target(settings: Settings) -> str:
    """The target setting.

    Raises:
        ConfigError: it is missing.
    """
    if not settings.target:
        raise ConfigError("PILOTFISH_TARGET (--target) must name the model to serve")
    return settings.target
