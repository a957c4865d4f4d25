"""Redis clients that are safe for what they are used for, and a check of the server.

redis-py 8 by default gives up on a blocking read after five seconds and repeats commands that
may already have run. So there are two kinds of client: one for commands, which may retry because
every script of ours is safe to repeat, and one for blocking reads, which never retries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from pilotfish_broker.errors import BrokerMisconfigured, BrokerUnavailable

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0
OLDEST_SERVER = (7, 0)
# redis-py takes the leading word off the message where it has a type for it
PASSING_TYPES = (
    "OutOfMemoryError",
    "ReadOnlyError",
    "BusyLoadingError",
    "TryAgainError",
    "NoScriptError",  # the script was sent again, and the server restarted before it ran
)
PASSING_WORDS = ("BUSY", "MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "LOADING", "OOM")

# redis-py annotates every reply as bytes or str, whichever decode_responses gives; ours are bytes
Redis: TypeAlias = Any


def connect(
    url: str,
    *,
    retries: int = 3,
    answer_seconds: float = ANSWER_SECONDS,
    is_patient: bool = True,
) -> Redis:
    """Client for commands and scripts that are safe to repeat.

    Args:
        retries: how often a command is repeated after an error of the connection.
        answer_seconds: how long to wait for an answer.
        is_patient: repeat after an answer that did not come, too; a person waits for the first
            one only.
    """
    lost: tuple[type[Exception], ...] = (redis.ConnectionError,)
    backoff = ExponentialWithJitterBackoff(base=0.05, cap=1.0)
    errors = (*lost, redis.TimeoutError) if is_patient else lost
    return redis.Redis.from_url(
        url,
        socket_timeout=answer_seconds,
        socket_connect_timeout=CONNECT_SECONDS,
        health_check_interval=10,
        retry=Retry(backoff, retries, supported_errors=errors),
    )


def connect_blocking(url: str, block_seconds: float) -> Redis:
    """Client for reads that block up to `block_seconds`; one call at a time, never repeated."""
    return redis.Redis.from_url(
        url,
        socket_timeout=block_seconds + 5,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def is_passing(error: redis.RedisError) -> bool:
    """Whether Redis gets over it by itself or by somebody's help: no connection, no memory or
    disk, somebody's slow script, a fail-over. The same call may be made again then."""
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return True
    return type(error).__name__ in PASSING_TYPES or str(error).startswith(PASSING_WORDS)


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn redis-py's connection errors into :class:`BrokerUnavailable`, naming the server."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise BrokerUnavailable(f"no answer from Redis at {display(url)}: {error}") from error


def display(url: str) -> str:
    """The URL without user, password and options, for messages and logs."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def check_server(client: Redis, url: str) -> None:
    """Refuse a server that cannot serve or that may lose jobs.

    Raises:
        BrokerUnavailable: it does not answer.
        BrokerMisconfigured: it is too old, or evicts keys when memory is short.
    """
    with translated(url):
        try:
            server = client.info("server")
            memory = client.info("memory")
        except (redis.AuthenticationError, redis.ResponseError) as error:
            raise BrokerUnavailable(f"Redis at {display(url)} refused us: {error}") from error
    # Valkey reports the Redis version that it is compatible with under the same name
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise BrokerMisconfigured(
            f"Redis at {display(url)} is version {version}; 7.0 or newer is needed"
        )
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise BrokerMisconfigured(
            f"Redis at {display(url)} has maxmemory-policy {policy}, which may throw jobs away; "
            "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )
