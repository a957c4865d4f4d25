"""KV blocks as files of one folder, which several processes may share.

A value is written under a temporary name, synced and renamed, so a reader sees all of it or
nothing. The folder is not synced afterwards: a name that a power cut takes back is only a miss.
Where what lies stands in :mod:`~pilotfish_checkpoint.disk_files`.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pilotfish_checkpoint.disk_files import (
    check_folder,
    file_name,
    leaf_of,
    open_file,
    open_root,
    remove_file,
    remove_stale,
    value_files,
    write_file,
)
from pilotfish_checkpoint.store import MAX_VALUE_BYTES, StoreBase

RESCAN_SECONDS = 300.0
# Other processes write too, so each looks again after a sixteenth of the bound; what is thrown
# out makes room for an eighth, so that looking stays rare.
RESCAN_SHARE = 16
ROOM_SHARE = 8

T = TypeVar("T")


class DiskStore(StoreBase):
    """Keeps what was used last, up to a bound; each process keeps to it by looking itself.

    Args:
        folder: made if there is none, for this user alone.
        max_bytes: of all files together. Each further process that writes may add a sixteenth.
        ttl_seconds: how long a value stays after its last use.
        read_seconds: how long a call that reads may take.
        write_seconds: how long one that writes may take.
        clock: seconds since the epoch; for tests.

    Raises:
        ConfigError: the folder is a symbolic link or no folder, belongs to somebody else, or
            others may write to it.
    """

    name = "on disk"

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        ttl_seconds: float = 7 * 86_400.0,
        *,
        read_seconds: float = 2.0,
        write_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(read_seconds, write_seconds, clock)
        check_folder(folder)
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_ns = int(ttl_seconds * 1e9)
        self._clock = clock
        self._looking = threading.Lock()
        self._bytes: int | None = None  # held as far as we know; None before the first look
        self._bytes_since = 0  # written since we looked
        self._looked_at = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes held, counted now."""
        with suppress(FileNotFoundError), open_root(self._folder) as root:
            return sum(file.size for file in value_files(root))
        return 0

    def _read(self, addresses: Sequence[bytes]) -> Generator[tuple[int, bytes], None, None]:
        yield from self._each(addresses, self._value)

    def _find(self, addresses: Sequence[bytes]) -> Generator[int, None, None]:
        for index, is_there in self._each(addresses, self._is_there):
            if is_there:
                yield index

    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
        with open_root(self._folder) as root:
            for index, (address, value) in enumerate(items):
                if len(value) > self._max_bytes:
                    continue
                self._make_room(root, len(value))
                write_file(root, file_name(address), value, self._now_ns())
                with self._looking:  # too much where it replaces one, until we look again
                    self._bytes = (self._bytes or 0) + len(value)
                    self._bytes_since += len(value)
                yield index

    def _remove(self, addresses: Sequence[bytes]) -> None:
        for _ in self._each(addresses, lambda leaf, name: os.unlink(name, dir_fd=leaf)):
            pass

    def _collect(self) -> None:
        with suppress(FileNotFoundError), open_root(self._folder) as root, self._looking:
            self._look(root, 0)

    def _each(
        self, addresses: Sequence[bytes], action: Callable[[int, str], T | None]
    ) -> Generator[tuple[int, T], None, None]:
        """Index of each address and what the action, called with open folder and file name, gave.

        A file that is not there gives nothing. What one file does wrong is counted and leaves the
        others alone.
        """
        with suppress(FileNotFoundError), open_root(self._folder) as root:
            for index, address in enumerate(addresses):
                name, result = file_name(address), None
                try:
                    with leaf_of(root, name) as leaf:
                        result = action(leaf, name)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._note(error)
                if result is not None:
                    yield index, result

    def _value(self, leaf: int, name: str) -> bytes | None:
        file, state = open_file(leaf, name)
        try:
            if not self._is_good(state):
                return None
            with open(file, "rb", closefd=False) as reader:
                value = reader.read(state.st_size)
            with suppress(OSError):  # of another user, or on a drive that nobody may change
                os.utime(file, ns=(self._now_ns(), self._now_ns()))
            return value or None
        finally:
            os.close(file)

    def _is_there(self, leaf: int, name: str) -> bool:
        return self._is_good(os.stat(name, dir_fd=leaf, follow_symlinks=False))

    def _is_good(self, state: os.stat_result) -> bool:
        """Whether it is a value's file whose time is not over."""
        is_due = self._now_ns() - state.st_mtime_ns > self._ttl_ns
        return stat.S_ISREG(state.st_mode) and 0 < state.st_size <= MAX_VALUE_BYTES and not is_due

    def _make_room(self, root: int, size: int) -> None:
        with self._looking:
            if (
                self._bytes is None
                or self._bytes + size > self._max_bytes
                or self._bytes_since > self._max_bytes // RESCAN_SHARE
                or abs(self._clock() - self._looked_at) > RESCAN_SECONDS
            ):
                self._look(root, size)

    def _look(self, root: int, size: int) -> None:
        """See what there is; throw out what is due, and the oldest until `size` more fit."""
        now_ns = self._now_ns()
        remove_stale(root, now_ns)
        files = sorted(value_files(root))
        held = target = sum(file.size for file in files)
        if held + size > self._max_bytes:
            target = self._max_bytes - self._max_bytes // ROOM_SHARE - size
        for file in files:
            if now_ns - file.used_ns <= self._ttl_ns and held <= target:
                break
            held -= file.size  # also where another process was faster
            self._count(evictions=int(remove_file(root, file.name)))
        self._bytes, self._bytes_since, self._looked_at = held, 0, self._clock()

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)
