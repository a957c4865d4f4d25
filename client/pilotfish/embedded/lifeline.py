"""Starts processes that end with this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pilotfish.worker_command import Command

LAUNCHER = Path(__file__).with_name("child.py")


class Lifeline:
    """A pipe whose write end only this process has; its children watch the other end.

    Args:
        keep: descriptors that the commands inherit, such as a lock that they are to hold.
    """

    def __init__(self, keep: Sequence[int] = ()) -> None:
        self._keep = list(keep)
        self._read, self._write = os.pipe()

    def start(self, command: Command, log: Path) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, so that a terminal's Ctrl-C misses it; what
        it prints is appended to `log`.

        Raises:
            RuntimeError: called from another than the main thread. The death signal that the
                child asks for comes when the starting thread ends.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("children can only be started from the main thread")
        keep = ",".join(str(descriptor) for descriptor in self._keep)
        launcher = [sys.executable, "-I", str(LAUNCHER), str(self._read), str(os.getpid()), keep]
        with log.open("ab") as output:
            return subprocess.Popen(
                launcher + command.argv,
                env=command.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[self._read, *self._keep],
            )

    def close(self) -> None:
        """Kill whatever child still watches."""
        os.close(self._write)
        os.close(self._read)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a started child: its launcher and its command."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
