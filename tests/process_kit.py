"""What tests with real processes share: programs with logs, families of them, patient waits.

Nothing here looks at a clock to judge: every wait has a generous limit, and passing it fails the
test with the last lines of the logs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import redis

LIMIT_SECONDS = 90.0
POLL_SECONDS = 0.02
TAIL_LINES = 25

Value = TypeVar("Value")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without our own variables, with one thread for everything."""
    values = {k: v for k, v in os.environ.items() if not k.startswith(("PILOTFISH_", "FLOWER_"))}
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return {**values, **quiet, "COLUMNS": "200", **extra}


def pilotfish(*arguments: str | Path) -> list[str]:
    """The command line of the installed program."""
    beside = Path(sys.executable).with_name("pilotfish")
    program = str(beside) if beside.exists() else shutil.which("pilotfish")
    assert program is not None, "the package is not installed: pip install -e ."
    return [program, *(str(argument) for argument in arguments)]


def celery(app: str, *arguments: str) -> list[str]:
    """A celery command of one of the two apps ("verify" or "draft")."""
    return [sys.executable, "-m", "celery", "-A", f"pilotfish_workers.{app}.app", *arguments]


class Program:
    """A started program in a session of its own; what it prints goes to a log."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, **variables: str) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this one process."""
        assert self.is_running, f"{self.name} had ended before {number.name}:\n{self.tail()}"
        self._process.send_signal(number)

    def wait(self, limit: float = LIMIT_SECONDS) -> int:
        """Wait for the end; gives the exit status, -n where signal n ended it."""
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end:\n{self.tail()}") from None

    def kill(self) -> None:
        """End it now, by SIGKILL; fine if it has ended."""
        if self.is_running:
            self._process.kill()
        self._process.wait()

    def tail(self) -> str:
        """The last lines of its log, or of all logs that a `run` left beside its output."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- {self.name} ({self.log})", *lines])


def wait_until(
    condition: Callable[[], Value | None],
    what: str,
    programs: Iterable[Program] = (),
    limit: float = LIMIT_SECONDS,
) -> Value:
    """Wait for a condition to be true; gives its value.

    All of `programs` must keep running meanwhile.
    """
    programs = list(programs)
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        ended = [program.name for program in programs if not program.is_running]
        if ended or time.monotonic() > deadline:
            reason = f"{ended} ended" if ended else f"{limit:g} s passed"
            logs = "\n".join(program.tail() for program in programs)
            raise AssertionError(f"{reason} while waiting for: {what}\n{logs}")
        time.sleep(POLL_SECONDS)


def run_cli(
    *arguments: str | Path, limit: float = LIMIT_SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        pilotfish(*arguments),
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


class Family:
    """The processes of one command, remembered so that they can be looked for after its end.

    Args:
        program: the command; its descendants are noted at each :meth:`note`.
        mark: a text, such as a folder, that stands in the command line or environment of all
            its processes and of no others.
    """

    def __init__(self, program: Program, mark: str) -> None:
        self._mark = mark
        self._parent = psutil.Process(program.pid)
        self._known: set[psutil.Process] = {self._parent}

    def note(self) -> list[psutil.Process]:
        """Note the descendants that live now; gives them."""
        children: list[psutil.Process] = self._parent.children(recursive=True)
        self._known.update(children)
        return children

    def survivors(self) -> list[str]:
        """Those that still live, and any other process that bears the mark."""
        found = {p for p in self._known if p.is_running() and not _is_dead(p)}
        for process in psutil.process_iter():
            if process.pid != os.getpid() and not _is_dead(process) and self._is_marked(process):
                found.add(process)
        return [_describe(process) for process in found]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            return False
        return any(self._mark in word for word in words)


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)


def embedded_server(output: Path) -> redis.Redis:
    """A client of the server that a `run` with this output has started for itself."""
    config = output.with_name(output.name + ".pilotfish") / "valkey" / "valkey.conf"
    values = dict(line.split(" ", 1) for line in config.read_text().splitlines() if " " in line)
    return redis.Redis(
        port=int(values["port"]), password=values["requirepass"], socket_timeout=LIMIT_SECONDS
    )
