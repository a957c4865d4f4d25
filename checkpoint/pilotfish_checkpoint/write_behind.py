"""Writes KV blocks to a store on a thread of its own, so that nobody waits for the store.

What does not fit into the budget is dropped, and it is always the newest: a prefix is of use as
far as it has no gap, so what waits already is worth more than what comes. Losing a block costs
computing it again, nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pilotfish_checkpoint.block import Block, encode
from pilotfish_checkpoint.store import BlockStore

BATCH_BYTES = 8 << 20
COLLECT_SECONDS = 60.0
MAX_KNOWN = 1 << 16

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WriteCounters:
    """What became of the blocks that were offered.

    Attributes:
        offered: all of them; the sum of the next four and of those that still wait.
        known: not taken, since they wait already or were stored lately.
        dropped: not taken or not written, since the budget was used up or the writer was closed.
        stored: handed to the store, or found there.
        failed: handed to the store, which did not take them.
    """

    offered: int = 0
    known: int = 0
    dropped: int = 0
    stored: int = 0
    failed: int = 0


class WriteBehind:
    """A bounded queue of blocks before a store. For any number of threads.

    Args:
        store: stays open when the writer is closed.
        max_bytes: payload that waits or is being written.
        remember_seconds: how long a stored block is not written again; stores forget.
        clock: seconds from any beginning; for tests.
    """

    def __init__(
        self,
        store: BlockStore,
        max_bytes: int = 64 << 20,
        *,
        remember_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._remember_seconds = remember_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, Block] = OrderedDict()
        self._writing: dict[bytes, Block] = {}
        self._bytes = 0  # of both
        self._known: OrderedDict[bytes, float] = OrderedDict()  # address → when it was stored
        self._counters = WriteCounters()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pilotfish-kv-writer", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> WriteCounters:
        """A copy of the counters."""
        with self._changed:
            return replace(self._counters)

    @property
    def num_bytes(self) -> int:
        """Payload that waits or is being written."""
        with self._changed:
            return self._bytes

    def wants(self, address: bytes) -> bool:
        """Whether a block of that address would be taken now, unless it is larger than what is
        left; to ask before its payload is copied."""
        with self._changed:
            return not self._has(address) and not self._is_closed and self._bytes < self._max_bytes

    def offer(self, block: Block) -> bool:
        """Take the block, or not. Its payload must not change from now on."""
        address, size = block.id.address, block.id.layout.payload_bytes
        with self._changed:
            self._counters.offered += 1
            if self._has(address):
                self._counters.known += 1
                return False
            if self._is_closed or self._bytes + size > self._max_bytes:
                self._counters.dropped += 1
                return False
            self._waiting[address] = block
            self._bytes += size
            self._changed.notify_all()
            return True

    def forget(self, addresses: Iterable[bytes]) -> None:
        """Take these again when they are offered: what the store held of them was no good."""
        with self._changed:
            for address in addresses:
                self._known.pop(address, None)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits; whether that came within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def close(self, timeout: float) -> bool:
        """Take nothing more, write what waits, drop what is not written within `timeout` seconds;
        whether all was written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            is_done = not self._waiting and not self._writing
            for block in self._waiting.values():
                self._bytes -= block.id.layout.payload_bytes
            self._counters.dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return is_done

    def _has(self, address: bytes) -> bool:
        if address in self._waiting or address in self._writing:
            return True
        stored_at = self._known.get(address)
        return stored_at is not None and self._clock() < stored_at + self._remember_seconds

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            stored: list[bool] = [False] * len(batch)
            try:
                if batch:
                    stored = self._write(batch)
                else:
                    self._store.collect()
            except Exception:  # a store that breaks its word must not end the thread
                log.exception("writing KV blocks failed")
            self._settle(batch, stored)

    def _next(self) -> list[Block] | None:
        """The next blocks to write, oldest first; none if there were none for a while; None at
        the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, COLLECT_SECONDS)
            if self._is_closed and not self._waiting:
                return None
            size = 0
            while self._waiting and size < BATCH_BYTES:
                address, block = self._waiting.popitem(last=False)
                self._writing[address] = block
                size += block.id.layout.payload_bytes
            return list(self._writing.values())

    def _write(self, batch: list[Block]) -> list[bool]:
        stored = self._store.contains_many([block.id.address for block in batch])
        missing = [index for index, is_there in enumerate(stored) if not is_there]
        items = [(batch[index].id.address, encode(batch[index])) for index in missing]
        for index, is_stored in zip(missing, self._store.put_many(items), strict=True):
            stored[index] = is_stored
        return stored

    def _settle(self, batch: list[Block], stored: list[bool]) -> None:
        with self._changed:
            now = self._clock()
            for block, is_stored in zip(batch, stored, strict=True):
                address = block.id.address
                self._bytes -= block.id.layout.payload_bytes
                del self._writing[address]
                if is_stored:
                    self._known[address] = now
                    self._known.move_to_end(address)
            self._counters.stored += sum(stored)
            self._counters.failed += len(batch) - sum(stored)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            self._changed.notify_all()
