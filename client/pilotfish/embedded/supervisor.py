"""Keeps processes alive: starts them again when they die, gives up when that helps nothing.

Nothing runs by itself: whoever owns a supervisor calls :meth:`Supervisor.tick` a few times a
second, from the main thread.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pilotfish.embedded.lifeline import Lifeline, kill_group
from pilotfish.worker_command import Command
from pilotfish_broker.errors import ConfigError, PilotfishError

QUICK_SECONDS = 15.0
MOST_QUICK_DEATHS = 5
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
CONFIG_STATUS = 2  # every other one may pass, 3 (no answer from the broker) included
SAID = "pilotfish: "  # Celery may have put the time before it
TAIL_LINES = 12
TAIL_BYTES = 16_384
GRACE_SECONDS = 5.0


class ProcessFailed(PilotfishError):
    """A process died again and again. The message has the end of its log."""


@dataclass(slots=True)
class Child:
    """One supervised process; `process` is None between its death and its next start."""

    name: str
    command: Callable[[], Command]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_after: float = 0.0
    quick_deaths: int = 0


class Supervisor:
    """Starts and watches children that end with this process."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._children: list[Child] = []

    def start(self, name: str, command: Callable[[], Command], log: Path) -> None:
        """Start a process and keep it alive; `command` is asked again for each new start."""
        child = Child(name, command, log)
        self._children.append(child)
        self._start(child)

    def tick(self) -> list[str]:
        """Look after all children.

        Returns:
            names of those that have been started again.

        Raises:
            ConfigError: one ended with the exit status that says "my settings are wrong".
            ProcessFailed: one died too often soon after its start.
        """
        restarted = []
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._note_death(child, child.process.returncode)
            if child.process is None and time.monotonic() >= child.start_after:
                self._start(child)
                restarted.append(child.name)
        return restarted

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """End all children, those started last first; a second interrupt kills them at once."""
        try:
            workers, servers = self._children[1:], self._children[:1]
            for group in (workers, servers):
                self._terminate(group, grace_seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all children at once."""
        for child in reversed(self._children):
            if child.process is not None:
                kill_group(child.process)
        self._children.clear()

    def is_running(self, name: str) -> bool:
        """Whether a child of that name lives."""
        return any(
            child.name == name and child.process is not None and child.process.poll() is None
            for child in self._children
        )

    def _start(self, child: Child) -> None:
        child.started_at = time.monotonic()
        child.process = self._lifeline.start(child.command(), child.log)

    def _note_death(self, child: Child, status: int) -> None:
        child.process = None
        if status == CONFIG_STATUS:
            raise ConfigError(f"the {child.name} refused to start: {reason(child.log)}")
        is_quick = time.monotonic() - child.started_at < QUICK_SECONDS
        child.quick_deaths = child.quick_deaths + 1 if is_quick else 0
        if child.quick_deaths >= MOST_QUICK_DEATHS:
            raise ProcessFailed(
                f"the {child.name} died {child.quick_deaths} times soon after its start "
                f"(last: {describe(status)}); the end of its log:\n{tail(child.log)}"
            )
        pause = FIRST_PAUSE_SECONDS * 2 ** max(0, child.quick_deaths - 1)
        child.start_after = time.monotonic() + min(pause, LONGEST_PAUSE_SECONDS)

    def _terminate(self, children: list[Child], grace_seconds: float) -> None:
        running = [child.process for child in children if child.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_group(process)


def describe(status: int) -> str:
    """An exit status in words; launchers report signal n as 128 + n."""
    number = -status if status < 0 else status - 128
    if number > 0:
        try:
            return f"ended by {signal.Signals(number).name}"
        except ValueError:
            pass
    return f"exit status {status}"


def tail(log: Path) -> str:
    """The last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def reason(log: Path) -> str:
    """What a worker said when it refused: its own line, else the last one of the log."""
    lines = [line.strip() for line in tail(log).splitlines() if line.strip()]
    said = [line.partition(SAID)[2] for line in lines if SAID in line]
    return (said or lines or [f"see {log}"])[-1]
