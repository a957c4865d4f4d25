"""Every store of KV blocks with its back door: what a test needs to damage, age and lose it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pilotfish_checkpoint.disk_store import DiskStore
from pilotfish_checkpoint.guard import LONGEST_PAUSE_SECONDS
from pilotfish_checkpoint.memory_store import MemoryStore
from pilotfish_checkpoint.redis_store import RedisStore
from pilotfish_checkpoint.store import StoreBase
from tests.checkpoint_kit import Clock

PATIENT = 60.0  # a limit that no test reaches
ROOMY = 1 << 30


class Rig(ABC):
    """One place where values lie, and the stores that were opened on it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._stores: list[StoreBase] = []

    def open(self, *, max_bytes: int = ROOMY, ttl_seconds: float = 100.0) -> StoreBase:
        """A store on this place; all but those in memory share what lies there."""
        self._stores.append(self._open(max_bytes, ttl_seconds))
        return self._stores[-1]

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    def end_pause(self) -> None:
        """Let stores ask again that were refused."""
        self.clock.now += LONGEST_PAUSE_SECONDS

    @abstractmethod
    def _open(self, max_bytes: int, ttl_seconds: float) -> StoreBase: ...

    @abstractmethod
    def change(self, address: bytes, edit: Callable[[bytes], bytes]) -> None:
        """Replace a stored value by something else behind the store's back."""

    @abstractmethod
    def num_values(self) -> int:
        """How many lie there, those whose time is over included where they still do."""


class MemoryRig(Rig):
    def __init__(self) -> None:
        super().__init__(Clock())
        self.store: MemoryStore | None = None

    def _open(self, max_bytes: int, ttl_seconds: float) -> StoreBase:
        self.store = MemoryStore(max_bytes, ttl_seconds, clock=self.clock)
        return self.store

    def change(self, address: bytes, edit: Callable[[bytes], bytes]) -> None:
        assert self.store is not None
        value, used_at = self.store._values[address]
        self.store._values[address] = (edit(value), used_at)

    def num_values(self) -> int:
        assert self.store is not None
        return len(self.store._values)


class DiskRig(Rig):
    def __init__(self, folder: Path) -> None:
        super().__init__(Clock(time.time()))  # other processes go by the real one
        self.folder = folder
        self._aside = folder.with_name("aside")

    def _open(self, max_bytes: int, ttl_seconds: float) -> StoreBase:
        return DiskStore(
            self.folder,
            max_bytes,
            ttl_seconds,
            read_seconds=PATIENT,
            write_seconds=PATIENT,
            clock=self.clock,
        )

    def path(self, address: bytes) -> Path:
        name = address.hex()
        return self.folder / name[0] / name[1] / f"{name}.kv"

    def files(self) -> list[Path]:
        """All of them, temporary ones too."""
        return [path for path in sorted(self.folder.rglob("*")) if path.is_file()]

    def change(self, address: bytes, edit: Callable[[bytes], bytes]) -> None:
        path = self.path(address)
        path.write_bytes(edit(path.read_bytes()))

    def num_values(self) -> int:
        return len(list(self.folder.rglob("*.kv")))

    def lose(self) -> None:
        """Something else stands where the folder was."""
        self.folder.rename(self._aside)
        self.folder.write_bytes(b"not a folder")

    def bring_back(self) -> None:
        self.folder.unlink()
        self._aside.rename(self.folder)


class RedisRig(Rig):
    """On a server of the tests (see conftest.py)."""

    def __init__(self, server: Any, seconds: float = PATIENT) -> None:
        super().__init__(Clock())
        self.server = server
        self.seconds = seconds

    def _open(self, max_bytes: int, ttl_seconds: float) -> StoreBase:
        return RedisStore(
            self.server.url,
            ttl_seconds=ttl_seconds,
            max_bytes=max_bytes,
            read_seconds=self.seconds,
            write_seconds=self.seconds,
            clock=self.clock,
        )

    @staticmethod
    def key(address: bytes) -> str:
        return f"pf:kv:{address.hex()}"

    def change(self, address: bytes, edit: Callable[[bytes], bytes]) -> None:
        client = self.server.client()
        client.set(self.key(address), edit(client.get(self.key(address))), keepttl=True)

    def num_values(self) -> int:
        return int(self.server.client().dbsize())

    def pass_time(self, seconds: float) -> None:
        """Take as much off what every key has left."""
        super().pass_time(seconds)
        client = self.server.client()
        for key in client.scan_iter("pf:kv:*"):
            left = client.pttl(key) - int(seconds * 1000)
            if left > 0:
                client.pexpire(key, left)
            else:
                client.delete(key)

    def lose(self) -> None:
        self.server.stop()

    def bring_back(self) -> None:
        self.server.start()
