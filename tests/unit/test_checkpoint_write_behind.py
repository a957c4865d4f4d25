"""Blocks are written behind: nobody waits, nothing is written twice, the budget holds."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

import pytest

from pilotfish_checkpoint import write_behind
from pilotfish_checkpoint.block import Block
from pilotfish_checkpoint.memory_store import MemoryStore
from pilotfish_checkpoint.prefix import load_prefix
from pilotfish_checkpoint.write_behind import WriteBehind, WriteCounters
from tests.checkpoint_kit import LAYOUT, Clock, addresses_of, ids_of, items_of, make_blocks

PATIENT = 60.0  # a limit that no test reaches
SIZE = LAYOUT.payload_bytes


class GatedStore(MemoryStore):
    """A store in memory whose writes wait until the gate is open, and which tells what it did."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.written: list[bytes] = []
        self.collected = threading.Event()
        self.breaks = 0  # so many of the next writes raise

    def put_many(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("a store that breaks its word")
        return super().put_many(items)

    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        self.entered.set()
        self.gate.wait(PATIENT)
        self.written += [address for address, _ in items]
        yield from super()._write(items)

    def _collect(self) -> None:
        self.collected.set()


@pytest.fixture
def store() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(store: GatedStore, clock: Clock) -> Iterator[WriteBehind]:
    """A writer with room for four blocks."""
    writer = WriteBehind(store, 4 * SIZE, clock=clock)
    yield writer
    store.gate.set()
    writer.close(PATIENT)


def occupy(writer: WriteBehind, store: GatedStore, block: Block) -> None:
    """Have the writer's thread hang in the store with this block."""
    assert writer.offer(block)
    assert store.entered.wait(PATIENT)


def test_blocks_are_stored_and_can_be_loaded(writer: WriteBehind, store: GatedStore) -> None:
    store.gate.set()
    blocks = make_blocks(4)
    assert [writer.offer(block) for block in blocks] == [True] * 4
    assert writer.flush(PATIENT)
    assert load_prefix(store, ids_of(blocks)).blocks == blocks
    assert writer.counters == WriteCounters(offered=4, stored=4)
    assert writer.num_bytes == 0


def test_nobody_waits_for_a_store_that_hangs(writer: WriteBehind, store: GatedStore) -> None:
    first, *others = make_blocks(4)
    occupy(writer, store, first)
    assert [writer.offer(block) for block in others] == [True] * 3
    assert not writer.flush(0.01)
    store.gate.set()
    assert writer.flush(PATIENT)
    assert store.written == addresses_of([first, *others])


def test_what_does_not_fit_into_the_budget_is_dropped_the_newest_first(
    writer: WriteBehind, store: GatedStore
) -> None:
    blocks = make_blocks(7)
    occupy(writer, store, blocks[0])
    assert [writer.offer(block) for block in blocks[1:]] == [True] * 3 + [False] * 3
    assert writer.num_bytes == 4 * SIZE
    assert not writer.wants(blocks[6].id.address)
    store.gate.set()
    assert writer.flush(PATIENT)
    assert load_prefix(store, ids_of(blocks)).blocks == blocks[:4]
    assert writer.counters == WriteCounters(offered=7, dropped=3, stored=4)
    assert writer.offer(blocks[4])  # there is room again


def test_a_block_larger_than_the_budget_is_dropped(store: GatedStore) -> None:
    writer = WriteBehind(store, SIZE - 1)
    assert not writer.offer(make_blocks(1)[0])
    assert writer.counters == WriteCounters(offered=1, dropped=1)
    assert writer.close(PATIENT)


def test_a_block_that_waits_is_not_taken_again(writer: WriteBehind, store: GatedStore) -> None:
    first, second = make_blocks(2)
    occupy(writer, store, first)
    assert writer.offer(second)
    for block in (first, second):
        assert not writer.wants(block.id.address)
        assert not writer.offer(block)
    store.gate.set()
    assert writer.flush(PATIENT)
    assert store.written == addresses_of([first, second])
    assert writer.counters == WriteCounters(offered=4, known=2, stored=2)


def test_a_block_that_was_stored_lately_is_not_taken_again(
    writer: WriteBehind, store: GatedStore, clock: Clock
) -> None:
    store.gate.set()
    (block,) = make_blocks(1)
    assert writer.offer(block)
    assert writer.flush(PATIENT)
    clock.now += 59
    assert not writer.wants(block.id.address)
    assert not writer.offer(block)
    clock.now += 1
    assert writer.wants(block.id.address)
    assert writer.offer(block)


def test_what_the_store_has_already_is_not_written_again(
    writer: WriteBehind, store: GatedStore
) -> None:
    store.gate.set()
    first, second = make_blocks(2)
    store.put_many(items_of([first]))
    assert writer.offer(first)
    assert writer.offer(second)
    assert writer.flush(PATIENT)
    assert store.written == addresses_of([first, second])  # the first by the test itself
    assert writer.counters == WriteCounters(offered=2, stored=2)


def test_what_was_no_good_in_the_store_can_be_written_again(
    writer: WriteBehind, store: GatedStore
) -> None:
    store.gate.set()
    (block,) = make_blocks(1)
    assert writer.offer(block)
    assert writer.flush(PATIENT)
    store.delete([block.id.address])
    assert not writer.offer(block)
    writer.forget([block.id.address])
    assert writer.offer(block)
    assert writer.flush(PATIENT)
    assert load_prefix(store, [block.id]).blocks == [block]


def test_what_the_store_does_not_take_is_counted_and_may_be_offered_again(clock: Clock) -> None:
    store = MemoryStore(SIZE)  # too small for a block with its header
    writer = WriteBehind(store, clock=clock)
    (block,) = make_blocks(1)
    for offered in (1, 2):
        assert writer.offer(block)
        assert writer.flush(PATIENT)
        assert writer.counters == WriteCounters(offered=offered, failed=offered)
    assert writer.close(PATIENT)


def test_a_store_that_raises_does_not_end_the_writer(
    writer: WriteBehind, store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.gate.set()
    store.breaks = 1
    first, second = make_blocks(2)
    assert writer.offer(first)
    assert writer.flush(PATIENT)
    assert writer.offer(second)
    assert writer.flush(PATIENT)
    assert store.written == addresses_of([second])
    assert writer.counters == WriteCounters(offered=2, failed=1, stored=1)
    assert "writing KV blocks failed" in caplog.text


def test_closing_writes_what_waits_and_takes_nothing_more(
    writer: WriteBehind, store: GatedStore
) -> None:
    blocks = make_blocks(4)
    for block in blocks[:3]:
        writer.offer(block)
    store.gate.set()
    assert writer.close(PATIENT)
    assert store.written == addresses_of(blocks[:3])
    assert not writer.wants(blocks[3].id.address)
    assert not writer.offer(blocks[3])
    assert writer.counters == WriteCounters(offered=4, dropped=1, stored=3)
    assert writer.close(0)


def test_closing_does_not_wait_for_a_store_that_hangs(
    writer: WriteBehind, store: GatedStore
) -> None:
    blocks = make_blocks(3)
    occupy(writer, store, blocks[0])
    for block in blocks[1:]:
        writer.offer(block)
    assert not writer.close(0.01)
    assert writer.counters == WriteCounters(offered=3, dropped=2)
    store.gate.set()
    assert writer.flush(PATIENT)
    assert store.written == addresses_of(blocks[:1])


def test_a_writer_without_work_has_the_store_clean_up(
    store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "COLLECT_SECONDS", 0.01)
    writer = WriteBehind(store)
    assert store.collected.wait(PATIENT)
    assert writer.close(PATIENT)


def test_what_is_remembered_is_bounded(
    writer: WriteBehind, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "MAX_KNOWN", 2)
    store.gate.set()
    blocks = make_blocks(4)
    for block in blocks:
        assert writer.offer(block)
        assert writer.flush(PATIENT)
    assert [writer.wants(address) for address in addresses_of(blocks)] == [True, True, False, False]


def test_many_threads_offer_the_same_blocks_and_each_is_written_once(
    store: GatedStore, clock: Clock
) -> None:
    store.gate.set()
    writer = WriteBehind(store, clock=clock)
    blocks = make_blocks(64)
    taken: list[list[bool]] = []

    def offer_all(turn: int) -> None:
        order = blocks[turn * 8 :] + blocks[: turn * 8]
        taken.append([writer.offer(block) for block in order])

    threads = [threading.Thread(target=offer_all, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(PATIENT)
    assert sum(map(sum, taken)) == 64
    assert sorted(store.written) == sorted(addresses_of(blocks))
    assert writer.counters == WriteCounters(offered=512, known=448, stored=64)
