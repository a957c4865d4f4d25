"""The verify worker: claims jobs, prepares them, and hands them to the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from celery import Celery

from pilotfish_broker.connection import connect
from pilotfish_broker.digest import extend
from pilotfish_broker.errors import Fenced, InvalidRequest, JobFailed
from pilotfish_broker.leases import live_workers
from pilotfish_broker.messages import Frame
from pilotfish_broker.models import ModelRecord, write_model
from pilotfish_broker.ownership import Ending, Ownership, Tail
from pilotfish_broker.records import JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import Status
from pilotfish_checkpoint.progress import Progress, ProgressDamaged, read_progress
from pilotfish_workers.loading import load
from pilotfish_workers.model.errors import TextError
from pilotfish_workers.verify.committer import Committer
from pilotfish_workers.verify.draft_length import DraftLength
from pilotfish_workers.verify.draft_requests import DraftRequests
from pilotfish_workers.verify.engine import Drained, VerifyEngine
from pilotfish_workers.verify.sequence import Sequence
from pilotfish_workers.worker import Every, Worker, require_target

LOOK_FOR_DRAFTERS_SECONDS = 0.5

log = logging.getLogger(__name__)


class NotMine(Exception):
    """This worker does not (or no longer) run the job; whoever does reports on it."""


class VerifyWorker(Worker):
    """Runs the target model for the jobs it owns."""

    kind = "verify"

    def __init__(self, settings: Settings, app: Celery) -> None:
        super().__init__(settings, app)
        self._held: dict[str, int] = {}
        self._text_lock = threading.Lock()  # fast tokenizers refuse to be used by two threads
        self._drafters: set[str] = set()
        self._look = Every(LOOK_FOR_DRAFTERS_SECONDS)

    def open(self) -> dict[str, str | int]:
        settings, name = self.settings, self.model_name
        self._model, self._text = load(require_target(settings), settings)
        info = self._model.info
        record = ModelRecord(
            name=name,
            context_length=info.context_length,
            vocabulary_size=info.vocab_size,
            tokenizer=self._text.fingerprint(),
            fingerprint=info.fingerprint,
            family=info.family,
        )
        write_model(self.client, self.keys, record, self._text.vocabulary())
        self._records = JobRecords(self.client, self.keys, settings.result_ttl_seconds)
        self._ownership = Ownership(
            self.client,
            self.keys,
            self.identity,
            name,
            result_ttl_seconds=settings.result_ttl_seconds,
            inbox_frames=settings.inbox_frames,
        )
        self._requests = DraftRequests(self.app, connect(settings.broker_url), self.keys, name)
        committer = Committer(connect(settings.redis_url), self._ownership, settings.inbox_frames)
        self._engine = VerifyEngine(
            self._model,
            committer,
            prefill_tokens=settings.prefill_tokens,
            on_ended=self.wake,
        )
        return {
            "target": info.path,
            "dtype": info.dtype,
            "device": info.device,
            "kv_tokens": self._model.pool.num_blocks * self._model.pool.block_size,
        }

    # --- one job, on a slot's thread -----------------------------------------------------------

    def run(self, job: str) -> dict[str, Any]:
        """Claim a job and see it through; returns its summary.

        Raises:
            NotMine: nothing to report from here: somebody else's, drained, or fenced.
            JobCancelled, JobFailed: so it ended.
        """
        if self.is_draining.is_set():
            raise NotMine("draining")
        outcome, epoch = self._ownership.claim(job)
        if outcome != "claimed":
            raise NotMine(outcome)
        self._held[job] = epoch
        try:
            sequence = self._prepare(job, epoch)
            self._engine.add(sequence)
            self.wake()  # its draft session is asked for at once
            return sequence.future.result()
        except Drained:
            self._ownership.release(job, epoch)
            raise NotMine("drained") from None
        except Fenced:
            raise NotMine("fenced") from None
        finally:
            if self._held.get(job) == epoch:  # else it is claimed here once more, in a later epoch
                del self._held[job]

    def _prepare(self, job: str, epoch: int) -> Sequence:
        try:
            progress = read_progress(self.client, self.keys, self._records, job)
            prompt = progress.record.prompt_ids or self._encode(progress)
            self._check_prompt(prompt)
        except (InvalidRequest, TextError, ProgressDamaged) as error:
            record = self._records.get(job)  # what it says is committed, however damaged that is
            ending = Ending(Status.FAILED, "error", str(error))
            tail = Tail(job, epoch, record.committed, [])
            self._ownership.finish(tail, ending, record.spec.group)
            self.wake()
            raise JobFailed(job, str(error)) from None
        if not self._ownership.admit(job, epoch, prompt):
            raise Fenced(f"job {job} has another owner")
        return self._sequence(job, epoch, progress, prompt)

    def _encode(self, progress: Progress) -> list[int]:
        prompt = progress.record.spec.prompt
        with self._text_lock:
            if isinstance(prompt, str):
                return self._text.encode(prompt)
            if prompt and isinstance(prompt[0], dict):
                return self._text.chat(prompt)
        return prompt  # type: ignore[return-value]

    def _check_prompt(self, prompt: list[int]) -> None:
        info = self._model.info
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        if len(prompt) >= info.context_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; the model's context of "
                f"{info.context_length} leaves no room for output",
                field="prompt",
            )
        if max(prompt) >= info.vocab_size:
            raise InvalidRequest(
                f"token id {max(prompt)} is not below the vocabulary size {info.vocab_size}",
                field="prompt",
            )

    def _sequence(self, job: str, epoch: int, progress: Progress, prompt: list[int]) -> Sequence:
        spec, info = progress.record.spec, self._model.info
        params = spec.params
        tokens = prompt + progress.output
        detokenizer = self._text.detokenizer()
        detokenizer.push(progress.output)  # its text is out already
        own = () if params.ignore_eos else info.eos_ids
        speculation = params.speculation
        return Sequence(
            job=job,
            epoch=epoch,
            spec=spec,
            tokens=tokens,
            num_prompt=len(prompt),
            limit=min(params.max_tokens, info.context_length - len(prompt)),
            stop_ids=frozenset((*own, *params.stop_token_ids)),
            detokenizer=detokenizer,
            digest=extend(0, tokens),
            draft_length=DraftLength(
                self.settings.speculation if speculation == "auto" else speculation
            ),
        )

    # --- engine and housekeeping ---------------------------------------------------------------

    def start_engine(self) -> None:
        self._engine.start()

    def stop_engine(self) -> None:
        self._engine.stop()

    def join_engine(self, timeout: float) -> None:
        self._engine.join(timeout)

    @property
    def is_engine_alive(self) -> bool:
        return self._engine.is_alive

    @property
    def engine_progress(self) -> int:
        return self._engine.progress

    def deliver(self, frames: list[Frame]) -> None:
        self._engine.deliver(frames)

    def held(self) -> Mapping[str, int]:
        return dict(self._held)

    def on_renewal(self, outcomes: Mapping[str, str]) -> None:
        for job, outcome in outcomes.items():
            if outcome == "cancel":
                self._engine.cancel(job)
            elif outcome == "fenced":
                self._engine.drop(job)

    def on_lost(self) -> None:
        for job in self.held():
            self._engine.drop(job)

    def tick(self) -> None:
        if self._look.is_due():
            self._drafters = live_workers(self.client, self.keys, "draft", self.model_name)
            self._engine.draft_workers_alive(self._drafters)
        if self._drafters and not self.is_draining.is_set():
            self._requests.ask(self._engine.jobs_without_session())
