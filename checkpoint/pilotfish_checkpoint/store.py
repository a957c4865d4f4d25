"""What a store of KV blocks is, and what all stores have in common.

A store maps addresses (digests of 32 bytes) to values (see :mod:`~pilotfish_checkpoint.block`)
and may lose any of them at any moment: it is a cache. So whatever goes wrong in it is a miss for
who asks, is counted, and is never raised; and no call takes much longer than the store's limit.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from pilotfish_checkpoint.address import DIGEST_BYTES
from pilotfish_checkpoint.guard import Call, Guard, Refused

MAX_VALUE_BYTES = 256 << 20
LOG_SECONDS = 60.0  # between two lines about a store's errors

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreCounters:
    """What a store did since it was made.

    Attributes:
        hits: values found and read.
        misses: values asked for and not given, for whatever reason.
        bytes_read: of the hits.
        stored: values written.
        bytes_written: of these.
        skipped: values not written: no room, too large or empty, or an error.
        evictions: values thrown out to keep the bound or because their time was over. A Redis
            throws out by itself and counts that itself.
        errors: calls or values that failed, calls that took too long included.
        refused: calls that were not made since earlier ones had failed.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stored: int = 0
    bytes_written: int = 0
    skipped: int = 0
    evictions: int = 0
    errors: int = 0
    refused: int = 0


class BlockStore(Protocol):
    """A place for KV blocks. For any number of threads; only a wrong argument raises."""

    @property
    def counters(self) -> StoreCounters:
        """A copy of the counters."""

    def get_many(self, addresses: Sequence[bytes]) -> list[bytes | None]:
        """The value of each address, or None; what is read counts as used."""

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Store (address, value) pairs; for each, whether it is stored now. What is there
        already is replaced."""

    def contains_many(self, addresses: Sequence[bytes]) -> list[bool]:
        """Whether each address has a value, read or not."""

    def delete(self, addresses: Sequence[bytes]) -> None:
        """Forget the values of these addresses."""

    def collect(self) -> None:
        """Throw out what is too old or too much, and rests of writers that died. Stores do this
        while they write; call it now and then when they do not."""

    def close(self) -> None:
        """Let go of connections. A closed store finds nothing and takes nothing."""


class StoreBase(ABC):
    """Counters, time limits and error handling; a store adds the verbs with an underscore.

    These run on a thread of the guard, yield what they have done as they go, and may be left at
    any yield. They raise when the store as a whole fails, and call `_note` when one value does.

    Args:
        read_seconds: limit of a call that reads; None for a store that never waits.
        write_seconds: limit of one that writes.
        clock: seconds from any beginning; for tests.
    """

    name = "store"

    def __init__(
        self,
        read_seconds: float | None,
        write_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reads = Guard(read_seconds, clock)
        self._writes = Guard(write_seconds, clock)
        self._counting = threading.Lock()
        self._counters = StoreCounters()
        self._logged_at: float | None = None
        self._is_closed = False

    @abstractmethod
    def _read(self, addresses: Sequence[bytes]) -> Generator[tuple[int, bytes], None, None]:
        """Index and value of each address that has one."""

    @abstractmethod
    def _find(self, addresses: Sequence[bytes]) -> Generator[int, None, None]:
        """Index of each address that has a value."""

    @abstractmethod
    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        """Index of each pair that was stored."""

    @abstractmethod
    def _remove(self, addresses: Sequence[bytes]) -> None:
        """Forget these."""

    def _collect(self) -> None:  # noqa: B027 - not every store has something to do
        """Throw out what is too old or too much."""

    def _close(self) -> None:  # noqa: B027
        """Let go of connections."""

    @property
    def counters(self) -> StoreCounters:
        with self._counting:
            return replace(self._counters)

    def get_many(self, addresses: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(addresses)

        def work(call: Call) -> None:
            with closing(self._read(addresses)) as values:
                for index, value in values:
                    found[index] = value
                    if call.is_abandoned:
                        return

        if _are_addresses(addresses):
            self._attempt(self._reads, work)
        result = list(found)  # a copy, since an abandoned call may still fill in something
        hits = [len(value) for value in result if value is not None]
        self._count(hits=len(hits), misses=len(result) - len(hits), bytes_read=sum(hits))
        return result

    def contains_many(self, addresses: Sequence[bytes]) -> list[bool]:
        found = [False] * len(addresses)
        if _are_addresses(addresses):
            self._attempt(self._reads, lambda call: _mark(found, self._find(addresses), call))
        return list(found)

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        fits = [0 < len(value) <= MAX_VALUE_BYTES for _, value in items]
        sent = [item for item, does_fit in zip(items, fits, strict=True) if does_fit]
        done = [False] * len(sent)
        if _are_addresses([address for address, _ in sent]):
            self._attempt(self._writes, lambda call: _mark(done, self._write(sent), call))
        outcome = iter(list(done))
        result = [does_fit and next(outcome) for does_fit in fits]
        sizes = [len(item[1]) for item, is_in in zip(items, result, strict=True) if is_in]
        self._count(stored=len(sizes), bytes_written=sum(sizes), skipped=len(items) - len(sizes))
        return result

    def delete(self, addresses: Sequence[bytes]) -> None:
        if _are_addresses(addresses):
            self._attempt(self._writes, lambda _: self._remove(addresses))

    def collect(self) -> None:
        self._attempt(self._writes, lambda _: self._collect())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._close()
        except Exception as error:  # see _attempt
            self._note(error)

    def _attempt(self, guard: Guard, work: Callable[[Call], None]) -> None:
        if self._is_closed:
            self._count(refused=1)
            return
        try:
            guard.call(work)
        except Refused:
            self._count(refused=1)
        except Exception as error:  # whatever a cache raises, those whom it serves go on
            self._note(error)

    def _count(self, **more: int) -> None:
        with self._counting:
            for counter, number in more.items():
                setattr(self._counters, counter, getattr(self._counters, counter) + number)

    def _note(self, error: Exception) -> None:
        """Count an error, and write a line about it if there was none lately."""
        with self._counting:
            self._counters.errors += 1
            errors, now = self._counters.errors, time.monotonic()
            if self._logged_at is not None and now < self._logged_at + LOG_SECONDS:
                return
            self._logged_at = now
        log.warning("KV store %s failed: %s; errors so far: %d", self.name, _kind(error), errors)


def _are_addresses(addresses: Sequence[bytes]) -> bool:
    """Whether there are any. `ValueError` if one is none."""
    for address in addresses:
        if len(address) != DIGEST_BYTES:
            raise ValueError(f"an address has {DIGEST_BYTES} bytes, not {len(address)}")
    return len(addresses) > 0


def _kind(error: Exception) -> str:
    """What sort of error it is, without its text: a server may quote what it was sent, such as
    its password."""
    name = type(error).__name__
    code = errno.errorcode.get(getattr(error, "errno", None) or 0)
    return f"{name} ({code})" if code else name


def _mark(done: list[bool], indices: Generator[int, None, None], call: Call) -> None:
    with closing(indices):
        for index in indices:
            done[index] = True
            if call.is_abandoned:
                return
