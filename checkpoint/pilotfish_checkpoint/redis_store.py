"""KV blocks in a Redis or Valkey, which workers on several machines share.

| key                 | type   | what                                                            |
|---------------------|--------|-----------------------------------------------------------------|
| <ns>:kv:<address>   | string | one block; TTL from its last use; the address is in hexadecimal |

Best a server of its own with ``maxmemory`` and an evicting policy (``allkeys-lru``) and without
persistence. On one that must not evict, such as the server of the job records, blocks take no
more than a share of its memory, so that jobs always find room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pilotfish_broker.connection import Redis
from pilotfish_broker.errors import ConfigError
from pilotfish_checkpoint.store import MAX_VALUE_BYTES, StoreBase

CHUNK_BYTES = 4 << 20  # on the way at once; a server answers nobody else while it copies them
CHUNK_KEYS = 1024


class RedisStore(StoreBase):
    """Keeps what the server keeps.

    Args:
        url: of the server; no connection is made before the first call.
        namespace: first part of every key.
        ttl_seconds: how long a value stays after its last use.
        max_bytes: nothing is written while a server without ``maxmemory`` uses more than this.
        memory_share: nothing is written while a server with ``maxmemory`` that must not evict
            uses more than this part of it.
        read_seconds: how long a call that reads may take.
        write_seconds: how long one that writes may take.
        clock: seconds from any beginning; for tests.

    Raises:
        ConfigError: the URL is none.
    """

    name = "in Redis"

    def __init__(
        self,
        url: str,
        namespace: str = "pf",
        *,
        ttl_seconds: float = 86_400.0,
        max_bytes: int = 1 << 30,
        memory_share: float = 0.5,
        read_seconds: float = 1.0,
        write_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(read_seconds, write_seconds, clock)
        self._prefix = f"{namespace}:kv:"
        self._ttl_ms = max(1, int(ttl_seconds * 1000))
        self._max_bytes = max_bytes
        self._memory_share = memory_share
        self._client: Redis = _connect(url, read_seconds)

    def _read(self, addresses: Sequence[bytes]) -> Generator[tuple[int, bytes], None, None]:
        keys = [self._key(address) for address in addresses]
        sizes = self._sizes(keys)
        for part in _chunks(sizes):
            pipe = self._client.pipeline(transaction=False)
            for index in part:
                pipe.get(keys[index])
                # not GETEX, which a server refuses that cannot write at the moment
                pipe.pexpire(keys[index], self._ttl_ms)
            values = pipe.execute(raise_on_error=False)[::2]
            for index, value in zip(part, self._sound(values), strict=True):
                if value:
                    yield index, value

    def _find(self, addresses: Sequence[bytes]) -> Generator[int, None, None]:
        yield from self._sizes([self._key(address) for address in addresses])

    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        sizes = {index: len(value) for index, (_, value) in enumerate(items)}
        for part in _chunks(sizes):
            if not self._has_room([sizes[index] for index in part]):
                return
            pipe = self._client.pipeline(transaction=False)
            for index in part:
                address, value = items[index]
                pipe.set(self._key(address), value, px=self._ttl_ms)
            replies = self._sound(pipe.execute(raise_on_error=False))
            for index, reply in zip(part, replies, strict=True):
                if reply:
                    yield index

    def _remove(self, addresses: Sequence[bytes]) -> None:
        for begin in range(0, len(addresses), CHUNK_KEYS):
            part = addresses[begin : begin + CHUNK_KEYS]
            self._client.unlink(*(self._key(address) for address in part))

    def _close(self) -> None:
        self._client.close()

    def _key(self, address: bytes) -> str:
        return self._prefix + address.hex()

    def _sizes(self, keys: Sequence[str]) -> dict[int, int]:
        """Length of each value that is there, by index."""
        sizes: dict[int, int] = {}
        for begin in range(0, len(keys), CHUNK_KEYS):
            pipe = self._client.pipeline(transaction=False)
            for key in keys[begin : begin + CHUNK_KEYS]:
                pipe.strlen(key)
            replies = self._sound(pipe.execute(raise_on_error=False))
            sizes.update({begin + i: size for i, size in enumerate(replies) if size})
        return {index: size for index, size in sizes.items() if size <= MAX_VALUE_BYTES}

    def _sound(self, replies: list[Any]) -> list[Any]:
        """The replies, with None for each error. If all are errors, the first is raised, except
        that memory which is out is none."""
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        others = [error for error in errors if not isinstance(error, redis.OutOfMemoryError)]
        if others and len(errors) == len(replies):
            raise others[0]
        for error in others:
            self._note(error)
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    def _has_room(self, sizes: Sequence[int]) -> bool:
        """Whether the server may take values of these sizes; one more round trip a chunk."""
        memory = self._client.info("memory")
        # it keeps a buffer as large as the largest, and its allocator may round up by a quarter
        needed = (sum(sizes) + max(sizes)) * 5 // 4
        return int(memory["used_memory"]) + needed <= self._limit(memory)

    def _limit(self, memory: dict[str, Any]) -> int:
        """How much memory the server may use before we leave it alone."""
        largest = int(memory.get("maxmemory", 0))
        if largest == 0:
            return self._max_bytes
        if memory.get("maxmemory_policy", "noeviction") == "noeviction":
            return int(largest * self._memory_share)
        return 1 << 62  # it makes room by itself


def _connect(url: str, seconds: float) -> Redis:
    try:
        # Nothing is repeated: redis-py notices before it asks that a connection was closed, and
        # whatever else goes wrong is a miss.
        return redis.Redis.from_url(
            url,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        raise ConfigError("the URL of the KV store is no URL of a Redis") from None


def _chunks(sizes: dict[int, int]) -> Iterator[list[int]]:
    """Indices in order, in parts of at most `CHUNK_BYTES` unless one alone is larger."""
    part: list[int] = []
    total = 0
    for index, size in sizes.items():
        if part and (total + size > CHUNK_BYTES or len(part) == CHUNK_KEYS):
            yield part
            part, total = [], 0
        part.append(index)
        total += size
    if part:
        yield part
