"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pilotfish.batch_lines import Request
from pilotfish.result import Result

PLAIN_SECONDS = 10.0


class RunDisplay:
    """Shows a run. A context manager; what it shows is left on the screen.

    Args:
        total: how many jobs there are.
        console: where to show it; standard error unless something else is printed meanwhile.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._total, self._done = total, 0
        self._tokens_ended = 0
        self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._task = self._bar.add_task("starting", total=total, speed="")

    def __enter__(self) -> RunDisplay:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def awaiting(self, states: Iterable[Mapping[str, int]], wanted: Mapping[str, int]) -> None:
        """Show which workers are waited for while `states` (how many are ready) come in."""
        if not self._console.is_terminal:
            self.note("starting " + _counted(wanted))
        for ready in states:
            missing = [
                f"{kind} {ready[kind]}/{count}"
                for kind, count in wanted.items()
                if ready[kind] < count
            ]
            self._bar.update(self._task, description="loading models: " + ", ".join(missing))
        self.note(f"ready after {time.monotonic() - self._started:.1f} s")

    def begin(self, done: int) -> None:
        """From here on jobs run, and speed is counted; `done` were done by an earlier command."""
        if done:
            self.note(f"continuing: {done} of {self._total} are done")
        self._started = self._last_line = time.monotonic()
        self._done = done
        self._bar.update(self._task, description="jobs", completed=done)

    def ended(self, request: Request, result: Result) -> None:
        """Count a request that has ended, and say why where it failed."""
        self.count(result)
        if (bad := result.unsuccessful) is not None and bad.error:
            self.note(f"{request.custom_id}: {bad.error}")

    def count(self, result: Result) -> None:
        """Count a job that has ended."""
        self._done += 1
        self._tokens_ended += sum(sample.completion_tokens for sample in result.samples)
        self._tokens = max(self._tokens, self._tokens_ended)
        self._bar.update(self._task, completed=self._done, speed=self._speed())

    def running(self, tokens: int) -> None:
        """Show the tokens so far, those of running jobs included."""
        self._tokens = max(self._tokens, self._tokens_ended + tokens)
        now = time.monotonic()
        self._bar.update(self._task, speed=self._speed())
        if not self._console.is_terminal and now - self._last_line > PLAIN_SECONDS:
            self._last_line = now
            self.note(f"{self._done}/{self._total} jobs, {self._speed()}")

    def note(self, text: str) -> None:
        """Print a line of its own."""
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 0.001)
        return f"{self._tokens} tokens, {self._tokens / seconds:.0f} tokens/s"


def _counted(wanted: Mapping[str, int]) -> str:
    """Workers in words: "1 verify worker, 2 draft workers"."""
    parts = [f"{n} {kind} worker{'s' if n > 1 else ''}" for kind, n in wanted.items() if n]
    return ", ".join(parts)
