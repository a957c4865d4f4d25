"""Makes the signals that end a command unwind it, so that it can end its children."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def unwinding() -> Iterator[None]:
    """Within this, SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt.

    One that is ignored stays so: who starts a command with nohup wants it to outlive its terminal.
    """
    ends = (signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, _leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
