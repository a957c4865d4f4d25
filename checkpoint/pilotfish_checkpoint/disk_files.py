"""Files of a folder of KV blocks, by open folders only: no symbolic link is ever followed.

FOLDER/4/f/4f…e1.kv     the value with that address; its modification time says when it was used
FOLDER/tmp/….tmp        one that is being written
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pilotfish_broker.errors import ConfigError

STALE_SECONDS = 3600.0  # a temporary file of that age belongs to a writer that died
WAITING = "tmp"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# a pipe of that name would hold up whoever opens it
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIGITS = "0123456789abcdef"
_VALUE_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_WAITING_NAME = re.compile(r"[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True, order=True)
class ValueFile:
    """One value's file; they sort by last use, in nanoseconds since the epoch."""

    used_ns: int
    name: str
    size: int


def check_folder(folder: Path) -> None:
    """Make the folder if there is none, for this user alone.

    Raises:
        ConfigError: it is a symbolic link or no folder, belongs to somebody else, or others may
            write to it.
    """
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


@contextmanager
def open_root(folder: Path) -> Iterator[int]:
    """The folder, opened."""
    root = os.open(folder, _FOLDER)
    try:
        yield root
    finally:
        os.close(root)


@contextmanager
def leaf_of(root: int, name: str, *, is_made: bool = False) -> Iterator[int]:
    """The open folder in which the value's file of that name lies."""
    with (
        _below(root, name[0], is_made=is_made) as upper,
        _below(upper, name[1], is_made=is_made) as lower,
    ):
        yield lower


def file_name(address: bytes) -> str:
    return f"{address.hex()}.kv"


def open_file(leaf: int, name: str) -> tuple[int, os.stat_result]:
    """Descriptor and state of a value's file; the descriptor is the caller's to close."""
    file = os.open(name, _READ, dir_fd=leaf)
    try:
        return file, os.fstat(file)
    except BaseException:
        os.close(file)
        raise


def write_file(root: int, name: str, value: bytes, used_ns: int) -> None:
    """Write a value's file, which is there afterwards as a whole or not at all."""
    temporary = f"{secrets.token_hex(16)}.tmp"
    with _below(root, WAITING, is_made=True) as waiting:
        file = os.open(temporary, _CREATE, 0o600, dir_fd=waiting)
        try:
            with open(file, "wb") as writer:
                writer.write(value)
                writer.flush()
                os.utime(file, ns=(used_ns, used_ns))
                os.fsync(file)
            with leaf_of(root, name, is_made=True) as leaf:
                os.replace(temporary, name, src_dir_fd=waiting, dst_dir_fd=leaf)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=waiting)
            raise


def remove_file(root: int, name: str) -> bool:
    """Remove a value's file; whether it was still there."""
    try:
        with leaf_of(root, name) as leaf:
            os.unlink(name, dir_fd=leaf)
    except FileNotFoundError:
        return False
    return True


def value_files(root: int) -> Iterator[ValueFile]:
    """Every value's file; what else lies there is left alone."""
    for pair in map("".join, itertools.product(_DIGITS, repeat=2)):
        with suppress(OSError), leaf_of(root, pair) as leaf:
            for name, state in _entries(leaf, _VALUE_NAME):
                if name.startswith(pair):
                    yield ValueFile(state.st_mtime_ns, name, state.st_size)


def remove_stale(root: int, now_ns: int) -> None:
    """Remove what writers that died have left behind."""
    with suppress(FileNotFoundError), _below(root, WAITING) as waiting:
        for name, state in list(_entries(waiting, _WAITING_NAME)):
            if now_ns - state.st_mtime_ns > STALE_SECONDS * 1e9:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=waiting)


@contextmanager
def _below(parent: int, name: str, *, is_made: bool = False) -> Iterator[int]:
    if is_made:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def _entries(folder: int, pattern: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)
