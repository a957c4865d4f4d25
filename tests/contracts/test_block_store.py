"""What every store of KV blocks promises, wherever it keeps them."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish_checkpoint.block import Block, Reason, encode
from pilotfish_checkpoint.disk_store import DiskStore
from pilotfish_checkpoint.memory_store import MemoryStore
from pilotfish_checkpoint.prefix import Prefix, load_prefix, stored_prefix
from pilotfish_checkpoint.store import BlockStore, StoreBase, StoreCounters
from pilotfish_checkpoint.write_behind import WriteBehind
from tests.checkpoint_kit import (
    LAYOUT,
    addresses_of,
    ids_of,
    items_of,
    layout_of_bytes,
    make_blocks,
)
from tests.store_kit import PATIENT, DiskRig, MemoryRig, RedisRig, Rig

pytestmark = pytest.mark.integration

BLOCKS = make_blocks(12)
ITEMS = items_of(BLOCKS)
ADDRESSES = addresses_of(BLOCKS)
VALUES = [value for _, value in ITEMS]
SIZE = len(VALUES[0])
ELSEWHERE = addresses_of(make_blocks(3, first=10_000))  # never stored


@pytest.fixture(params=["memory", "disk", "redis"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig: Rig
    if request.param == "memory":
        rig = MemoryRig()
    elif request.param == "disk":
        rig = DiskRig(tmp_path / "kv")
    else:
        request.getfixturevalue("redis_client")
        rig = RedisRig(request.getfixturevalue("valkey"))
    yield rig
    rig.close()


@pytest.fixture(params=["disk", "redis"])
def shared_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskRig | RedisRig]:
    """One that can be lost and found again, and that other processes can open."""
    rig: DiskRig | RedisRig
    if request.param == "disk":
        rig = DiskRig(tmp_path / "kv")
    else:
        rig = RedisRig(request.getfixturevalue("start_valkey")())
    yield rig
    rig.close()


@pytest.fixture
def store(rig: Rig) -> StoreBase:
    return rig.open()


def in_threads(number: int, work: Callable[[int], None]) -> None:
    """Run it in so many threads at once; the first error of any is raised."""
    errors: list[BaseException] = []
    together = threading.Barrier(number, timeout=PATIENT)

    def run(turn: int) -> None:
        try:
            together.wait()
            work(turn)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- values --------------------------------------------------------------------------------------


def test_it_is_a_block_store(store: StoreBase) -> None:
    declared: BlockStore = store  # mypy checks it
    assert declared.counters == StoreCounters()


def test_values_come_back_in_the_order_in_which_they_are_asked_for(store: StoreBase) -> None:
    assert store.put_many(ITEMS) == [True] * 12
    wanted = [5, 0, 11, 0]
    assert store.get_many([ADDRESSES[index] for index in wanted]) == [VALUES[i] for i in wanted]
    assert store.contains_many([ADDRESSES[index] for index in wanted]) == [True] * 4


def test_what_was_never_stored_is_missing(store: StoreBase) -> None:
    assert store.get_many(ELSEWHERE) == [None] * 3
    assert store.contains_many(ELSEWHERE) == [False] * 3
    store.put_many(ITEMS[:2])
    mixed = [ADDRESSES[0], ELSEWHERE[0], ADDRESSES[1], ELSEWHERE[1]]
    assert store.get_many(mixed) == [VALUES[0], None, VALUES[1], None]
    assert store.contains_many(mixed) == [True, False, True, False]


def test_nothing_asked_is_nothing_done(store: StoreBase) -> None:
    assert store.get_many([]) == []
    assert store.put_many([]) == []
    assert store.contains_many([]) == []
    store.delete([])
    assert store.counters == StoreCounters()


def test_the_same_value_again_changes_nothing(store: StoreBase, rig: Rig) -> None:
    for _ in range(3):
        assert store.put_many(ITEMS[:2]) == [True, True]
    assert store.get_many(ADDRESSES[:2]) == VALUES[:2]
    assert rig.num_values() == 2


def test_another_value_takes_the_place_of_the_first(store: StoreBase, rig: Rig) -> None:
    assert store.put_many([(ADDRESSES[0], VALUES[0]), (ADDRESSES[0], VALUES[1])]) == [True, True]
    assert store.get_many(ADDRESSES[:1]) == [VALUES[1]]
    assert rig.num_values() == 1


def test_any_bytes_may_be_a_value_and_any_a_part_of_an_address(store: StoreBase) -> None:
    every_byte = bytes(range(256))
    items = [(bytes([n, 0x0A, *every_byte[:30]]), every_byte) for n in range(0, 256, 5)]
    assert store.put_many(items) == [True] * 52
    assert store.get_many([address for address, _ in items]) == [every_byte] * 52


def test_an_empty_value_is_not_stored(store: StoreBase, rig: Rig) -> None:
    assert store.put_many([(ADDRESSES[0], b""), ITEMS[1]]) == [False, True]
    assert store.get_many(ADDRESSES[:2]) == [None, VALUES[1]]
    assert store.contains_many(ADDRESSES[:2]) == [False, True]
    assert rig.num_values() == 1


@pytest.mark.parametrize("sizes", [[20 << 20], [3 << 20] * 6, [1, 9 << 20, 1]])
def test_values_of_megabytes_come_back_whole(store: StoreBase, sizes: list[int]) -> None:
    values = [random.Random(size).randbytes(size) for size in sizes]
    addresses = [bytes([number]) * 32 for number in range(len(sizes))]
    assert store.put_many(list(zip(addresses, values, strict=True))) == [True] * len(sizes)
    assert store.get_many(addresses) == values


def test_many_values_come_back(store: StoreBase) -> None:
    number = 200 if isinstance(store, DiskStore) else 3000  # a file is synced, which takes time
    items = [(n.to_bytes(32), b"%d" % n) for n in range(number)]
    assert store.put_many(items) == [True] * number
    addresses = [address for address, _ in items]
    assert store.contains_many(addresses) == [True] * number
    assert store.get_many(addresses) == [value for _, value in items]
    store.delete(addresses)
    assert store.get_many(addresses) == [None] * number


def test_what_is_deleted_is_gone_and_deleting_nothing_is_fine(store: StoreBase, rig: Rig) -> None:
    store.put_many(ITEMS[:3])
    store.delete([ADDRESSES[1], ELSEWHERE[0]])
    store.delete([ADDRESSES[1]])
    assert store.get_many(ADDRESSES[:3]) == [VALUES[0], None, VALUES[2]]
    assert rig.num_values() == 2
    assert store.counters.errors == 0


@pytest.mark.parametrize("address", [b"", bytes(31), bytes(33)])
def test_what_is_no_address_is_a_mistake_of_the_caller(store: StoreBase, address: bytes) -> None:
    for call in (store.get_many, store.contains_many, store.delete):
        with pytest.raises(ValueError, match="an address has 32 bytes"):
            call([ADDRESSES[0], address])
    with pytest.raises(ValueError, match="an address has 32 bytes"):
        store.put_many([(address, b"value")])


# --- time and room -------------------------------------------------------------------------------


def test_a_value_goes_when_it_was_not_used_for_its_time(rig: Rig) -> None:
    store = rig.open(ttl_seconds=100)
    store.put_many(ITEMS[:2])
    rig.pass_time(99)
    assert store.contains_many(ADDRESSES[:2]) == [True, True]
    rig.pass_time(2)
    assert store.contains_many(ADDRESSES[:2]) == [False, False]
    assert store.get_many(ADDRESSES[:2]) == [None, None]
    store.collect()
    assert rig.num_values() == 0


def test_reading_a_value_gives_it_its_whole_time_again(rig: Rig) -> None:
    store = rig.open(ttl_seconds=100)
    store.put_many(ITEMS[:2])
    for _ in range(3):
        rig.pass_time(90)
        assert store.get_many(ADDRESSES[:1]) == VALUES[:1]
    assert store.get_many(ADDRESSES[:2]) == [VALUES[0], None]


def test_asking_whether_it_is_there_is_no_use(rig: Rig) -> None:
    store = rig.open(ttl_seconds=100)
    store.put_many(ITEMS[:1])
    rig.pass_time(60)
    assert store.contains_many(ADDRESSES[:1]) == [True]
    rig.pass_time(60)
    assert store.contains_many(ADDRESSES[:1]) == [False]


def test_storing_it_again_is_a_use(rig: Rig) -> None:
    store = rig.open(ttl_seconds=100)
    store.put_many(ITEMS[:1])
    rig.pass_time(60)
    store.put_many(ITEMS[:1])
    rig.pass_time(60)
    assert store.get_many(ADDRESSES[:1]) == VALUES[:1]


@pytest.fixture(params=["memory", "disk"])
def bounded_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    """One that keeps to a bound by itself; a Redis does so by its own policy."""
    return MemoryRig() if request.param == "memory" else DiskRig(tmp_path / "kv")


def held(store: StoreBase) -> int:
    assert isinstance(store, MemoryStore | DiskStore)
    return store.num_bytes


def test_a_store_never_holds_more_than_its_bound(bounded_rig: Rig) -> None:
    store = bounded_rig.open(max_bytes=5 * SIZE + 1)
    for item in ITEMS:
        assert store.put_many([item]) == [True]
        bounded_rig.pass_time(1)
        assert held(store) <= 5 * SIZE + 1
    left = sum(store.contains_many(ADDRESSES))
    assert 0 < left <= 5
    assert held(store) == left * SIZE
    assert store.counters.evictions == 12 - left
    assert store.put_many(ITEMS) == [True] * 12
    assert held(store) <= 5 * SIZE + 1


def test_what_was_used_longest_ago_goes_first(bounded_rig: Rig) -> None:
    store = bounded_rig.open(max_bytes=8 * SIZE)
    for item in ITEMS[:8]:
        store.put_many([item])
        bounded_rig.pass_time(1)
    for index in (3, 0, 6):
        assert store.get_many([ADDRESSES[index]]) == [VALUES[index]]
        bounded_rig.pass_time(1)
    by_use = [1, 2, 4, 5, 7, 3, 0, 6, 8]
    store.put_many([ITEMS[8]])
    is_there = [store.contains_many([ADDRESSES[index]])[0] for index in by_use]
    assert is_there == sorted(is_there)  # gone are the first ones only
    assert 1 <= is_there.count(False) <= 3
    assert store.counters.evictions == is_there.count(False)


def test_a_value_larger_than_the_bound_leaves_the_others_alone(bounded_rig: Rig) -> None:
    store = bounded_rig.open(max_bytes=4 * SIZE)
    store.put_many(ITEMS[:2])
    assert store.put_many([(ELSEWHERE[0], bytes(4 * SIZE + 1))]) == [False]
    assert store.get_many(ADDRESSES[:2]) == VALUES[:2]
    assert store.counters.skipped == 1
    assert store.counters.evictions == 0


def test_a_value_whose_time_is_over_makes_room_first(bounded_rig: Rig) -> None:
    store = bounded_rig.open(max_bytes=8 * SIZE, ttl_seconds=100)
    store.put_many(ITEMS[:4])
    bounded_rig.pass_time(101)
    store.put_many(ITEMS[4:8])
    store.put_many(ITEMS[8:12])
    assert store.contains_many(ADDRESSES) == [False] * 4 + [True] * 8
    assert store.counters.evictions == 4


# --- damage --------------------------------------------------------------------------------------


def flip(position: int) -> Callable[[bytes], bytes]:
    def edit(value: bytes) -> bytes:
        changed = bytearray(value)
        changed[position] ^= 0x40
        return bytes(changed)

    return edit


def with_version(value: bytes) -> bytes:
    return value[:4] + struct.pack("<I", 2) + value[8:]


OTHER_MODEL = encode(make_blocks(3, model="b" * 64)[2])
OTHER_DTYPE = encode(make_blocks(3, layout=layout_of_bytes(LAYOUT.payload_bytes))[2])


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (flip(0), Reason.FOREIGN),
        (flip(60), Reason.DAMAGED),
        (flip(-1), Reason.DAMAGED),
        (lambda value: value[:-1], Reason.TRUNCATED),
        (lambda value: value[: len(value) // 2], Reason.TRUNCATED),
        (lambda value: value[:1], Reason.TRUNCATED),
        (lambda value: value + b"\0", Reason.TRUNCATED),
        (with_version, Reason.VERSION),
        (lambda _: b"something else, and longer than the head of a block is", Reason.FOREIGN),
        (lambda _: VALUES[3], Reason.PREFIX),
        (lambda _: OTHER_MODEL, Reason.MODEL),
        (lambda _: OTHER_DTYPE, Reason.DTYPE),
    ],
)
def test_a_value_that_cannot_be_used_is_a_miss_and_makes_room_for_a_good_one(
    store: StoreBase, rig: Rig, edit: Callable[[bytes], bytes], reason: Reason
) -> None:
    store.put_many(ITEMS[:6])
    rig.change(ADDRESSES[2], edit)
    assert load_prefix(store, ids_of(BLOCKS[:6])) == Prefix(BLOCKS[:2], reason)
    assert store.contains_many(ADDRESSES[:6]) == [True, True, False, True, True, True]
    assert load_prefix(store, ids_of(BLOCKS[:6])) == Prefix(BLOCKS[:2], Reason.ABSENT)
    assert store.put_many([ITEMS[2]]) == [True]
    assert load_prefix(store, ids_of(BLOCKS[:6])) == Prefix(BLOCKS[:6], None)


def test_a_value_cut_to_nothing_is_as_good_as_none(shared_rig: DiskRig | RedisRig) -> None:
    store = shared_rig.open()
    store.put_many(ITEMS[:2])
    shared_rig.change(ADDRESSES[0], lambda _: b"")
    assert store.contains_many(ADDRESSES[:2]) == [False, True]
    assert store.get_many(ADDRESSES[:2]) == [None, VALUES[1]]


# --- prefixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1, 5, 11, None])
def test_the_longest_stored_beginning_is_loaded(store: StoreBase, missing: int | None) -> None:
    store.put_many([item for index, item in enumerate(ITEMS) if index != missing])
    length = 12 if missing is None else missing
    assert stored_prefix(store, ids_of(BLOCKS)) == length
    reason = None if missing is None else Reason.ABSENT
    assert load_prefix(store, ids_of(BLOCKS)) == Prefix(BLOCKS[:length], reason)


def test_an_empty_store_and_an_empty_prefix_give_nothing(store: StoreBase) -> None:
    assert stored_prefix(store, ids_of(BLOCKS)) == 0
    assert load_prefix(store, ids_of(BLOCKS)) == Prefix([], Reason.ABSENT)
    assert stored_prefix(store, []) == 0
    assert load_prefix(store, []) == Prefix([], None)


def test_a_prefix_is_loaded_in_parts_and_little_is_read_beyond_a_gap(store: StoreBase) -> None:
    layout = layout_of_bytes(3 << 20)  # two fit into one call
    blocks = make_blocks(7, layout=layout)
    store.put_many([item for index, item in enumerate(items_of(blocks)) if index != 2])
    assert load_prefix(store, ids_of(blocks)) == Prefix(blocks[:2], Reason.ABSENT)
    assert store.counters.hits == 3  # the two, and the one beside the gap
    store.put_many(items_of(blocks))
    assert load_prefix(store, ids_of(blocks)) == Prefix(blocks, None)


def test_what_a_writer_writes_behind_can_be_loaded(store: StoreBase) -> None:
    writer = WriteBehind(store)
    assert [writer.offer(block) for block in BLOCKS] == [True] * 12
    assert writer.close(PATIENT)
    assert load_prefix(store, ids_of(BLOCKS)) == Prefix(BLOCKS, None)


# --- counters ------------------------------------------------------------------------------------


def test_the_counters_say_what_was_done(store: StoreBase) -> None:
    store.put_many([*ITEMS[:3], (ELSEWHERE[0], b"")])
    store.get_many([ADDRESSES[0], ELSEWHERE[1], ADDRESSES[2]])
    store.contains_many(ADDRESSES)
    store.delete(ADDRESSES[:1])
    store.get_many(ADDRESSES[:2])
    assert store.counters == StoreCounters(
        hits=3,
        misses=2,
        bytes_read=3 * SIZE,
        stored=3,
        bytes_written=3 * SIZE,
        skipped=1,
    )


def test_counters_that_were_read_do_not_change(store: StoreBase) -> None:
    before = store.counters
    store.get_many(ELSEWHERE)
    assert before == StoreCounters()
    assert store.counters.misses == 3


# --- at the same time ----------------------------------------------------------------------------


def test_threads_read_and_write_the_same_values(store: StoreBase) -> None:
    def work(turn: int) -> None:
        draw = random.Random(turn)
        for _ in range(30):
            index = draw.randrange(12)
            if draw.random() < 0.3:
                store.delete([ADDRESSES[index]])
            else:
                assert store.put_many([ITEMS[index]]) == [True]
            for value, right in zip(store.get_many(ADDRESSES), VALUES, strict=True):
                assert value in (None, right)

    in_threads(6, work)
    counters = store.counters
    assert counters.errors == counters.refused == 0
    assert counters.hits + counters.misses == 6 * 30 * 12
    assert counters.hits > 0
    assert counters.bytes_read == counters.hits * SIZE
    store.put_many(ITEMS)
    assert store.get_many(ADDRESSES) == VALUES


def test_threads_that_write_keep_to_the_bound(bounded_rig: Rig) -> None:
    store = bounded_rig.open(max_bytes=40 * SIZE)
    items = items_of(make_blocks(96))
    in_threads(4, lambda turn: [store.put_many([item]) for item in items[turn::4]] and None)
    store.put_many(items[:1])
    # on disk each of the four may have looked before another wrote
    assert held(store) <= 43 * SIZE
    assert store.counters.stored == 97


OTHER_PROCESS = """
import sys
from pathlib import Path
from pilotfish_checkpoint.disk_store import DiskStore
from pilotfish_checkpoint.redis_store import RedisStore
from tests.checkpoint_kit import addresses_of, items_of, make_blocks
from tests.store_kit import PATIENT, ROOMY

where = sys.argv[1]
limits = dict(read_seconds=PATIENT, write_seconds=PATIENT)
if where.startswith("redis://"):
    store = RedisStore(where, **limits)
else:
    store = DiskStore(Path(where), ROOMY, ttl_seconds=1e9, **limits)
items = items_of(make_blocks(40))
print("ready", flush=True)
sys.stdin.readline()
for turn in range(8):
    for address, value in items:
        assert store.put_many([(address, value)]) == [True]
        assert store.get_many([address])[0] == value
print(store.counters.errors, flush=True)
sys.stdin.readline()
"""


def start_process(rig: DiskRig | RedisRig) -> subprocess.Popen[str]:
    where = rig.server.url if isinstance(rig, RedisRig) else str(rig.folder)
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_write_the_same_values(shared_rig: DiskRig | RedisRig) -> None:
    store = shared_rig.open(ttl_seconds=1e9)
    blocks = make_blocks(40)
    items, addresses = items_of(blocks), addresses_of(blocks)
    with start_process(shared_rig) as process:
        go_on(process)
        for _ in range(8):
            for address, value in reversed(items):
                assert store.put_many([(address, value)]) == [True]
                assert store.get_many([address]) == [value]
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        assert store.get_many(addresses) == [value for _, value in items]
        go_on(process)
    assert shared_rig.num_values() == 40
    assert store.counters.errors == 0
    if isinstance(shared_rig, DiskRig):
        assert len(shared_rig.files()) == 40  # no temporary file is left


def test_a_writer_that_is_killed_leaves_whole_values_only(shared_rig: DiskRig | RedisRig) -> None:
    store = shared_rig.open(ttl_seconds=1e9)
    blocks = make_blocks(40)
    with start_process(shared_rig) as process:
        go_on(process)
        while not any(store.contains_many(addresses_of(blocks))):
            assert process.poll() is None
        process.kill()
        process.wait()
    values = store.get_many(addresses_of(blocks))
    right = [encode(block) for block in blocks]
    assert any(values)
    assert all(value in (None, whole) for value, whole in zip(values, right, strict=True))
    store.put_many(items_of(blocks))
    assert load_prefix(store, ids_of(blocks)) == Prefix(blocks, None)


# --- going away ----------------------------------------------------------------------------------


def test_a_store_that_goes_away_is_a_miss_and_comes_back(shared_rig: DiskRig | RedisRig) -> None:
    store = shared_rig.open()
    store.put_many(ITEMS)
    seen: list[list[bytes | None]] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(store.get_many(ADDRESSES))
            shared_rig.end_pause()  # so that it is really asked each time

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while store.counters.hits < 5 * 12:
            assert reader.is_alive()
        shared_rig.lose()
        while store.counters.errors < 5:
            assert reader.is_alive()
    finally:
        over.set()
        reader.join()
    assert all(
        value in (None, right)
        for values in seen
        for value, right in zip(values, VALUES, strict=True)
    )
    assert seen[-1] == [None] * 12
    check_that_it_is_away(store)
    shared_rig.bring_back()
    shared_rig.end_pause()
    assert store.put_many(ITEMS) == [True] * 12
    assert store.get_many(ADDRESSES) == VALUES


def check_that_it_is_away(store: StoreBase) -> None:
    """Every verb answers, and says nothing is there."""
    before = store.counters
    assert store.put_many(ITEMS[:2]) == [False, False]
    assert store.contains_many(ADDRESSES) == [False] * 12
    assert load_prefix(store, ids_of(BLOCKS)) == Prefix([], Reason.ABSENT)
    store.delete(ADDRESSES)
    store.collect()
    after = store.counters
    assert after.skipped == before.skipped + 2
    assert after.errors + after.refused > before.errors + before.refused


def test_a_store_that_was_away_from_the_beginning_is_used_when_it_comes(
    shared_rig: DiskRig | RedisRig,
) -> None:
    store = shared_rig.open()
    shared_rig.lose()
    check_that_it_is_away(store)
    shared_rig.bring_back()
    shared_rig.end_pause()
    assert store.put_many(ITEMS) == [True] * 12
    assert store.get_many(ADDRESSES) == VALUES


def test_after_a_failure_a_store_is_not_asked_for_a_while(shared_rig: DiskRig | RedisRig) -> None:
    store = shared_rig.open()
    shared_rig.lose()
    for _ in range(10):
        assert store.get_many(ADDRESSES) == [None] * 12
    assert store.counters.errors == 1
    assert store.counters.refused == 9
    assert store.counters.misses == 120


def test_a_writer_outlives_its_store(shared_rig: DiskRig | RedisRig) -> None:
    store = shared_rig.open()
    writer = WriteBehind(store)
    shared_rig.lose()
    assert [writer.offer(block) for block in BLOCKS] == [True] * 12
    assert writer.flush(PATIENT)
    assert writer.counters.failed == 12
    shared_rig.bring_back()
    shared_rig.end_pause()
    assert [writer.offer(block) for block in BLOCKS] == [True] * 12
    assert writer.close(PATIENT)
    assert load_prefix(store, ids_of(BLOCKS)) == Prefix(BLOCKS, None)


def test_a_closed_store_finds_nothing_and_takes_nothing(store: StoreBase) -> None:
    store.put_many(ITEMS)
    store.close()
    store.close()
    check_that_it_is_away(store)
    assert store.counters.errors == 0


def test_what_is_logged_names_the_store_once_and_quotes_nobody(
    shared_rig: DiskRig | RedisRig, caplog: Any
) -> None:
    store = shared_rig.open()
    shared_rig.lose()
    for _ in range(3):
        store.get_many(ADDRESSES)
        shared_rig.end_pause()
    assert store.counters.errors == 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert f"KV store {store.name} failed" in lines[0]
    assert "127.0.0.1" not in lines[0]


def test_the_blocks_of_these_tests_differ() -> None:
    """Else a store that mixes them up would pass."""
    assert len(set(VALUES)) == len(set(ADDRESSES)) == 12
    assert all(isinstance(block, Block) for block in BLOCKS)
