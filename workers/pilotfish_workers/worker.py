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
ENGINE_DIED = 70  # exit status (EX_SOFTWARE)

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
        """Make the housekeeping look at the queue now: a slot became free."""
        self._wake.set()

    def _register(self) -> None:
        self._leases.register(self.settings.slots, self._fields)
        self.dispatcher.top_up(self.model_name)

    def _keep_house(self) -> None:
        lease = self.settings.lease_seconds
        next_renewal = time.monotonic() + lease / 3
        next_reaping = time.monotonic()
        was_draining = False
        while not self._stopped.is_set():
            if not self.is_engine_alive and not self.is_draining.is_set():
                log.critical("the engine has died; ending the process so that others take over")
                os._exit(ENGINE_DIED)
            if self.is_draining.is_set() and not was_draining:
                was_draining = True
                self.stop_engine()
            woken = self._wake.is_set()
            self._wake.clear()
            now = time.monotonic()
            try:
                if now >= next_renewal:
                    next_renewal = now + lease / 3
                    self._renew()
                if woken and not self.is_draining.is_set():
                    self.dispatcher.top_up(self.model_name)
                if now >= next_reaping:
                    next_reaping = now + TICK_SECONDS
                    self._reaper.tick()
                self.tick()
            except redis.RedisError as error:
                log.warning("housekeeping: %s; trying again", type(error).__name__)
            except OSError as error:  # kombu's connection errors that are no RedisError
                log.warning("housekeeping: %s; trying again", type(error).__name__)
            self._wake.wait(HOUSEKEEPING_SECONDS)

    def _renew(self) -> None:
        outcomes = self._leases.renew(self.held())
        if outcomes is None:
            log.warning("this worker had been forgotten; it registers again")
            self.on_lost()
            self._register()
        else:
            self.on_renewal(outcomes)


def require_target(settings: Settings) -> str:
    """The target setting.

    Raises:
        ConfigError: it is missing.
    """
    if not settings.target:
        raise ConfigError("PILOTFISH_TARGET (--target) must name the model to serve")
    return settings.target
