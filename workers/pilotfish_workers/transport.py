"""Celery's Redis transport, made to outlive entries that are no messages.

Left alone, one entry of a queue that is no JSON ends the worker that pops it, and a whole fleet
falls to a handful of them. Our inboxes drop what they cannot read; so does this.
"""

from __future__ import annotations

import logging
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as redis_transport

log = logging.getLogger(__name__)


class Channel(redis_transport.Channel):  # type: ignore[misc]
    """Pops messages, and drops what cannot be one."""

    # Celery 5.7 dies of a lost connection while it puts unacknowledged messages back. Ours are
    # doorbells: they ring again when one was lost.
    do_restore = False

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            log.warning("dropped an entry of a queue that is no message: %s", type(error).__name__)
            raise Empty from None


class Transport(redis_transport.Transport):  # type: ignore[misc]
    """The Redis transport with that channel."""

    Channel = Channel


def install_transport() -> None:
    """Make every Redis connection of Celery's in this process use it."""
    for name in ("redis", "rediss"):
        TRANSPORT_ALIASES[name] = f"{__name__}:Transport"
