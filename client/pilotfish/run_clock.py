"""When a run was really running, over all the commands that it took."""

from __future__ import annotations

import json
import time
from pathlib import Path

SAVE_SECONDS = 1.0
FILE = "parts.json"


class RunClock:
    """Notes in a file from when to when each part of a run ran: a part for each command.

    Times are milliseconds of this machine's clock, which is that of an embedded server too.

    Args:
        folder: the run's state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._parts: list[tuple[int, int]] = []
        self._next_save = 0.0
        try:
            self._parts = [(int(start), int(end)) for start, end in json.loads(self._read())]
        except (ValueError, TypeError):  # torn by a power cut: the pauses before it are not known
            self._parts = []

    def begin(self) -> None:
        """A new part begins now."""
        now = _now_ms()
        self._parts.append((now, now))
        self._save()

    def tick(self) -> None:
        """The part still runs; call it a few times a second. A killed one ran until about the
        last of these calls."""
        if time.monotonic() >= self._next_save:
            self._parts[-1] = (self._parts[-1][0], _now_ms())
            self._save()

    def pauses(self) -> list[tuple[int, int]]:
        """From when to when nothing ran between two parts."""
        ends = [end for _, end in self._parts]
        starts = [start for start, _ in self._parts]
        return list(zip(ends[:-1], starts[1:], strict=True))

    def _read(self) -> str:
        return self._path.read_text() if self._path.exists() else "[]"

    def _save(self) -> None:
        self._next_save = time.monotonic() + SAVE_SECONDS
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._parts))
        partial.rename(self._path)


def _now_ms() -> int:
    return int(time.time() * 1000)
