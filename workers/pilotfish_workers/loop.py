"""Threads that do something again and again."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import redis
from kombu.exceptions import OperationalError

log = logging.getLogger(__name__)

# what Redis or Celery's transport gets over
PASSING = (redis.RedisError, OperationalError, OSError)
LOOP_FAILED = 70  # exit status (EX_SOFTWARE)


class Loop:
    """Calls something every so many seconds, or at once when woken, until stopped.

    A passing error is logged and the call made again. Any other ends the process: a worker
    without its lease or its reaper would only pretend to work, and its jobs go to others.
    """

    def __init__(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self._name = name
        self._seconds = seconds
        self._call = call
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pilotfish-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the next call now. Not from a signal handler."""
        self._wake.set()

    def stop(self) -> None:
        """Stop after the call under way, and wait for it a while."""
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            try:
                self._call()
            except PASSING as error:
                log.warning("%s: %s: %s; trying again", self._name, type(error).__name__, error)
            except Exception:
                log.exception("%s failed; ending the process so that others take over", self._name)
                os._exit(LOOP_FAILED)
            self._wake.wait(self._seconds)


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

    def repeat_in(self, seconds: float) -> None:
        """Let it be due in so many seconds from now, this once."""
        self._next = time.monotonic() + seconds
