"""Calls to something that may be slow, hang or fail, at a price that is known beforehand.

A file on a network drive, a name that no server resolves and a peer that sends a byte a second
have no time limit of their own. So the work runs on a thread of its own, and who asked waits for
it no longer than the guard's limit. After a failure nothing is asked for a while that doubles each
time; then one call tries again, and only its success opens the way for the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class Refused(Exception):
    """The call was not made: the last ones failed, or one of them still hangs."""


class Overdue(Exception):
    """The call took longer than the guard waits; it was left to itself."""


class Call:
    """One piece of work under way. The work reads `is_abandoned` and stops early when it is."""

    def __init__(self, work: Callable[[Call], None]) -> None:
        self.is_abandoned = False
        self.error: Exception | None = None
        self.done = threading.Event()
        self._work = work

    def run(self) -> None:
        try:
            self._work(self)
        except Exception as error:  # raised again where the result is waited for
            self.error = error
        finally:
            self.done.set()


class Guard:
    """Time limit and circuit breaker for calls of one kind; for any number of threads.

    Args:
        seconds: how long a call is waited for. None runs it in the caller's thread, and never
            refuses: for what can neither wait nor fail as a whole.
        clock: seconds from any beginning; for tests.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._closed_until = 0.0
        self._is_trying = False
        self._left: list[Call] = []  # abandoned ones that may still run

    def call(self, work: Callable[[Call], None]) -> None:
        """Run `work`.

        Raises:
            Refused: it was not run.
            Overdue: it did not end in time; it may still be running.
            Exception: what `work` raised.
        """
        call = Call(work)
        if self._seconds is None:
            call.run()
            if call.error is not None:
                raise call.error
            return
        is_trial = self._enter()
        is_fine = False
        try:
            self._wait(call, self._seconds)
            is_fine = True
        finally:
            self._leave(is_fine, is_trial)

    def _enter(self) -> bool:
        with self._lock:
            self._left = [call for call in self._left if not call.done.is_set()]
            if self._left or self._is_trying or self._is_pausing():
                raise Refused
            self._is_trying = self._failures > 0
            return self._is_trying

    def _wait(self, call: Call, seconds: float) -> None:
        threading.Thread(target=call.run, name="pilotfish-kv-call", daemon=True).start()
        if not call.done.wait(seconds):
            with self._lock:
                call.is_abandoned = True
                self._left.append(call)
            raise Overdue(f"no answer within {seconds:g} s")
        if call.error is not None:
            raise call.error

    def _leave(self, is_fine: bool, is_trial: bool) -> None:
        with self._lock:
            if is_trial:
                self._is_trying = False
            if is_fine:
                self._failures = 0
                return
            if is_trial or not self._is_pausing():  # calls that fail together count once
                pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10)
                self._failures += 1
                self._closed_until = self._clock() + min(pause, LONGEST_PAUSE_SECONDS)

    def _is_pausing(self) -> bool:
        # a clock of the day may be set back, which must not make a pause of hours
        return 0 < self._closed_until - self._clock() <= LONGEST_PAUSE_SECONDS
