"""The verify engine: one thread that owns the target model, the KV pool and all active jobs.

An iteration: read what came in, choose the next pass, run it, apply the accept rule, and hand the
round to the committer, which writes it while the next pass runs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from pilotfish_broker.digest import extend
from pilotfish_broker.errors import Fenced, JobCancelled, JobFailed
from pilotfish_broker.messages import Frame
from pilotfish_broker.ownership import Commit, Ending, Tail
from pilotfish_broker.spec import Status
from pilotfish_workers.model.interface import BAD_LOGITS, Model, Rows
from pilotfish_workers.speculative.accept import Outcome, accept_greedy
from pilotfish_workers.speculative.stops import cut
from pilotfish_workers.verify.committer import Committer, Finish, Outcomes, Round
from pilotfish_workers.verify.drafting import Drafting
from pilotfish_workers.verify.scheduler import Scheduler, Work
from pilotfish_workers.verify.sequence import Sequence

IDLE_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # how long a leaving engine tries to reach Redis

log = logging.getLogger(__name__)


class Drained(Exception):
    """The worker is leaving; the job went back to the queue."""


class VerifyEngine:
    """Runs jobs. All public methods may be called from any thread; none of them blocks.

    Args:
        model: the target.
        committer: writes rounds.
        prefill_tokens: prompt tokens a pass may take.
        on_ended: called (from the engine thread) whenever a slot became free.
    """

    def __init__(
        self,
        model: Model,
        committer: Committer,
        *,
        prefill_tokens: int,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._committer = committer
        self._on_ended = on_ended
        self._scheduler = Scheduler(model.pool, prefill_tokens)
        self._active: dict[str, Sequence] = {}
        self._drafting = Drafting(self._active, model.info.vocab_size)
        self._ending: dict[tuple[str, int], tuple[Sequence, Ending]] = {}
        self._round = Round()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pilotfish-engine", daemon=True)
        self._is_stopping = False
        self._door = threading.Lock()  # nobody comes in once the engine has left
        self._has_left = False
        self._inside: set[Sequence] = set()  # all whose futures are to be resolved
        self.failure: BaseException | None = None
        self.num_iterations = 0

    # --- called from other threads -------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        self._committer.on_done = lambda: self._events.put(lambda: None)  # wakes the loop
        self._committer.start()
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        """Take a claimed job in; its future resolves when it is done here."""
        with self._door:
            if not self._has_left:
                self._inside.add(sequence)
                sequence.future.add_done_callback(lambda _: self._inside.discard(sequence))
                self._events.put(lambda: self._add(sequence))
                return
        sequence.future.set_exception(Drained())

    def deliver(self, frames: list[Frame]) -> None:
        """Frames from draft workers."""
        self._events.put(lambda: self._drafting.receive(frames, self._round))

    def cancel(self, job: str) -> None:
        """End a job as cancelled at the next round boundary."""
        self._events.put(lambda: self._mark_cancelled(job))

    def drop(self, job: str) -> None:
        """Let a job go that somebody else owns now."""
        self._events.put(lambda: self._drop(job, Fenced(f"job {job} has another owner")))

    def draft_workers_alive(self, alive: set[str]) -> None:
        """Close the sessions of draft workers that are not among `alive`."""
        self._events.put(lambda: self._drafting.close_dead(alive, self._round))

    def stop(self) -> None:
        """Stop after the iteration under way; jobs that are not done fail with `Drained`."""
        self._committer.give_up_after(LEAVE_SECONDS)
        self._events.put(self._mark_stopping)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the engine thread to end."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def progress(self) -> int:
        """Changes with every iteration, and with every try to have a round answered by Redis:
        waiting for a lost server is no hang."""
        return self.num_iterations + self._committer.num_tries

    def jobs_without_session(self) -> list[str]:
        """Jobs that want a draft session and have none."""
        return [
            job
            for job, sequence in list(self._active.items())
            if sequence.session is None
            and not sequence.draft_length.is_off
            and sequence.most_drafts > 0
        ]

    # --- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._read_events()
                self._handle(self._committer.collect(wait=False))
                self._drafting.sync_waiting(self._scheduler.running, self._round)
                self._submit()
                work = self._scheduler.schedule(time.monotonic())
                if work:
                    self._iterate(work)
                self.num_iterations += 1
        except BaseException as error:
            self.failure = error
            log.exception("the engine died")
        finally:
            self._leave()

    def _read_events(self) -> None:
        """Run all events that wait; block for the first one while nobody is ready."""
        timeout = self._idle_seconds()
        while True:
            try:
                event = self._events.get(block=timeout > 0, timeout=timeout or None)
            except queue.Empty:
                return
            event()
            timeout = 0

    def _idle_seconds(self) -> float:
        running, now = self._scheduler.running, time.monotonic()
        if self._round or (self._scheduler.waiting and not running):
            return 0.0
        ends = [sequence.await_until for sequence in running if not sequence.is_ready(now)]
        if len(ends) < len(running):
            return 0.0
        return max(0.0, min((e - now for e in ends if e is not None), default=IDLE_SECONDS))

    def _iterate(self, work: list[Work]) -> None:
        rows = [_rows(item) for item in work]
        targets = self._model.greedy(rows)
        self._handle(self._committer.collect(wait=True))
        for item, target in zip(work, targets, strict=True):
            if self._active.get(item.sequence.job) is item.sequence:
                self._settle(item, target)
        self._submit()

    def _submit(self) -> None:
        if self._round:
            self._handle(self._committer.collect(wait=True))
            self._committer.submit(self._round)
            self._round = Round()

    # --- one sequence's round ------------------------------------------------------------------

    def _settle(self, work: Work, targets: list[int]) -> None:
        sequence = work.sequence
        sequence.num_computed += work.num_tokens
        if not work.is_decoding:
            return
        self._commit(sequence, work.drafted, accept_greedy(work.drafted, targets))

    def _commit(self, sequence: Sequence, drafted: list[int], outcome: Outcome) -> None:
        base = sequence.committed
        tokens, reason = cut(outcome.tokens(drafted), sequence.stop_ids, sequence.remaining)
        if BAD_LOGITS in tokens:  # behind a rejected draft or a stop token they harm nobody
            self._fail(sequence, "the target's logits hold NaN or infinity for this job")
            return
        # drafts behind a stop token were never judged: they count as neither drafted nor accepted
        num_drafted = min(len(drafted), len(tokens)) if reason == "stop" else len(drafted)
        num_accepted = min(outcome.num_accepted, num_drafted)
        sequence.tokens += tokens
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.digest = extend(sequence.digest, tokens)
        sequence.drafted = []
        sequence.await_until = None
        sequence.draft_length.learn(len(drafted), outcome.num_accepted)
        text = sequence.detokenizer.push(_visible(tokens, sequence.stop_ids, reason))
        if reason is not None:
            text += sequence.detokenizer.flush()
        tail = Tail(sequence.job, sequence.epoch, base, tokens, text, num_drafted, num_accepted)
        sequence.rounds += 1
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        if reason is not None:
            self._finish(sequence, tail, Ending(Status.SUCCEEDED, reason))
            return
        self._scheduler.trim(sequence)
        frame = self._drafting.next_frame(sequence, base, len(drafted), outcome, self._round)
        sequence.in_flight = True
        inbox = sequence.session.inbox if sequence.session is not None else ""
        self._round.commits.append(Commit(tail, frame, inbox))

    def _fail(self, sequence: Sequence, message: str) -> None:
        tail = Tail(sequence.job, sequence.epoch, sequence.committed, [])
        self._finish(sequence, tail, Ending(Status.FAILED, "error", message))

    def _finish(self, sequence: Sequence, tail: Tail, ending: Ending) -> None:
        self._ending[sequence.job, sequence.epoch] = (sequence, ending)
        self._round.finishes.append(Finish(tail, ending, sequence.spec.group))
        self._let_go(sequence, f"the job ended: {ending.status}")

    def _let_go(self, sequence: Sequence, reason: str) -> None:
        self._drafting.close(sequence, reason, self._round)
        self._scheduler.remove(sequence)
        if self._active.get(sequence.job) is sequence:
            del self._active[sequence.job]

    # --- outcomes and events -------------------------------------------------------------------

    def _handle(self, outcomes: Outcomes) -> None:
        for (job, epoch), outcome in outcomes.items():
            if (job, epoch) in self._ending:
                self._resolve(*self._ending.pop((job, epoch)), outcome)
            elif (sequence := self._active.get(job)) is not None and sequence.epoch == epoch:
                sequence.in_flight = False
                if outcome == "fenced":
                    self._drop(job, Fenced(f"job {job} has another owner"))
                elif outcome == "cancel" or sequence.is_cancelled:
                    self._cancel(sequence)

    def _resolve(self, sequence: Sequence, ending: Ending, outcome: str) -> None:
        future = sequence.future
        if outcome == "fenced":
            future.set_exception(Fenced(f"job {sequence.job} has another owner"))
        elif ending.status is Status.SUCCEEDED:
            future.set_result(_summary(sequence, ending))
        elif ending.status is Status.CANCELLED:
            future.set_exception(JobCancelled(sequence.job, "the job was cancelled"))
        else:
            future.set_exception(JobFailed(sequence.job, ending.error))
        self._on_ended()

    def _add(self, sequence: Sequence) -> None:
        most = sequence.num_prompt + sequence.limit
        self._drop(sequence.job, Fenced(f"job {sequence.job} was claimed again"))
        self._active[sequence.job] = sequence
        if not self._scheduler.can_ever_fit(most):
            pool = self._model.pool
            self._fail(
                sequence,
                f"prompt and max_tokens need {most} tokens of KV-cache, the worker's pool holds "
                f"{pool.num_blocks * pool.block_size}: lower max_tokens or raise --kv-tokens",
            )
            return
        self._scheduler.add(sequence)

    def _mark_cancelled(self, job: str) -> None:
        sequence = self._active.get(job)
        if sequence is None:
            return
        sequence.is_cancelled = True
        if not sequence.in_flight:
            self._cancel(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        tail = Tail(sequence.job, sequence.epoch, sequence.committed, [])
        self._finish(sequence, tail, Ending(Status.CANCELLED, "cancelled"))

    def _drop(self, job: str, error: Exception) -> None:
        sequence = self._active.get(job)
        if sequence is not None:
            self._let_go(sequence, "the job has another owner")
            sequence.future.set_exception(error)
            self._on_ended()

    # --- leaving -------------------------------------------------------------------------------

    def _mark_stopping(self) -> None:
        self._is_stopping = True

    def _leave(self) -> None:
        try:
            if self.failure is None:
                self._hand_back()
        except Exception as error:
            self.failure = error
            log.exception("the engine died while it left")
        finally:
            with self._door:
                self._has_left = True
            self._committer.stop()
            for sequence in list(self._inside):
                sequence.future.set_exception(Drained())

    def _hand_back(self) -> None:
        """Let all jobs go in good order, those included that are only now coming in."""
        self._handle(self._committer.collect(wait=True))
        for sequence in list(self._active.values()):
            self._let_go(sequence, "the verify worker is leaving")
        self._submit()
        self._handle(self._committer.collect(wait=True))


def _rows(work: Work) -> Rows:
    sequence, start = work.sequence, work.sequence.num_computed
    tokens = sequence.tokens[start : start + work.num_tokens] + work.drafted
    num_logits = 1 + len(work.drafted) if work.is_decoding else 0
    return Rows(tokens=tokens, start=start, blocks=sequence.blocks, num_logits=num_logits)


def _visible(tokens: list[int], stop_ids: frozenset[int], reason: str | None) -> list[int]:
    """The tokens that become text: all but the one that stopped the output."""
    return tokens[:-1] if reason == "stop" and tokens[-1] in stop_ids else tokens


def _summary(sequence: Sequence, ending: Ending) -> dict[str, Any]:
    return {
        "finish_reason": ending.reason,
        "tokens": sequence.committed,
        "rounds": sequence.rounds,
        "drafted": sequence.num_drafted,
        "accepted": sequence.num_accepted,
    }
