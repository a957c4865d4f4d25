"""The draft engine: one thread that drafts for all sessions at once, of many verify workers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection

import redis

from pilotfish_broker.connection import Redis
from pilotfish_broker.inbox import send
from pilotfish_broker.messages import Close, Frame, Sync, Verdict
from pilotfish_workers.draft.session import DraftSession
from pilotfish_workers.draft.source import DraftSource

IDLE_SECONDS = 0.5
OPEN_AGAIN_SECONDS = 1.0

log = logging.getLogger(__name__)


class SessionRefused(Exception):
    """The verify worker refused the session; another draft worker was first, or the job is gone."""


class DraftEngine:
    """Runs sessions. All public methods may be called from any thread; none of them blocks.

    Args:
        source: where drafted tokens come from.
        client: Redis, for sending frames.
        inbox: key of this worker's inbox, named in every Open.
        inbox_frames: bound of the verify workers' inboxes.
    """

    def __init__(self, source: DraftSource, client: Redis, inbox: str, inbox_frames: int) -> None:
        self._source = source
        self._client = client
        self._inbox = inbox
        self._inbox_frames = inbox_frames
        self._sessions: dict[str, DraftSession] = {}
        self._by_handle: dict[int, DraftSession] = {}
        self._outgoing: dict[str, list[Frame]] = {}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pilotfish-engine", daemon=True)
        self._is_stopping = False
        self.failure: BaseException | None = None
        self.num_iterations = 0

    # --- called from other threads -------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def add(self, session: DraftSession) -> None:
        """Take a session in; its future resolves when it is closed."""
        self._events.put(lambda: self._add(session))

    def deliver(self, frames: list[Frame]) -> None:
        """Frames from verify workers."""
        self._events.put(lambda: self._receive(frames))

    def close_where(self, is_over: Callable[[DraftSession], bool], reason: str) -> None:
        """Close the sessions for which `is_over` holds, without a word to the verify worker."""
        self._events.put(lambda: self._close_where(is_over, reason))

    def stop(self) -> None:
        """Close all sessions and end after the iteration under way."""
        self._events.put(self._mark_stopping)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the engine thread to end."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    def sessions(self) -> Collection[DraftSession]:
        """The sessions as they stand; for looking at only."""
        return list(self._sessions.values())

    # --- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._read_events()
                self._open_again()
                self._draft()
                self._send()
                self.num_iterations += 1
            self._leave()
        except BaseException as error:
            self.failure = error
            log.exception("the engine died")

    def _read_events(self) -> None:
        """Run all events that wait; block for the first while there is nothing to draft."""
        timeout = 0.0 if self._wanted() or self._outgoing else IDLE_SECONDS
        while True:
            try:
                event = self._events.get(block=timeout > 0, timeout=timeout or None)
            except queue.Empty:
                return
            event()
            timeout = 0.0

    def _wanted(self) -> list[DraftSession]:
        return [s for s in self._sessions.values() if s.k > 0 or not s.is_prepared]

    def _draft(self) -> None:
        wanted = self._wanted()
        if not wanted:
            return
        drafts = [session.draft for session in wanted]
        answers = self._source.propose(drafts, [session.k for session in wanted])
        for session, drafted in zip(wanted, answers, strict=True):
            if drafted is None:
                continue
            if not session.is_prepared:
                session.is_prepared = True
                self._open(session)
            elif session.k > 0:
                self._post(session, session.propose(drafted))

    def _open(self, session: DraftSession) -> None:
        session.is_opened, session.last_open = True, time.monotonic()
        self._post(session, session.open_frame(self._inbox))

    def _open_again(self) -> None:
        """An Open that nothing answered may have been lost."""
        due = time.monotonic() - OPEN_AGAIN_SECONDS
        for session in self._sessions.values():
            if session.is_opened and session.last_open < due:
                self._open(session)

    def _post(self, session: DraftSession, frame: Frame) -> None:
        self._outgoing.setdefault(session.verify_inbox, []).append(frame)

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        if not outgoing:
            return
        try:
            send(self._client, outgoing, self._inbox_frames)
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
            # lost frames heal: the verify worker decodes plainly and sends a Sync
            log.warning("could not send frames: %s", type(error).__name__)

    # --- events --------------------------------------------------------------------------------

    def _add(self, session: DraftSession) -> None:
        if session.job in self._sessions:
            session.future.set_exception(SessionRefused("this worker drafts for the job already"))
            return
        session.last_frame = time.monotonic()
        self._sessions[session.job] = session

    def _receive(self, frames: list[Frame]) -> None:
        for frame in frames:
            match frame:
                case Sync():
                    self._on_sync(frame)
                case Verdict():
                    self._on_verdict(frame)
                case Close():
                    self._on_close(frame)
                case _:
                    log.warning("dropped a %s: it goes the other way", type(frame).__name__)

    def _on_sync(self, frame: Sync) -> None:
        session = self._sessions.get(frame.job)
        if session is None or session.epoch != frame.epoch:
            return
        session.last_frame = time.monotonic()
        self._by_handle[frame.session] = session
        self._learn(session, session.on_sync(frame))

    def _on_verdict(self, frame: Verdict) -> None:
        session = self._by_handle.get(frame.session)
        if session is not None:
            session.last_frame = time.monotonic()
            self._learn(session, session.on_verdict(frame))

    def _learn(self, session: DraftSession, num_valid: int | None) -> None:
        if num_valid is not None:
            self._source.learn(session.draft, num_valid)
        elif not session.is_opened:
            self._open(session)  # out of step: ask for the tokens from where we stand

    def _on_close(self, frame: Close) -> None:
        session = self._sessions.get(frame.job)
        if session is not None and session.epoch == frame.epoch:
            self._close(session, frame.reason)

    def _close_where(self, is_over: Callable[[DraftSession], bool], reason: str) -> None:
        for session in [s for s in self._sessions.values() if is_over(s)]:
            self._close(session, reason)

    def _close(self, session: DraftSession, reason: str) -> None:
        self._sessions.pop(session.job, None)
        if session.handle is not None:
            self._by_handle.pop(session.handle, None)
        self._source.learn(session.draft, None)
        if session.rounds == 0 and session.handle is None:
            session.future.set_exception(SessionRefused(reason))
        else:
            session.future.set_result(session.summary(reason))

    # --- leaving -------------------------------------------------------------------------------

    def _mark_stopping(self) -> None:
        self._is_stopping = True

    def _leave(self) -> None:
        reason = "the draft worker is leaving"
        for session in self.sessions():
            if session.handle is not None:
                frame = Close(session.job, session.epoch, session.handle, reason)
                self._post(session, frame)
            self._close(session, reason)
        self._send()
