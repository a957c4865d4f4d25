"""Which of Redis's errors pass, so that the same call may be made again."""

from __future__ import annotations

import pytest
import redis

from pilotfish_broker.connection import is_passing


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("gone"),
        redis.TimeoutError("slow"),
        redis.BusyLoadingError("loading"),
        redis.exceptions.OutOfMemoryError("command not allowed"),
        redis.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.NoScriptError("No matching script."),
        redis.ResponseError("BUSY Valkey is busy running a script."),
        redis.ResponseError("MISCONF Valkey is configured to save RDB snapshots"),
        redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
    ],
)
def test_what_redis_gets_over_is_passing(error: redis.RedisError) -> None:
    assert is_passing(error)


@pytest.mark.parametrize(
    "error",
    [
        redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        redis.ResponseError("ERR user_script:3: attempt to compare nil with number"),
        redis.exceptions.NoPermissionError("this user has no permissions"),
    ],
)
def test_what_no_repetition_heals_is_not(error: redis.RedisError) -> None:
    assert not is_passing(error)
