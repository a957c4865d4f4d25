"""KV blocks in a real Valkey: its room, its moods, and what travels."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pilotfish_broker.errors import ConfigError
from pilotfish_checkpoint import redis_store
from pilotfish_checkpoint.redis_store import RedisStore
from tests.checkpoint_kit import Clock, addresses_of, items_of, make_blocks
from tests.store_kit import PATIENT, RedisRig

pytestmark = pytest.mark.integration

ITEMS = items_of(make_blocks(12))
ADDRESSES = addresses_of(make_blocks(12))
VALUES = [value for _, value in ITEMS]
MEBIBYTE = 1 << 20
LARGE = [(bytes([number]) * 32, bytes(MEBIBYTE)) for number in range(64)]
# Half of 41 MiB: a value takes 1.25 MiB of the server and the server itself one or two, so that the
# last one that fits leaves more room than connections that come and go take.
HALF = 41 * MEBIBYTE // 2
SHORT = 0.3  # seconds; enough for an answer that comes at all


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(clock: Clock) -> Iterator[Callable[..., RedisStore]]:
    """Opens stores on a server, or on a URL, which do not lose patience."""
    stores: list[RedisStore] = []

    def open_one(server: Any, **options: Any) -> RedisStore:
        limits = {"read_seconds": PATIENT, "write_seconds": PATIENT, "clock": clock, **options}
        stores.append(RedisStore(getattr(server, "url", server), **limits))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def used(server: Any) -> int:
    return int(server.client().info("memory")["used_memory"])


# --- keys ----------------------------------------------------------------------------------------


def test_a_value_is_one_key_with_a_time_to_live(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey()
    open_store(server, namespace="mine", ttl_seconds=90).put_many(ITEMS[:1])
    client = server.client()
    assert client.keys() == [f"mine:kv:{ADDRESSES[0].hex()}".encode()]
    assert client.get(client.keys()[0]) == VALUES[0]
    assert 0 < client.pttl(client.keys()[0]) <= 90_000


def test_namespaces_do_not_see_each_other(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey()
    one, other = (open_store(server, namespace=name) for name in ("one", "other"))
    one.put_many(ITEMS[:1])
    assert other.get_many(ADDRESSES[:1]) == [None]
    other.delete(ADDRESSES[:1])
    assert one.get_many(ADDRESSES[:1]) == VALUES[:1]


def test_a_key_of_another_type_is_a_miss_and_costs_the_others_nothing(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey()
    store = open_store(server)
    store.put_many(ITEMS[:3])
    key = RedisRig.key(ADDRESSES[1])
    server.client().delete(key)
    server.client().rpush(key, "a list")
    assert store.get_many(ADDRESSES[:3]) == [VALUES[0], None, VALUES[2]]
    assert store.contains_many(ADDRESSES[:3]) == [True, False, True]
    assert store.counters.refused == 0
    assert store.put_many(ITEMS[1:2]) == [True]
    assert store.get_many(ADDRESSES[:3]) == VALUES[:3]


def test_a_value_too_large_to_be_ours_is_not_read(
    start_valkey: Callable[..., Any],
    open_store: Callable[..., RedisStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_valkey()
    store = open_store(server)
    monkeypatch.setattr(redis_store, "MAX_VALUE_BYTES", MEBIBYTE)
    server.client().set(RedisRig.key(ADDRESSES[0]), bytes(MEBIBYTE + 1))
    assert store.get_many(ADDRESSES[:1]) == [None]
    assert int(server.client().info("stats")["total_net_output_bytes"]) < MEBIBYTE


# --- room ----------------------------------------------------------------------------------------


def test_a_server_that_must_not_evict_keeps_room_for_others(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey(maxmemory="41mb", maxmemory_policy="noeviction")
    store = open_store(server, memory_share=0.5)
    stored = sum(sum(store.put_many([item])) for item in LARGE)
    assert 5 <= stored < 20
    assert used(server) <= HALF
    assert store.counters.skipped == 64 - stored
    assert store.counters.errors == 0
    for number in range(10):
        server.client().set(f"job:{number}", bytes(MEBIBYTE))  # raises when memory is out
    assert store.get_many([LARGE[0][0]]) == [LARGE[0][1]]


def test_room_that_comes_back_is_used_again(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey(maxmemory="41mb", maxmemory_policy="noeviction")
    store = open_store(server, memory_share=0.5)
    assert [store.put_many([item])[0] for item in LARGE][-1] is False
    server.client().execute_command("FLUSHALL", "SYNC")  # else memory is freed some time later
    assert store.put_many(LARGE[:1]) == [True]


def test_many_values_at_once_keep_to_the_share_too(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey(maxmemory="41mb", maxmemory_policy="noeviction")
    stored = open_store(server, memory_share=0.5).put_many(LARGE)
    assert stored == sorted(stored, reverse=True)  # a beginning of them, so prefixes have no gaps
    assert 5 <= sum(stored) < 20
    assert used(server) <= HALF


def test_a_server_that_evicts_makes_room_itself(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey(maxmemory="20mb", maxmemory_policy="allkeys-lru")
    store = open_store(server)
    assert store.put_many(LARGE) == [True] * 64
    assert int(server.client().info("stats")["evicted_keys"]) > 40
    assert used(server) <= 20 * MEBIBYTE
    assert any(store.contains_many([address for address, _ in LARGE]))


def test_a_server_without_a_limit_is_given_one(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey()
    stored = sum(open_store(server, max_bytes=18 * MEBIBYTE).put_many(LARGE))
    assert 5 <= stored < 16
    assert used(server) <= 18 * MEBIBYTE


def test_a_server_whose_memory_is_out_still_gives_what_it_has(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey(maxmemory="20mb", maxmemory_policy="noeviction")
    store = open_store(server, memory_share=9.0)  # as if others had been faster
    store.put_many(ITEMS)
    server.client().config_set("maxmemory", used(server) // 2)
    assert store.put_many(LARGE[:1]) == [False]
    assert store.get_many(ADDRESSES) == VALUES
    assert store.counters.skipped == 1
    assert store.counters.errors == 0


def test_a_server_that_cannot_write_still_gives_what_it_has(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    """A replica: it refuses every command that would change something."""
    first = start_valkey(repl_diskless_sync_delay="0")
    open_store(first).put_many(ITEMS)
    replica = start_valkey(replicaof=f"127.0.0.1 {first.port}")
    while replica.client().dbsize() < 12:
        pass
    store = open_store(replica)
    assert store.get_many(ADDRESSES) == VALUES
    assert store.put_many(ITEMS) == [False] * 12
    assert store.get_many(ADDRESSES) == VALUES
    assert store.counters.errors == 1


# --- time ----------------------------------------------------------------------------------------


def test_a_server_that_hangs_is_waited_for_once(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore], clock: Clock
) -> None:
    server = start_valkey()
    open_store(server).put_many(ITEMS)
    store = open_store(server, read_seconds=SHORT, write_seconds=SHORT)
    server.send(signal.SIGSTOP)
    try:
        for _ in range(20):
            assert store.get_many(ADDRESSES) == [None] * 12
            assert store.put_many(ITEMS[:1]) == [False]
        assert store.counters.errors == 2
        assert store.counters.refused == 38
    finally:
        server.send(signal.SIGCONT)
    while store.get_many(ADDRESSES) != VALUES or store.put_many(ITEMS[:1]) != [True]:
        clock.now += 30


@pytest.fixture
def dripping() -> Iterator[str]:
    """URL of a server that answers everything, one byte at a time and ever more of them."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while not over.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(peer,), daemon=True).start()

    def drip(peer: socket.socket) -> None:
        with peer:
            try:
                peer.sendall(b"+")
                while not over.wait(SHORT / 5):  # each byte well within the socket's own limit
                    peer.sendall(b"x")
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    over.set()
    listener.close()


def test_a_server_that_drips_is_not_waited_for(
    dripping: str, open_store: Callable[..., RedisStore], clock: Clock
) -> None:
    store = open_store(dripping, read_seconds=SHORT, write_seconds=SHORT)
    assert store.get_many(ADDRESSES) == [None] * 12
    assert store.counters.errors == 1
    for _ in range(5):  # the first call still reads, and no second thread joins it
        clock.now += 30
        assert store.get_many(ADDRESSES) == [None] * 12
    assert store.counters.refused == 5
    assert [thread.name for thread in threading.enumerate()].count("pilotfish-kv-call") == 1


def test_a_connection_that_the_server_closed_is_made_again(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    server = start_valkey()
    store = open_store(server)
    store.put_many(ITEMS)
    for _ in range(5):
        server.client().client_kill_filter(_type="normal", skipme=True)
        assert store.get_many(ADDRESSES) == VALUES
    assert store.counters.errors == 0


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["secret", "http://:secret@host", "redis://:secret@host:port/0", ""]
)
def test_what_is_no_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_wrong_password_is_an_error_that_is_not_quoted(
    start_valkey: Callable[..., Any],
    open_store: Callable[..., RedisStore],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = start_valkey(requirepass="right")
    url = server.url.replace("right", "sesame")
    store = open_store(url)
    assert store.get_many(ADDRESSES) == [None] * 12
    assert "KV store in Redis failed: AuthenticationError" in caplog.text
    assert "sesame" not in caplog.text
    assert open_store(server).put_many(ITEMS[:1]) == [True]


def test_a_large_read_travels_in_parts(
    start_valkey: Callable[..., Any], open_store: Callable[..., RedisStore]
) -> None:
    parts = list(redis_store._chunks(dict.fromkeys(range(10), 3 * MEBIBYTE // 2)))
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert list(redis_store._chunks({4: 100 * MEBIBYTE, 7: 1})) == [[4], [7]]
    assert list(redis_store._chunks({})) == []
    number = redis_store.CHUNK_KEYS
    few = list(redis_store._chunks(dict.fromkeys(range(number + 1), 1)))
    assert [len(part) for part in few] == [number, 1]
