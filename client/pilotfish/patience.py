"""Bears a server that is away for a while: nothing is lost meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pilotfish_broker.errors import BrokerUnavailable

OUTAGE_SECONDS = 60.0
RETRY_SECONDS = 0.25

T = TypeVar("T")


class Patience:
    """Repeats what needs the server until it answers, for a minute of outage at most.

    Args:
        note: told once an outage what the matter is.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._away_since: float | None = None

    def call(self, function: Callable[[], T]) -> T:
        """The outcome of `function`, which is called again as long as the server is away.

        Raises:
            BrokerUnavailable: it was away for longer than a minute.
        """
        while True:
            try:
                outcome = function()
            except BrokerUnavailable as error:
                self._bear(error)
            else:
                self._away_since = None
                return outcome

    def _bear(self, error: BrokerUnavailable) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self._note(f"{error}; trying again")
        if now - self._away_since > OUTAGE_SECONDS:
            raise error
        time.sleep(RETRY_SECONDS)
