"""A folder that one command at a time may use, for as long as any of its processes lives."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from pilotfish_broker.errors import InvalidRequest

LOCK_SECONDS = 10.0
RETRY_SECONDS = 0.1


def take_lock(folder: Path, make_folder: Callable[[], None], busy: str) -> int:
    """Lock a folder; gives the open file that is the lock.

    Processes that inherit it hold the lock too: a command that follows a killed one waits until
    the last of that one's processes is gone.

    Args:
        folder: what is locked.
        make_folder: makes it where it is missing; called for each try, since the former owner
            may remove the folder while somebody waits for it.
        busy: what to say when somebody else still has it after some seconds.

    Raises:
        InvalidRequest: somebody else has it.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    path = folder / "lock"
    while True:
        make_folder()
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                return lock  # and not one of a folder that was removed meanwhile
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise InvalidRequest(busy) from None
            time.sleep(RETRY_SECONDS)
        os.close(lock)
