"""KV blocks as files of one folder, which several processes may share.

    FOLDER/4/f/4f…e1.kv     the value with that address; last use is the file's modification time
    FOLDER/tmp/….tmp        one that is being written

A value is written under a temporary name, synced and renamed, so a reader sees all of it or
nothing. The folder is not synced afterwards: a name that a power cut takes back is only a miss.
Nothing outside these names is read or removed, and no symbolic link is followed below the folder.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pilotfish_broker.errors import ConfigError
from pilotfish_checkpoint.store import MAX_VALUE_BYTES, StoreBase

STALE_SECONDS = 3600.0  # a temporary file of that age belongs to a writer that died
RESCAN_SECONDS = 300.0
# Other processes write too, so each looks again after a sixteenth of the bound; what is thrown
# out makes room for an eighth, so that looking stays rare.
RESCAN_SHARE = 16
ROOM_SHARE = 8

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not stop us
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIGITS = "0123456789abcdef"
_VALUE_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_T = TypeVar("_T")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True, order=True)
class _File:
    """One value's file; they sort by last use (ns)."""

    used_ns: int
    name: str
    size: int


class DiskStore(StoreBase):
    """Keeps what was used last, up to a bound; each process keeps to it by looking itself.

    Args:
        folder: made if there is none, for this user alone.
        max_bytes: of all files together. It may be passed by a sixteenth for each process that
            writes.
        ttl_seconds: how long a value stays after its last use.
        read_seconds: how long a call that reads may take, up to one file more.
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
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl_ns = int(ttl_seconds * 1e9)
        self._clock = clock
        self._scanning = threading.Lock()
        self._bytes: int | None = None  # held as far as we know; None before the first look
        self._bytes_since = 0  # written since we looked
        self._scanned_at = 0.0
        _check_folder(folder)

    @property
    def num_bytes(self) -> int:
        """Bytes held, counted now."""
        try:
            with self._root() as root:
                return sum(file.size for file in _files(root))
        except FileNotFoundError:
            return 0

    def _read(self, addresses: Sequence[bytes]) -> Generator[tuple[int, bytes], None, None]:
        yield from self._each(addresses, self._value)

    def _find(self, addresses: Sequence[bytes]) -> Generator[int, None, None]:
        for index, is_there in self._each(addresses, self._is_there):
            if is_there:
                yield index

    def _write(self, items: Sequence[tuple[bytes, bytes]]) -> Generator[int, None, None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
        with self._root() as root:
            for index, (address, value) in enumerate(items):
                if len(value) > self._max_bytes:
                    continue
                self._make_room(root, len(value))
                replaced = self._put(root, address, value)
                with self._scanning:
                    self._bytes = (self._bytes or 0) + len(value) - replaced
                    self._bytes_since += len(value)
                yield index

    def _remove(self, addresses: Sequence[bytes]) -> None:
        for _ in self._each(addresses, lambda leaf, name: os.unlink(name, dir_fd=leaf)):
            pass

    def _collect(self) -> None:
        with suppress(FileNotFoundError), self._root() as root, self._scanning:
            self._scan(root, 0)

    @contextmanager
    def _root(self) -> Iterator[int]:
        root = os.open(self._folder, _FOLDER)
        try:
            yield root
        finally:
            os.close(root)

    def _each(
        self, addresses: Sequence[bytes], action: Callable[[int, str], _T | None]
    ) -> Generator[tuple[int, _T], None, None]:
        """Index and result of the action with the open folder and the name of each file. What
        one file does wrong is counted and leaves the others alone."""
        with suppress(FileNotFoundError), self._root() as root:
            for index, address in enumerate(addresses):
                name, result = _file_name(address), None
                try:
                    with _leaf(root, name) as leaf:
                        result = action(leaf, name)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._note(error)
                if result is not None:
                    yield index, result

    def _value(self, leaf: int, name: str) -> bytes | None:
        file = os.open(name, _READ, dir_fd=leaf)
        try:
            state = os.fstat(file)
            if not self._is_good(state):
                return None
            with open(file, "rb", closefd=False) as reader:
                value = reader.read(state.st_size)
            with suppress(OSError):  # of another user, or on a drive that cannot change
                os.utime(file, ns=(self._now_ns(), self._now_ns()))
            return value or None
        finally:
            os.close(file)

    def _is_there(self, leaf: int, name: str) -> bool:
        return self._is_good(os.stat(name, dir_fd=leaf, follow_symlinks=False))

    def _is_good(self, state: os.stat_result) -> bool:
        is_due = self._now_ns() - state.st_mtime_ns > self._ttl_ns
        return stat.S_ISREG(state.st_mode) and 0 < state.st_size <= MAX_VALUE_BYTES and not is_due

    def _put(self, root: int, address: bytes, value: bytes) -> int:
        """Write a file; the size of the one that it replaces."""
        temporary, name = f"{secrets.token_hex(16)}.tmp", _file_name(address)
        with _folder_at("tmp", root, is_made=True) as waiting:
            file = os.open(temporary, _CREATE, 0o600, dir_fd=waiting)
            try:
                try:
                    _write_all(file, value)
                    os.utime(file, ns=(self._now_ns(), self._now_ns()))
                    os.fsync(file)
                finally:
                    os.close(file)
                with _leaf(root, name, is_made=True) as leaf:
                    replaced = _size(leaf, name)
                    os.replace(temporary, name, src_dir_fd=waiting, dst_dir_fd=leaf)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=waiting)
                raise
        return replaced

    def _make_room(self, root: int, size: int) -> None:
        with self._scanning:
            if (
                self._bytes is None
                or self._bytes + size > self._max_bytes
                or self._bytes_since > self._max_bytes // RESCAN_SHARE
                or abs(self._clock() - self._scanned_at) > RESCAN_SECONDS
            ):
                self._scan(root, size)

    def _scan(self, root: int, size: int) -> None:
        """Look at what there is; throw out what is due, and the oldest until `size` more fit."""
        _remove_stale(root, self._now_ns())
        files = sorted(_files(root))
        held = sum(file.size for file in files)
        target = held
        if held + size > self._max_bytes:
            target = self._max_bytes - self._max_bytes // ROOM_SHARE - size
        due_ns = self._now_ns() - self._ttl_ns
        for file in files:
            if file.used_ns >= due_ns and held <= target:
                break
            held -= file.size
            with suppress(FileNotFoundError):  # another process was faster
                with _leaf(root, file.name) as leaf:
                    os.unlink(file.name, dir_fd=leaf)
                self._count(evictions=1)
        self._bytes, self._bytes_since, self._scanned_at = held, 0, self._clock()

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the KV folder {folder} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError(f"the KV folder {folder} is a symbolic link; name the folder behind it")
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise ConfigError(
            f"the KV folder {folder} belongs to somebody else, or others may write to it; "
            "take another one, or make it yours alone (chmod 700)"
        )


def _file_name(address: bytes) -> str:
    return f"{address.hex()}.kv"


@contextmanager
def _folder_at(name: str, parent: int, *, is_made: bool = False) -> Iterator[int]:
    """An open folder below an open folder; no symbolic link is followed."""
    if is_made:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _leaf(root: int, name: str, *, is_made: bool = False) -> Iterator[int]:
    """The open folder in which a file of that name lies."""
    with (
        _folder_at(name[0], root, is_made=is_made) as upper,
        _folder_at(name[1], upper, is_made=is_made) as lower,
    ):
        yield lower


def _files(root: int) -> Iterator[_File]:
    """Every value's file; what else lies there is left alone."""
    for pair in itertools.product(_DIGITS, repeat=2):
        with suppress(FileNotFoundError), _leaf(root, "".join(pair)) as leaf:
            for name, state in _entries(leaf, _VALUE_NAME):
                if name.startswith("".join(pair)):
                    yield _File(state.st_mtime_ns, name, state.st_size)


def _entries(folder: int, pattern: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _remove_stale(root: int, now_ns: int) -> None:
    with suppress(FileNotFoundError), _folder_at("tmp", root) as waiting:
        for name, state in list(_entries(waiting, _TEMPORARY_NAME)):
            if now_ns - state.st_mtime_ns > STALE_SECONDS * 1e9:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=waiting)


def _size(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _write_all(file: int, value: bytes) -> None:
    with open(file, "wb", closefd=False) as writer:
        writer.write(value)
