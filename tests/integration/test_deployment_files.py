"""The shipped configuration files, each used by the program that it is for."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml

from pilotfish_broker.connection import check_server, connect
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.ownership import Identity

BROKER_CONFIG = Path(__file__).parents[2] / "broker_config"
START_SECONDS = 30

pytestmark = pytest.mark.integration


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(process: subprocess.Popen[bytes], is_ready: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            is_ready()
            return
        except (redis.ConnectionError, urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(f"did not start; exit status {process.poll()}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def configured_server(_valkey_binary: str, tmp_path: Path) -> Iterator[Any]:
    """A client of a server that was started with redis.conf."""
    port = free_port()
    command = [_valkey_binary, str(BROKER_CONFIG / "redis.conf")]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    )
    client = connect(f"redis://127.0.0.1:{port}/0")
    try:
        wait_for(process, client.ping)
        yield client
    finally:
        client.close()
        end(process)


def test_the_server_configuration_loses_nothing_and_serves_this_machine_only(
    configured_server: Any,
) -> None:
    expected = {
        b"appendonly": b"yes",
        b"appendfsync": b"everysec",
        b"maxmemory-policy": b"noeviction",
        b"protected-mode": b"yes",
        b"bind": b"127.0.0.1 -::1",
    }
    found = configured_server.config_get(*(name.decode() for name in expected))
    assert {name.encode(): value.encode() for name, value in _text(found).items()} == expected
    assert int(_text(configured_server.config_get("maxmemory"))["maxmemory"]) > 0
    check_server(configured_server, "redis://127.0.0.1/0")


def _text(mapping: dict[Any, Any]) -> dict[str, str]:
    def plain(item: Any) -> str:
        return item.decode() if isinstance(item, bytes) else str(item)

    return {plain(name): plain(value) for name, value in mapping.items()}


@pytest.fixture
def compose_server(_valkey_binary: str, tmp_path: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Process and port of the compose file's server: its command, run by a shell of this machine
    with this machine's paths."""
    port = free_port()
    text = (BROKER_CONFIG.parent / "docker-compose.yml").read_text(encoding="utf-8")
    program, flag, script = yaml.safe_load(text)["services"]["redis"]["command"]
    config = tmp_path / "redis.conf"
    shipped = (BROKER_CONFIG / "redis.conf").read_text(encoding="utf-8")
    config.write_text(shipped.replace("port 6379", f"port {port}"))
    replaced = {
        "valkey-server": _valkey_binary,
        "/etc/pilotfish/redis.conf": str(config),
        "'*'": "127.0.0.1",
        "/data": str(tmp_path),
        "$$": "$",
    }
    for theirs, ours in replaced.items():
        assert theirs in script
        script = script.replace(theirs, ours)
    environ = {**os.environ, "REDISCLI_AUTH": "hush42"}
    process = subprocess.Popen([program, flag, script], env=environ, stdout=subprocess.DEVNULL)
    client = connect(f"redis://:hush42@127.0.0.1:{port}/0")
    try:
        wait_for(process, client.ping)
        yield psutil.Process(process.pid), port
    finally:
        client.close()
        end(process)


def test_the_compose_files_server_asks_for_its_password_and_keeps_it_to_itself(
    compose_server: tuple[psutil.Process, int],
) -> None:
    process, port = compose_server
    assert process.name() == "valkey-server"  # not the shell, so that signals reach it
    assert "hush42" not in " ".join(process.cmdline())
    with (
        connect(f"redis://127.0.0.1:{port}/0", retries=0) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def healthcheck(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BROKER_CONFIG / "healthcheck.py"), *arguments],
        env={**os.environ, "PILOTFISH_BROKER_URL": url, "PILOTFISH_DATA_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )


def register(client: Any, kind: str, host: str, seconds: float) -> Leases:
    leases = Leases(client, Keys(), Identity(f"{kind}-{host}", "nonce"), kind, "m", seconds)
    leases.register(2, {"host": host})
    return leases


def test_the_health_check_wants_a_live_worker_of_its_kind_on_its_host(
    redis_client: Any, redis_url: str
) -> None:
    register(redis_client, "draft", socket.gethostname(), 30)
    register(redis_client, "verify", "elsewhere", 30)
    assert healthcheck(redis_url, "verify").returncode == 1
    assert healthcheck(redis_url, "draft").returncode == 0
    register(redis_client, "verify", socket.gethostname(), 30)
    assert healthcheck(redis_url, "verify").returncode == 0


def test_the_health_check_fails_when_the_lease_has_ended(redis_client: Any, redis_url: str) -> None:
    register(redis_client, "verify", socket.gethostname(), 0.001)
    time.sleep(0.05)
    done = healthcheck(redis_url, "verify")
    assert (done.returncode, "no live verify worker" in done.stderr) == (1, True)


def test_the_health_check_fails_without_a_server() -> None:
    done = healthcheck(f"redis://127.0.0.1:{free_port()}/0", "draft")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)


@pytest.fixture
def flower(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """Address of a Flower that was started with the command of docker-compose.yml."""
    pytest.importorskip("flower")
    port = free_port()
    environ = {name: v for name, v in os.environ.items() if not name.startswith("FLOWER_")}
    environ |= {"PILOTFISH_BROKER_URL": redis_url, "PILOTFISH_TARGET": "SmolLM2-135M-Instruct"}
    environ |= {"FLOWER_BASIC_AUTH": "user:secret", "FLOWER_PORT": str(port)}
    environ |= {"FLOWER_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-m", "celery", "--app", "pilotfish_workers.verify.app"]
    process = subprocess.Popen(
        [*command, "flower", f"--conf={BROKER_CONFIG / 'flowerconfig.py'}"],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(process, lambda: status(f"{address}/healthcheck"))
        yield address
    finally:
        end(process)


def status(address: str, login: str = "") -> int:
    request = urllib.request.Request(address)
    if login:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            code: int = reply.status
            return code
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_flower_starts_with_its_configuration_and_asks_for_the_password(flower: str) -> None:
    assert status(f"{flower}/healthcheck") == 200
    for page in ("/", "/tasks", "/api/workers"):
        assert status(flower + page) == 401, page
        assert status(flower + page, "user:wrong") == 401, page
        assert status(flower + page, "user:secret") == 200, page
