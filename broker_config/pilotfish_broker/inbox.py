"""Inboxes: one Redis list a worker, read by that worker alone.

An inbox is bounded and may lose frames; every wait for a frame has a limit elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

import redis

from pilotfish_broker.codec import decode_all, encode_all
from pilotfish_broker.connection import Redis, connect_blocking
from pilotfish_broker.errors import DecodeError
from pilotfish_broker.messages import Frame
from pilotfish_broker.ownership import INBOX_TTL_MS

BLOCK_SECONDS = 2.0
MOST_ENTRIES = 512
RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


def send(client: Redis, frames: Mapping[str, Iterable[Frame]], inbox_frames: int) -> None:
    """Push frames (by inbox key) in one round trip, one entry an inbox."""
    pipeline = client.pipeline(transaction=False)
    for inbox, batch in frames.items():
        entry = encode_all(batch)
        if entry:
            pipeline.rpush(inbox, entry)
            pipeline.ltrim(inbox, -inbox_frames, -1)
            pipeline.pexpire(inbox, INBOX_TTL_MS)
    # an inbox that cannot be written to must not keep the frames of others back
    for reply in pipeline.execute(raise_on_error=False):
        if isinstance(reply, redis.ConnectionError | redis.TimeoutError):
            raise reply
        if isinstance(reply, Exception):
            log.warning("could not send a frame: %s", reply)


class InboxReader:
    """A thread that hands every frame of one inbox to `deliver`, in order.

    Args:
        url: Redis server of the inbox.
        inbox: key of the list.
        deliver: called with all the frames that waited at once; must not block or raise.
    """

    def __init__(self, url: str, inbox: str, deliver: Callable[[list[Frame]], None]) -> None:
        self._client = connect_blocking(url, BLOCK_SECONDS)
        self._inbox = inbox
        self._deliver = deliver
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pilotfish-inbox", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop after the read under way; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                reply = self._client.blmpop(
                    BLOCK_SECONDS, 1, self._inbox, direction="LEFT", count=MOST_ENTRIES
                )
            except redis.RedisError as error:
                log.warning("inbox: %s; trying again", type(error).__name__)
                self._stopped.wait(RETRY_SECONDS)
                continue
            if reply:
                self._deliver(_decoded(reply[1]))
        self._client.close()


def _decoded(entries: list[bytes]) -> list[Frame]:
    frames: list[Frame] = []
    for raw in entries:
        try:
            frames += decode_all(raw)
        except DecodeError as error:
            log.warning("inbox: dropped %d bytes: %s", len(error.raw), error)
    return frames
