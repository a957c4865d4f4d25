"""What all stores have in common, where it takes a store that can be held up to see it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

import pytest

from pilotfish_checkpoint.store import StoreBase, StoreCounters
from tests.checkpoint_kit import addresses_of, items_of, make_blocks

ITEMS = items_of(make_blocks(12))
ADDRESSES = addresses_of(make_blocks(12))
VALUES = [value for _, value in ITEMS]
SIZE = len(VALUES[0])
PATIENT = 60.0  # a limit that no test reaches


class SlowStore(StoreBase):
    """One that hangs behind the fourth value of a call until it is let go on."""

    name = "slow"

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, seconds)
        self.may_go_on = threading.Event()
        self.done: list[int] = []

    def _slowly(self, indices: Sequence[int]) -> Generator[int, None, None]:
        for index in indices:
            self.done.append(index)
            yield index
            if index == 3:
                self.may_go_on.wait(PATIENT)

    def _read(self, addresses: Sequence[bytes]) -> Generator[tuple[int, bytes], None, None]:
        for index in self._slowly(range(len(addresses))):
            yield index, VALUES[index]

    def _find(self, addresses: Sequence[bytes]) -> Generator[int, None, None]:
        yield from self._slowly(range(len(addresses)))

    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        yield from self._slowly(range(len(items)))

    def _remove(self, addresses: Sequence[bytes]) -> None:
        self.may_go_on.wait(PATIENT)

    def finish(self) -> None:
        """Let it go on, and wait until the call that was left to itself has ended."""
        self.may_go_on.set()
        for thread in threading.enumerate():
            if thread.name == "pilotfish-kv-call":
                thread.join(PATIENT)


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore(0.5)
    yield store
    store.finish()


def test_what_was_read_in_time_is_used_and_nothing_is_read_for_nobody(slow: SlowStore) -> None:
    assert slow.get_many(ADDRESSES) == [*VALUES[:4], *[None] * 8]
    assert slow.counters == StoreCounters(hits=4, misses=8, bytes_read=4 * SIZE, errors=1)
    slow.finish()
    assert slow.done == [0, 1, 2, 3, 4]


def test_what_was_found_in_time_is_used(slow: SlowStore) -> None:
    assert slow.contains_many(ADDRESSES) == [True] * 4 + [False] * 8
    slow.finish()
    assert slow.done == [0, 1, 2, 3, 4]


def test_what_was_written_in_time_counts(slow: SlowStore) -> None:
    assert slow.put_many(ITEMS) == [True] * 4 + [False] * 8
    assert slow.counters == StoreCounters(stored=4, bytes_written=4 * SIZE, skipped=8, errors=1)
    slow.finish()
    assert slow.done == [0, 1, 2, 3, 4]


def test_a_result_does_not_change_when_a_late_value_comes(slow: SlowStore) -> None:
    result = slow.get_many(ADDRESSES)
    slow.finish()
    assert result == [*VALUES[:4], *[None] * 8]


def test_reading_and_writing_are_judged_apart(slow: SlowStore) -> None:
    slow.delete(ADDRESSES)
    assert slow.counters.errors == 1
    assert slow.put_many(ITEMS[:1]) == [False]
    assert slow.get_many(ADDRESSES[:1]) == VALUES[:1]
    assert slow.counters.refused == 1


def test_several_threads_are_served_at_once() -> None:
    """One that hangs holds up nobody before its time is over."""
    store = SlowStore(PATIENT)
    hanging = threading.Thread(target=store.get_many, args=(ADDRESSES,))
    hanging.start()
    while len(store.done) < 4:
        assert hanging.is_alive()
    assert store.get_many(ADDRESSES[:2]) == VALUES[:2]
    store.finish()
    hanging.join()
    assert store.counters == StoreCounters(hits=14, bytes_read=14 * SIZE)
