"""The draft engine: one thread that drafts for all sessions at once, of many verify workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import redis

from pilotfish_broker.connection import Redis
from pilotfish_broker.inbox import send
from pilotfish_broker.messages import Close, Frame, Sync, Verdict
from pilotfish_workers.draft.session import OPEN_AGAIN_SECONDS, DraftSession
from pilotfish_workers.draft.source import DraftSource
from pilotfish_workers.engine_thread import EngineThread

IDLE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
SILENCE_SECONDS = 5.0  # then the verify worker is asked whether the session still stands
LEAVING = "the draft worker is leaving"

log = logging.getLogger(__name__)


class SessionRefused(Exception):
    """The verify worker refused the session; another draft worker was first, or the job is gone."""


class DraftEngine(EngineThread[DraftSession]):
    """Runs sessions. All public methods may be called from any thread; none of them blocks.

    Args:
        source: where drafted tokens come from.
        client: Redis, for sending frames.
        inbox: key of this worker's inbox, named in every Open.
        inbox_frames: bound of the verify workers' inboxes.
    """

    def __init__(self, source: DraftSource, client: Redis, inbox: str, inbox_frames: int) -> None:
        super().__init__()
        self._source = source
        self._client = client
        self._inbox = inbox
        self._inbox_frames = inbox_frames
        self._sessions: dict[str, DraftSession] = {}
        self._by_handle: dict[int, DraftSession] = {}
        self._outgoing: dict[str, list[Frame]] = {}

    # --- called from other threads -------------------------------------------------------------

    def deliver(self, frames: list[Frame]) -> None:
        """Frames from verify workers."""
        self._events.put(lambda: self._receive(frames))

    def close_where(self, is_over: Callable[[DraftSession], bool], reason: str) -> None:
        """Close the sessions for which `is_over` holds."""
        self._events.put(lambda: self._close_where(is_over, reason))

    def sessions(self) -> Collection[DraftSession]:
        """The sessions as they stand; for looking at only."""
        return list(self._sessions.values())

    # --- the loop ------------------------------------------------------------------------------

    def _idle_seconds(self) -> float:
        return 0.0 if self._wanted() or self._outgoing else IDLE_SECONDS

    def _iterate(self) -> None:
        self._open_again()
        self._draft()
        self._send()

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
        session.open_pause = OPEN_AGAIN_SECONDS
        self._post(session, session.open_frame(self._inbox))

    def _open_again(self) -> None:
        """An Open that nothing answered may have been lost; so may the Close of a session in
        which nothing has come for long."""
        now = time.monotonic()
        for session in self._sessions.values():
            is_silent = session.is_prepared and now - session.last_frame > SILENCE_SECONDS
            pause = session.open_pause if session.is_opened else SILENCE_SECONDS
            if (session.is_opened or is_silent) and now - session.last_open > pause:
                session.last_open = now
                session.open_pause = min(2 * session.open_pause, LONGEST_PAUSE_SECONDS)
                self._post(session, session.open_frame(self._inbox))

    def _post(self, session: DraftSession, frame: Frame) -> None:
        self._outgoing.setdefault(session.verify_inbox, []).append(frame)

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        if not outgoing:
            return
        try:
            send(self._client, outgoing, self._inbox_frames)
        except redis.RedisError as error:
            # lost frames heal: the verify worker decodes plainly and sends a Sync
            log.warning("could not send frames: %s", type(error).__name__)

    # --- events --------------------------------------------------------------------------------

    def _add(self, session: DraftSession) -> None:
        other = self._sessions.get(session.job)
        if other is not None and other.epoch < session.epoch:
            self._part(other, "the job has moved on")
        elif other is not None:
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
        if session.handle is not None and session.handle != frame.session:
            self._by_handle.pop(session.handle, None)  # its verdicts mean another session now
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
        if session is None or session.epoch != frame.epoch:
            return
        if frame.session in (0, session.handle):  # 0 refuses an Open
            self._close(session, frame.reason)

    def _close_where(self, is_over: Callable[[DraftSession], bool], reason: str) -> None:
        for session in [s for s in self._sessions.values() if is_over(s)]:
            self._part(session, reason)

    def _part(self, session: DraftSession, reason: str) -> None:
        """Close a session from here; a verify worker that still counts on it must know."""
        if session.handle is not None:
            self._post(session, Close(session.job, session.epoch, session.handle, reason))
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

    def _leave(self) -> None:
        for session in self.sessions():
            self._part(session, LEAVING)
        self._send()

    def _turned_away(self) -> Exception:
        return SessionRefused(LEAVING)
