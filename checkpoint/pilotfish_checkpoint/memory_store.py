"""KV blocks in this process's memory: for tests, and for a worker that restarts its jobs itself."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence

from pilotfish_checkpoint.store import StoreBase


class MemoryStore(StoreBase):
    """Keeps what was used last, up to a bound.

    Args:
        max_bytes: of all values together.
        ttl_seconds: how long a value stays after its last use.
        clock: seconds from any beginning; for tests.
    """

    name = "in memory"

    def __init__(
        self,
        max_bytes: int,
        ttl_seconds: float = 86_400.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(None, None, clock)
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._lock = threading.Lock()
        # value and time of its last use, by address; the one used last at the end
        self._values: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._bytes

    def _read(self, addresses: Sequence[bytes]) -> Generator[tuple[int, bytes], None, None]:
        for index, address in enumerate(addresses):
            with self._lock:
                self._expire()
                entry = self._values.get(address)
                if entry is not None:
                    self._values[address] = (entry[0], self._clock())
                    self._values.move_to_end(address)
            if entry is not None:
                yield index, entry[0]

    def _find(self, addresses: Sequence[bytes]) -> Generator[int, None, None]:
        with self._lock:
            self._expire()
            found = [index for index, address in enumerate(addresses) if address in self._values]
        yield from found

    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        for index, (address, value) in enumerate(items):
            if len(value) > self._max_bytes:
                continue
            with self._lock:
                self._drop(address)
                self._expire()
                while self._bytes + len(value) > self._max_bytes:
                    self._evict()
                self._values[address] = (value, self._clock())
                self._bytes += len(value)
            yield index

    def _remove(self, addresses: Sequence[bytes]) -> None:
        with self._lock:
            for address in addresses:
                self._drop(address)

    def _collect(self) -> None:
        with self._lock:
            self._expire()

    def _close(self) -> None:
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def _drop(self, address: bytes) -> None:
        value, _ = self._values.pop(address, (b"", 0.0))
        self._bytes -= len(value)

    def _evict(self) -> None:
        self._drop(next(iter(self._values)))
        self._count(evictions=1)

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl_seconds
        while self._values and next(iter(self._values.values()))[1] < oldest:
            self._evict()
