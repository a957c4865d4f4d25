"""Writes rounds to Redis on a thread of its own, so that the next pass runs meanwhile."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import redis

from pilotfish_broker.connection import Redis, is_passing
from pilotfish_broker.inbox import send
from pilotfish_broker.messages import Frame
from pilotfish_broker.ownership import Commit, Ending, Ownership, Tail

RETRY_SECONDS = 0.2
Reply = TypeVar("Reply")
Outcomes = dict[tuple[str, int], str]  # by job and epoch: an old epoch must not speak for a new one
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finish:
    """The last tokens of a job and how it ends."""

    tail: Tail
    ending: Ending
    group: str


@dataclass(slots=True)
class Round:
    """What one iteration writes: commits with their verdicts, endings, and loose frames."""

    commits: list[Commit] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    frames: dict[str, list[Frame]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.commits or self.finishes or self.frames)

    def post(self, inbox: str, frame: Frame) -> None:
        """Add a frame that needs no commit."""
        self.frames.setdefault(inbox, []).append(frame)


class Committer:
    """One round under way at most: :meth:`submit`, then :meth:`collect` before the next.

    A round that Redis did not answer is sent again until it is: every script is safe to repeat,
    and whether this worker still owns its jobs by then is for the scripts to say.
    """

    def __init__(self, client: Redis, ownership: Ownership, inbox_frames: int) -> None:
        self.on_done: Callable[[], None] = lambda: None  # called when outcomes can be collected
        self._client = client
        self._ownership = ownership
        self._inbox_frames = inbox_frames
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcomes | Exception] = queue.SimpleQueue()
        self._is_busy = False
        self._stopped = threading.Event()
        self._give_up_at = math.inf  # monotonic seconds
        self._thread = threading.Thread(target=self._run, name="pilotfish-commit", daemon=True)
        self.num_tries = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the round under way; gives up on one that Redis does not answer."""
        self._stopped.set()
        self._rounds.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def give_up_after(self, seconds: float) -> None:
        """From then on, send nothing again that Redis does not answer. From any thread."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + seconds)

    def submit(self, round_: Round) -> None:
        """Hand a round over. The one before must have been collected."""
        if self._is_busy:
            raise RuntimeError("a round is under way")
        self._is_busy = True
        self._rounds.put(round_)

    def collect(self, *, wait: bool) -> Outcomes:
        """Outcomes of the round under way; empty when there is none (or, without `wait`,
        when it is not done).

        Raises:
            redis.ResponseError: Redis refused the round for a reason that no repetition heals.
            Exception: whatever else went wrong on the thread.
        """
        if not self._is_busy:
            return {}
        try:
            outcomes = self._outcomes.get(block=wait)
        except queue.Empty:
            return {}
        self._is_busy = False
        if isinstance(outcomes, Exception):
            raise outcomes
        return outcomes

    def _run(self) -> None:
        while (round_ := self._rounds.get()) is not None:
            try:
                self._outcomes.put(self._write(round_))
            except Exception as error:  # the engine must hear of it, or it would wait for ever
                self._outcomes.put(error)
            self.on_done()

    def _write(self, round_: Round) -> Outcomes:
        outcomes: Outcomes = {}
        if round_.commits:
            replies = self._until_answered(lambda: self._ownership.commit(round_.commits))
            jobs = [(item.tail.job, item.tail.epoch) for item in round_.commits]
            outcomes.update(zip(jobs, replies or ["fenced"] * len(jobs), strict=True))
        for item in round_.finishes:
            reply = self._until_answered(partial(self._finish, item))
            outcomes[item.tail.job, item.tail.epoch] = reply or "fenced"
        if round_.frames:
            self._until_answered(lambda: self._send(round_.frames))
        return outcomes

    def _finish(self, item: Finish) -> str:
        return self._ownership.finish(item.tail, item.ending, item.group)

    def _send(self, frames: dict[str, list[Frame]]) -> None:
        send(self._client, frames, self._inbox_frames)

    def _until_answered(self, call: Callable[[], Reply]) -> Reply | None:
        while True:
            self.num_tries += 1
            try:
                return call()
            except redis.RedisError as error:
                if not is_passing(error):
                    raise
                if self._stopped.is_set() or time.monotonic() >= self._give_up_at:
                    return None
                log.warning("commit: %s; trying again", type(error).__name__)
                self._stopped.wait(RETRY_SECONDS)
