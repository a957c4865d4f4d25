"""Which servers are refused, and what survives a restart or an emptied script cache."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest
import redis

from pilotfish_broker.connection import check_server, connect, display
from pilotfish_broker.errors import BrokerMisconfigured, BrokerUnavailable
from pilotfish_broker.spec import Status
from tests.broker_kit import Bench

pytestmark = pytest.mark.integration


def refusal(url: str) -> Exception:
    """The typed error of check_server for a server at `url`, which must not hold a password."""
    with (
        connect(url, retries=0, answer_seconds=2) as client,
        pytest.raises((BrokerUnavailable, BrokerMisconfigured)) as caught,
    ):
        check_server(client, url)
    assert "hunter2" not in str(caught.value)
    return caught.value


def test_a_plain_server_passes(redis_client: Any, redis_url: str) -> None:
    check_server(redis_client, redis_url)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_throws_keys_away_is_refused_with_the_cure(
    start_valkey: Any, policy: str
) -> None:
    server = start_valkey(maxmemory_policy=policy, requirepass="hunter2")
    error = refusal(server.url)
    assert isinstance(error, BrokerMisconfigured)
    assert policy in str(error)
    assert "noeviction" in str(error)
    assert f"127.0.0.1:{server.port}" in str(error)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        error = refusal(f"redis://user:hunter2@127.0.0.1:{port}/0")
    assert isinstance(error, BrokerUnavailable)
    assert str(port) in str(error)


def test_a_server_that_never_answers_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"redis://127.0.0.1:{port}/0"
        with (
            connect(url, retries=0, answer_seconds=0.2) as client,
            pytest.raises(BrokerUnavailable, match="no answer"),
        ):
            check_server(client, url)


@pytest.mark.parametrize("password", ["", ":hunter2@", ":wrong-hunter2@"])
def test_a_server_that_wants_another_password_is_unavailable(
    start_valkey: Any, password: str
) -> None:
    server = start_valkey(requirepass="right")
    error = refusal(f"redis://{password}127.0.0.1:{server.port}/0")
    assert isinstance(error, BrokerUnavailable)


def test_a_user_who_may_not_ask_is_told_so(start_valkey: Any) -> None:
    server = start_valkey()
    server.client().execute_command(
        "ACL", "SETUSER", "weak", "on", ">hunter2", "~*", "+@all", "-info"
    )
    error = refusal(f"redis://weak:hunter2@127.0.0.1:{server.port}/0")
    assert isinstance(error, BrokerUnavailable)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u:p@h:1/0", "redis://h:1/0"),
        ("redis://:p@q@h:1/0", "redis://h:1/0"),
        ("redis://h:1/0?password=p", "redis://h:1/0"),
        ("unix:///s?db=1", "unix:///s"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    assert display(url) == shown


def test_an_emptied_script_cache_heals_in_the_middle_of_everything(bench: Bench) -> None:
    def flush() -> None:
        bench.client.script_flush()

    bench.submit("a")
    worker = bench.worker("w")
    flush()
    bench.submit("b", "c")
    flush()
    assert worker.own.claim("a") == ("claimed", 1)
    flush()
    assert worker.own.claim("a") == ("yours", 1)
    flush()
    assert worker.commit("a", 1, 0, [1]) == "ok"
    flush()
    assert worker.commit("a", 1, 0, [1]) == "already"
    flush()
    assert worker.leases.renew({"a": 1}) == {"a": "ok"}
    flush()
    assert bench.dispatcher.top_up("m") == 2
    flush()
    assert bench.records.cancel("b") == "cancelled"
    flush()
    assert worker.finish("a", 1, 1, [2]) == "finished"
    flush()
    assert bench.reap() == 0


def test_everything_survives_a_killed_server(start_valkey: Any, bench: Bench) -> None:
    server = start_valkey(appendonly="yes", appendfsync="always")
    before = Bench(server.client(), bench.keys, bench.settings)
    before.submit("a", "b", priority=3)
    worker = before.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1, 2], "né")
    server.stop()
    server.start()
    after = Bench(server.client(), bench.keys, bench.settings)
    assert after.records.get("a").committed == 2
    assert worker.commit("a", 1, 0, [1, 2], "né") == "already"
    assert worker.finish("a", 1, 2, [3]) == "finished"
    assert after.tokens("a") == [1, 2, 3]
    assert after.records.get("a").status == Status.SUCCEEDED
    assert after.pending() == {"b"}


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_client_that_a_person_waits_for_asks_a_silent_server_once(is_patient: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        client = connect(url, retries=2, answer_seconds=0.2, is_patient=is_patient)
        with pytest.raises(redis.TimeoutError):
            client.get("key")
        client.close()
        silent.settimeout(0)
        calls = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                calls += 1
    assert calls > 2 if is_patient else calls == 1
