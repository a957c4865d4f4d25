"""Runs one command and ends it when the process that asked for it is gone.

Run by path, isolated and without an import of this package, so that it starts in hundredths of a
second: ``python -I child.py LIFELINE PARENT KEEP COMMAND…``. LIFELINE is the read end of a pipe
whose write end only the parent has; PARENT is its process id; KEEP lists further descriptors for
the command to inherit, separated by commas.

Two things watch the parent, since either alone has a gap. A thread waits for the end of the pipe,
on any system, also when only the parent's thread ended. On Linux the death signal ends this process
and the command even while that thread cannot run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def death_signal(parent: int) -> Callable[[], None]:
    """A function that ties the calling process to the life of `parent`, its parent."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the signal was asked for
            os._exit(1)

    return tie


def watch(lifeline: int) -> None:
    """Wait for the parent's end, then kill this process group: launcher and command."""
    try:
        os.read(lifeline, 1)
    finally:
        os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the command; gives its exit status, 128 + n where signal n ended it."""
    lifeline, parent = int(arguments[0]), int(arguments[1])
    keep = [int(part) for part in arguments[2].split(",") if part]
    death_signal(parent)()
    process: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def forward(number: int, _frame: object) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # this process has one thread until the command is started, so preexec_fn is safe
    process = subprocess.Popen(arguments[3:], pass_fds=keep, preexec_fn=death_signal(os.getpid()))
    if asked:
        process.send_signal(asked[-1])
    threading.Thread(target=watch, args=(lifeline,), daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
