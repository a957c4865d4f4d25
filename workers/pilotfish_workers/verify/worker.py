"""The verify worker: claims jobs, prepares them, and hands them to the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import redis
from celery import Celery

from pilotfish_broker.connection import connect, is_passing
from pilotfish_broker.digest import extend
from pilotfish_broker.errors import (
    ConfigError,
    Fenced,
    InvalidRequest,
    JobFailed,
    PilotfishError,
)
from pilotfish_broker.inbox import InboxReader
from pilotfish_broker.leases import live_workers
from pilotfish_broker.models import (
    ModelRecord,
    check_params,
    check_prompt_logprobs,
    check_token_ids,
    write_model,
)
from pilotfish_broker.ownership import Ending, Ownership, Tail
from pilotfish_broker.records import JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import Prompt, Status
from pilotfish_checkpoint.progress import ProgressDamaged, read_progress
from pilotfish_workers import simulated
from pilotfish_workers.loading import load
from pilotfish_workers.loop import Every
from pilotfish_workers.sampling import build_sampler, refuse_sampling
from pilotfish_workers.verify.committer import Committer
from pilotfish_workers.verify.draft_length import DraftLength
from pilotfish_workers.verify.draft_requests import DraftRequests
from pilotfish_workers.verify.engine import Drained, EngineDied, VerifyEngine
from pilotfish_workers.verify.output_text import OutputText
from pilotfish_workers.verify.sequence import Sequence
from pilotfish_workers.worker import Worker, require_target

LOOK_FOR_DRAFTERS_SECONDS = 0.5
RETRY_SECONDS = 0.2

Reply = TypeVar("Reply")
log = logging.getLogger(__name__)


class NotMine(Exception):
    """This worker does not (or no longer) run the job; whoever does reports on it."""


class VerifyWorker(Worker):
    """Runs the target model for the jobs it owns."""

    kind = "verify"

    def __init__(self, settings: Settings, app: Celery) -> None:
        super().__init__(settings, app)
        self._door = threading.Lock()
        self._here: set[str] = set()  # jobs that a slot's thread is busy with
        self._held: dict[str, int] = {}
        self._drafters: set[str] = set()
        self._look = Every(LOOK_FOR_DRAFTERS_SECONDS)

    def open(self) -> dict[str, str | int]:
        settings, name = self.settings, self.model_name
        self._model, self._text = load(require_target(settings), settings)
        info = self._model.info
        self._refuse_another_model()
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
            inbox_prefix=self.keys.inbox(""),
            prefill_tokens=settings.prefill_tokens,
            on_ended=self.slot_freed,
        )
        return {
            "target": info.path,
            "fingerprint": info.fingerprint,
            "dtype": info.dtype,
            "device": info.device,
            "kv_tokens": self._model.pool.num_blocks * self._model.pool.block_size,
        }

    def _refuse_another_model(self) -> None:
        """Two models under one name would write one output between them."""
        alive = live_workers(self.client, self.keys, "verify", self.model_name)
        for worker in alive:
            theirs = self.client.hget(self.keys.worker(worker), "fingerprint")
            if theirs is not None and theirs.decode() != self._model.info.fingerprint:
                raise ConfigError(
                    f"{worker} serves another model or dtype under the name {self.model_name}; "
                    "choose another name (--model), or end the others first"
                )

    # --- one job, on a slot's thread -----------------------------------------------------------

    def run(self, job: str) -> dict[str, Any]:
        """Claim a job and see it through; returns its summary.

        Raises:
            NotMine: nothing to report from here: somebody else's, drained, or fenced.
            JobCancelled, JobFailed: so it ended.
        """
        with self._door:
            if self.is_draining or job in self._here:
                raise NotMine("draining or here already")
            self._here.add(job)
        try:
            return self._run(job)
        except Fenced:
            raise NotMine("fenced") from None
        finally:
            with self._door:
                self._here.discard(job)

    def _run(self, job: str) -> dict[str, Any]:
        try:
            outcome, epoch = self._patiently(lambda: self._ownership.claim(job))
        except redis.RedisError as error:
            log.error("job %s cannot be claimed: %s", job, error)
            raise NotMine("Redis refuses the claim") from None
        # "yours" is the answer to a claim that was made before and whose answer was lost
        if outcome not in ("claimed", "yours"):
            raise NotMine(outcome)
        self._held[job] = epoch
        try:
            sequence = self._prepare(job, epoch)
            self._engine.add(sequence)
            self._chores.wake()  # its draft session is asked for at once
            return sequence.future.result()
        except Drained:
            self._release(job, epoch)
            raise NotMine("drained") from None
        except EngineDied:
            raise NotMine("the engine died") from None
        finally:
            del self._held[job]

    def _patiently(self, call: Callable[[], Reply]) -> Reply:
        """Make a call that is safe to repeat until Redis answers it."""
        while True:
            try:
                return call()
            except redis.RedisError as error:
                if not is_passing(error):
                    raise
                if self.is_draining:
                    raise NotMine("Redis does not answer") from error
                log.warning("claiming a job: %s; trying again", type(error).__name__)
                time.sleep(RETRY_SECONDS)

    def _release(self, job: str, epoch: int) -> None:
        try:
            self._ownership.release(job, epoch)
        except redis.RedisError:
            log.warning("job %s could not be given back; its lease will end", job)

    def _prepare(self, job: str, epoch: int) -> Sequence:
        """Read a claimed job; whatever is wrong with it fails this job alone."""
        try:
            return self._patiently(lambda: self._sequence(job, epoch))
        except (NotMine, Fenced, Drained):
            raise
        except PilotfishError as error:
            message = str(error)
        except Exception as error:
            log.exception("job %s cannot be prepared", job)
            message = f"the job cannot be prepared: {type(error).__name__}: {error}"
        try:
            self._patiently(lambda: self._fail(job, epoch, message))
        except redis.RedisError as error:
            log.error("job %s cannot be failed (%s): %s", job, message, error)
            raise NotMine("Redis refuses to end the job") from None
        self.slot_freed()
        raise JobFailed(job, message)

    def _fail(self, job: str, epoch: int, message: str) -> None:
        # not through JobRecord: what is wrong may be the record itself
        committed, group = self.client.hmget(self.keys.job(job), "committed", "group")
        tail = Tail(job, epoch, int(committed or 0), [])
        ending = Ending(Status.FAILED, "error", message)
        outcome = self._ownership.finish(tail, ending, (group or b"").decode())
        if outcome == "fenced":
            raise Fenced(f"job {job} has another owner")

    def _sequence(self, job: str, epoch: int) -> Sequence:
        progress = read_progress(self.client, self.keys, self._records, job)
        record, info = progress.record, self._model.info
        prompt = record.prompt_ids if record.fingerprint == info.fingerprint else None
        if prompt is None:
            prompt = self._encode(record.spec.prompt)
        check_token_ids(prompt, context_length=info.context_length, vocabulary_size=info.vocab_size)
        check_params(record.spec.params, info.vocab_size)
        check_prompt_logprobs(record.spec.params, len(prompt))
        if info.path.startswith(simulated.PREFIX):
            refuse_sampling(record.spec.params)
        match self._ownership.admit(job, epoch, prompt, info.fingerprint):
            case "fenced":
                raise Fenced(f"job {job} has another owner")
            case "other_model":
                raise InvalidRequest(
                    f"the job was begun by another model or dtype under the name "
                    f"{self.model_name}; submit it again"
                )
        params, tokens = record.spec.params, prompt + progress.output
        limit = min(params.max_tokens, info.context_length - len(prompt))
        if len(progress.output) >= limit or max(progress.output, default=0) >= info.vocab_size:
            # the engine would meet it in a pass, among other jobs
            raise ProgressDamaged(
                job, "the token stream holds what this job cannot have written; submit it again"
            )
        sampler = build_sampler(
            params,
            job=job,
            sample=record.spec.sample,
            tokens=tokens,
            num_prompt=len(prompt),
            eos_ids=info.eos_ids,
            vocab_size=info.vocab_size,
            words=self._text,
        )
        sampler.masks(())  # a grammar follows resumed output here, where it fails this job alone
        output = OutputText(
            self._text.detokenizer(),
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prefix=self._prompt_text(record.spec.prompt, prompt) if params.echo else "",
        )
        output.resume(progress.output)  # what of its text can be seen is out already
        chosen = params.speculation
        return Sequence(
            job=job,
            epoch=epoch,
            spec=record.spec,
            sampler=sampler,
            output=output,
            token_bytes=self._text.token_bytes,
            limit=limit,
            digest=extend(0, tokens),
            draft_length=DraftLength(self.settings.speculation if chosen == "auto" else chosen),
        )

    def _prompt_text(self, prompt: Prompt, ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._text.decode(ids)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._text.encode(prompt)
        if prompt and isinstance(prompt[0], dict):
            return self._text.chat(prompt)
        return prompt  # type: ignore[return-value]

    # --- engine and housekeeping ---------------------------------------------------------------

    @property
    def engine(self) -> VerifyEngine:
        return self._engine

    def reader(self) -> InboxReader:
        return InboxReader(self.settings.redis_url, self.inbox, self._engine.deliver)

    def held(self) -> Mapping[str, int]:
        return dict(self._held)

    def on_renewal(self, held: Mapping[str, int], outcomes: Mapping[str, str]) -> None:
        for job, outcome in outcomes.items():
            if outcome == "cancel":
                self._engine.cancel(job, held[job])
            elif outcome == "fenced":
                self._engine.drop(job, held[job])

    def tick(self) -> None:
        if self._look.is_due():
            self._drafters = live_workers(self.client, self.keys, "draft", self.model_name)
            self._engine.draft_workers_alive(self._drafters)
        if self._drafters and not self.is_draining:
            self._requests.ask(self._engine.jobs_without_session())
