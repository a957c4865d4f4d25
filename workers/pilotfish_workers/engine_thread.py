"""What both engines are: one thread that owns all state, and a queue of what others ask of it."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)


class Guest(Protocol):
    """What an engine works on; somebody waits for its future."""

    @property
    def future(self) -> Future[dict[str, Any]]: ...


Item = TypeVar("Item", bound=Guest)


class EngineThread(ABC, Generic[Item]):
    """A loop of iterations on a thread of its own.

    Other threads only put events into its queue; an event is a call that the engine's own thread
    makes. Whoever enters gets its future resolved, whatever becomes of the engine.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pilotfish-engine", daemon=True)
        self._is_stopping = False
        self._door = threading.Lock()  # nobody comes in once the engine has left
        self._has_left = False
        self._inside: set[Item] = set()  # all whose futures are to be resolved
        self.failure: BaseException | None = None
        self.num_iterations = 0

    # --- called from other threads -------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, item: Item) -> None:
        """Take an item in; its future resolves when the engine is done with it."""
        with self._door:
            if not self._has_left:
                self._inside.add(item)
                item.future.add_done_callback(lambda _: self._inside.discard(item))
                self._events.put(lambda: self._add(item))
                return
        item.future.set_exception(self._turned_away())

    def stop(self) -> None:
        """End after the iteration under way; what is not done is turned away."""
        self._events.put(self._mark_stopping)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def progress(self) -> int:
        """A number that changes with every iteration, idle ones too."""
        return self.num_iterations

    # --- what an engine adds -------------------------------------------------------------------

    @abstractmethod
    def _add(self, item: Item) -> None:
        """Take an item in, on the engine's thread."""

    @abstractmethod
    def _idle_seconds(self) -> float:
        """How long to wait for an event; 0 when there is something to do."""

    @abstractmethod
    def _iterate(self) -> None:
        """One iteration, after the events that waited."""

    @abstractmethod
    def _leave(self) -> None:
        """Let everything go in good order; not called after a failure."""

    @abstractmethod
    def _turned_away(self) -> Exception:
        """What the futures of those get whom the engine cannot serve to the end."""

    def _shut(self) -> None:
        """Called last, whatever happened."""

    # --- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._read_events()
                self._iterate()
                self.num_iterations += 1
            self._leave()
        except BaseException as error:
            self.failure = error
            log.exception("the engine died")
        finally:
            with self._door:
                self._has_left = True
            self._shut()
            for item in list(self._inside):
                item.future.set_exception(self._turned_away())

    def _read_events(self) -> None:
        """Run all events that wait; block for the first one while there is nothing to do."""
        timeout = self._idle_seconds()
        while True:
            try:
                event = self._events.get(block=timeout > 0, timeout=timeout or None)
            except queue.Empty:
                return
            event()
            timeout = 0.0

    def _mark_stopping(self) -> None:
        self._is_stopping = True
