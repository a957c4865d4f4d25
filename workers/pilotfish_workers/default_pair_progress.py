"""Tell a person how far a long step is: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]
_PLAIN_STEPS = 4  # lines that a plain bar prints


class Reporter:
    """Writes to `stream` (standard error unless given), so that results can own stdout."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False)

    @contextmanager
    def bytes_bar(self, label: str, total: int) -> Iterator[Advance]:
        """A bar of `total` bytes; the yielded function takes the bytes done so far."""
        if not self._console.is_terminal:
            yield self._plain_bar(label, total)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(label, total=total)
            yield lambda done: progress.update(task, completed=min(done, total))

    @contextmanager
    def spinner(self, label: str) -> Iterator[None]:
        """Something moves while a step of unknown length runs."""
        if not self._console.is_terminal:
            self.say(label)
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            progress.add_task(label, total=None)
            yield

    def _plain_bar(self, label: str, total: int) -> Advance:
        said = -1

        def advance(done: int) -> None:
            nonlocal said
            step = min(_PLAIN_STEPS, done * _PLAIN_STEPS // max(total, 1))
            if step > said:
                said = step
                self.say(f"{label}: {100 * step // _PLAIN_STEPS} %")

        return advance
