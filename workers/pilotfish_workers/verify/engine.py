"""The verify engine: one thread that owns the target model, the KV pool and all active jobs.

An iteration: read what came in, choose the next pass, run it, apply the accept rule, and hand the
round to the committer, which writes it while the next pass runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pilotfish_broker.errors import Fenced, JobCancelled, JobFailed
from pilotfish_broker.messages import Frame
from pilotfish_broker.ownership import Commit, Ending, Tail
from pilotfish_broker.spec import Status
from pilotfish_workers.engine_thread import EngineThread
from pilotfish_workers.model.interface import Model
from pilotfish_workers.speculative.accept import BAD_LOGITS, Outcome
from pilotfish_workers.verify.committer import Committer, Finish, Outcomes, Round
from pilotfish_workers.verify.drafting import Drafting
from pilotfish_workers.verify.scheduler import Scheduler, Work
from pilotfish_workers.verify.sequence import Sequence
from pilotfish_workers.verify.settling import (
    UNUSABLE,
    NoToken,
    case_of,
    keep_scores,
    nothing,
    rows_of,
    settle,
    summary,
)

IDLE_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # a round that Redis does not answer holds a leaving engine up no longer


class Drained(Exception):
    """The worker is leaving; the job went back to the queue."""


class EngineDied(Exception):
    """The engine failed. Its jobs stay this worker's until its lease ends, which counts as an
    attempt of each: one of them may be what killed it."""


class VerifyEngine(EngineThread[Sequence]):
    """Runs jobs. All public methods may be called from any thread; none of them blocks.

    Args:
        model: the target.
        committer: writes rounds.
        inbox_prefix: what the keys of all inboxes begin with.
        prefill_tokens: prompt tokens a pass may take.
        on_ended: called (from the engine thread) whenever a slot became free.
    """

    def __init__(
        self,
        model: Model,
        committer: Committer,
        *,
        inbox_prefix: str,
        prefill_tokens: int,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._model = model
        self._committer = committer
        self._on_ended = on_ended
        self._scheduler = Scheduler(model.pool, prefill_tokens)
        self._active: dict[str, Sequence] = {}
        self._drafting = Drafting(self._active, model.info.vocab_size, inbox_prefix)
        self._ending: dict[tuple[str, int], tuple[Sequence, Ending]] = {}
        self._round = Round()

    # --- called from other threads -------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's and the committer's thread."""
        self._committer.on_done = lambda: self._events.put(lambda: None)  # wakes the loop
        self._committer.start()
        super().start()

    def stop(self) -> None:
        """Stop after the iteration under way; jobs that are not done fail with `Drained`."""
        self._committer.give_up_after(LEAVE_SECONDS)
        super().stop()

    def deliver(self, frames: list[Frame]) -> None:
        """Frames from draft workers."""
        self._events.put(lambda: self._drafting.receive(frames, self._round))

    def cancel(self, job: str, epoch: int) -> None:
        """End a job as cancelled at the next round boundary."""
        self._events.put(lambda: self._mark_cancelled(job, epoch))

    def drop(self, job: str, epoch: int) -> None:
        """Let a job go that somebody else owns now."""
        self._events.put(lambda: self._drop(job, epoch))

    def draft_workers_alive(self, alive: set[str]) -> None:
        """Close the sessions of draft workers that are not among `alive`."""
        self._events.put(lambda: self._drafting.close_dead(alive, self._round))

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

    def _idle_seconds(self) -> float:
        running, now = self._scheduler.running, time.monotonic()
        if self._round or (self._scheduler.waiting and not running):
            return 0.0
        ends = [sequence.await_until for sequence in running if not sequence.is_ready(now)]
        if len(ends) < len(running):
            return 0.0
        return max(0.0, min((e - now for e in ends if e is not None), default=IDLE_SECONDS))

    def _iterate(self) -> None:
        self._handle(self._committer.collect(wait=False))
        self._drafting.sync_waiting(self._scheduler.running, self._round)
        self._submit()
        work = self._scheduler.schedule(time.monotonic())
        if not work:
            return
        vocab_size = self._model.info.vocab_size
        rows = [rows_of(item, vocab_size) for item in work]
        outcomes = self._model.verify(rows, [case_of(item) for item in work])
        self._handle(self._committer.collect(wait=True))
        for item, outcome in zip(work, outcomes, strict=True):
            if self._active.get(item.sequence.job) is item.sequence:
                self._settle(item, outcome)
        self._submit()

    def _submit(self) -> None:
        if self._round:
            self._handle(self._committer.collect(wait=True))
            self._committer.submit(self._round)
            self._round = Round()

    def _settle(self, work: Work, outcome: Outcome | None) -> None:
        sequence = work.sequence
        if outcome is not None and outcome.scored:
            keep_scores(sequence, outcome.scored)
        sequence.num_computed += work.num_tokens
        self._scheduler.computed(sequence)
        if not work.is_decoding or outcome is None:
            if outcome is not None and outcome.token == BAD_LOGITS:
                self._fail(sequence, UNUSABLE)  # what was scored is no number
            return
        base = sequence.committed
        try:
            tail, reason = settle(sequence, work.drafted, outcome)
        except NoToken as error:
            self._fail(sequence, str(error))
            return
        if reason is not None:
            self._finish(sequence, tail, Ending(Status.SUCCEEDED, reason))
            return
        self._scheduler.trim(sequence)
        frame = self._drafting.next_frame(sequence, base, len(work.drafted), outcome, self._round)
        sequence.in_flight = True
        inbox = sequence.session.inbox if sequence.session is not None else ""
        self._round.commits.append(Commit(tail, frame, inbox))

    # --- how a job ends here -------------------------------------------------------------------

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._finish(sequence, nothing(sequence), Ending(Status.FAILED, "error", message))

    def _cancel(self, sequence: Sequence) -> None:
        self._finish(sequence, nothing(sequence), Ending(Status.CANCELLED, "cancelled"))

    def _finish(self, sequence: Sequence, tail: Tail, ending: Ending) -> None:
        self._ending[sequence.job, sequence.epoch] = (sequence, ending)
        self._round.finishes.append(Finish(tail, ending, sequence.spec.group))
        self._let_go(sequence, f"the job ended: {ending.status}")

    def _let_go(self, sequence: Sequence, reason: str) -> None:
        self._drafting.close(sequence, reason, self._round)
        self._scheduler.remove(sequence)
        if self._active.get(sequence.job) is sequence:
            del self._active[sequence.job]

    def _handle(self, outcomes: Outcomes) -> None:
        for (job, epoch), outcome in outcomes.items():
            if (job, epoch) in self._ending:
                self._resolve(*self._ending.pop((job, epoch)), outcome)
            elif (sequence := self._find(job, epoch)) is not None:
                sequence.in_flight = False
                if outcome == "fenced":
                    self._drop(job, epoch)
                elif outcome == "cancel" or sequence.is_cancelled:
                    self._cancel(sequence)

    def _resolve(self, sequence: Sequence, ending: Ending, outcome: str) -> None:
        future = sequence.future
        if outcome == "fenced":
            future.set_exception(Fenced(f"job {sequence.job} has another owner"))
        elif ending.status is Status.SUCCEEDED:
            future.set_result(summary(sequence, ending))
        elif ending.status is Status.CANCELLED:
            future.set_exception(JobCancelled(sequence.job, "the job was cancelled"))
        else:
            future.set_exception(JobFailed(sequence.job, ending.error))
        self._on_ended()

    # --- events --------------------------------------------------------------------------------

    def _find(self, job: str, epoch: int) -> Sequence | None:
        sequence = self._active.get(job)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def _add(self, sequence: Sequence) -> None:
        most = sequence.num_prompt + sequence.limit
        if (older := self._active.get(sequence.job)) is not None:
            self._drop(older.job, older.epoch)
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

    def _mark_cancelled(self, job: str, epoch: int) -> None:
        sequence = self._find(job, epoch)
        if sequence is None:
            return
        sequence.is_cancelled = True
        if not sequence.in_flight:
            self._cancel(sequence)

    def _drop(self, job: str, epoch: int) -> None:
        sequence = self._find(job, epoch)
        if sequence is not None:
            self._let_go(sequence, "the job has another owner")
            sequence.future.set_exception(Fenced(f"job {job} has another owner"))
            self._on_ended()

    # --- leaving -------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._handle(self._committer.collect(wait=True))
        for sequence in list(self._active.values()):
            self._let_go(sequence, "the verify worker is leaving")
        self._submit()
        self._handle(self._committer.collect(wait=True))

    def _turned_away(self) -> Exception:
        return Drained() if self.failure is None else EngineDied()

    def _shut(self) -> None:
        self._committer.stop()
