"""The draft worker: opens sessions for jobs that verify workers run, and drafts for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import redis
from celery import Celery

from pilotfish_broker.connection import connect
from pilotfish_broker.errors import ConfigError, PilotfishError
from pilotfish_broker.inbox import InboxReader
from pilotfish_broker.keys import draft_queue
from pilotfish_broker.leases import live_workers
from pilotfish_broker.models import read_model, read_vocabulary
from pilotfish_broker.records import JobRecord, JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import Status
from pilotfish_checkpoint.progress import read_progress
from pilotfish_workers.draft.engine import DraftEngine, SessionRefused
from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.draft.ngram import NgramSource
from pilotfish_workers.draft.sampling import draft_sampler
from pilotfish_workers.draft.session import DraftSession
from pilotfish_workers.draft.source import Draft, DraftSource
from pilotfish_workers.lifecycle import stop_process
from pilotfish_workers.loading import Tokens, load
from pilotfish_workers.loop import Every
from pilotfish_workers.model.interface import ModelInfo
from pilotfish_workers.model.vocabulary import describe_difference
from pilotfish_workers.speculative.sampler import Sampler
from pilotfish_workers.worker import Worker

LOOK_SECONDS = 1.0
IDLE_SECONDS = 5.0

log = logging.getLogger(__name__)


class TokenizerMismatch(PilotfishError):
    """Draft and target do not share a vocabulary; drafted ids would mean other words."""


class NotDrafted(Exception):
    """No session came about; there is nothing to report."""


class DraftWorker(Worker):
    """Runs a draft source for the sessions it holds."""

    kind = "draft"

    def __init__(self, settings: Settings, app: Celery) -> None:
        super().__init__(settings, app)
        self._tokens: Tokens | None = None
        self._info: ModelInfo | None = None
        self._compared: dict[str, str] = {}  # target's tokenizer fingerprint → refusal, or ""
        self._look = Every(LOOK_SECONDS)

    def open(self) -> dict[str, str | int]:
        settings = self.settings
        if settings.draft == "off":
            raise ConfigError("PILOTFISH_DRAFT is off; a draft worker needs a model or ngram")
        source: DraftSource
        if settings.draft == "ngram":
            source = NgramSource()
        else:
            model, self._tokens = load(settings.draft, settings)
            self._info = model.info
            source = ModelSource(model, settings.prefill_tokens)
        self._records = JobRecords(self.client, self.keys, settings.result_ttl_seconds)
        client = connect(settings.redis_url)
        self._engine = DraftEngine(source, client, self.inbox, settings.inbox_frames)
        fields: dict[str, str | int] = {"draft": settings.draft}
        if self._tokens is not None:
            fields["tokenizer"] = self._tokens.fingerprint()
        if refusal := self._refusal():
            raise TokenizerMismatch(refusal)
        return fields

    # --- one session, on a slot's thread -------------------------------------------------------

    def run(self, job: str) -> dict[str, Any]:
        """Draft for a job until its session closes; returns a summary.

        Raises:
            NotDrafted: the job is not running, is drafted for already, or this worker leaves.
            TokenizerMismatch: the target's vocabulary is another one.
        """
        if self.is_draining:
            raise NotDrafted("draining")
        try:
            refusal = self._refusal()
            session = None if refusal else self._session(job)
        except (redis.RedisError, PilotfishError) as error:
            log.warning("no session for job %s: %s: %s", job, type(error).__name__, error)
            raise NotDrafted(str(error)) from None
        if session is None:
            self._give_up(refusal)
            raise TokenizerMismatch(refusal)
        self._engine.add(session)
        try:
            return session.future.result()
        except SessionRefused as error:
            raise NotDrafted(str(error)) from None

    def _session(self, job: str) -> DraftSession:
        progress = read_progress(self.client, self.keys, self._records, job)
        record = progress.record
        if record.status is not Status.RUNNING or record.prompt_ids is None:
            raise NotDrafted(f"the job is {record.status}")
        num_prompt = len(record.prompt_ids)
        tokens = record.prompt_ids + progress.output
        return DraftSession(
            job=job,
            epoch=record.epoch,
            verify_worker=record.worker,
            verify_inbox=self.keys.inbox(record.worker),
            num_prompt=num_prompt,
            draft=Draft(tokens, self._sampler(record, tokens, num_prompt)),
        )

    def _sampler(self, record: JobRecord, tokens: list[int], num_prompt: int) -> Sampler | None:
        """What draws as the job asks for; None where no model draws."""
        if self._info is None:
            return None
        return draft_sampler(
            record.spec,
            job=record.id,
            tokens=tokens,
            num_prompt=num_prompt,
            info=self._info,
            words=self._tokens,
        )

    def _refusal(self) -> str:
        """Why this worker cannot draft for the target that is served now; "" when it can."""
        if self._tokens is None:
            return ""  # n-grams repeat the target's own ids
        record = read_model(self.client, self.keys, self.model_name)
        if record is None or record.tokenizer == self._tokens.fingerprint():
            return ""
        if not live_workers(self.client, self.keys, "verify", self.model_name):
            return ""  # the record outlives its target; the next one may fit
        if record.tokenizer not in self._compared:
            theirs = read_vocabulary(self.client, self.keys, self.model_name) or []
            text = describe_difference(self._tokens.vocabulary(), theirs)
            self._compared[record.tokenizer] = text
            if text:
                log.error("%s", text)
        return self._compared[record.tokenizer]

    def _give_up(self, refusal: str) -> None:
        """End this worker: as long as it listened, it would take requests from those that fit."""
        if not self.is_draining:
            self.drain()
            self.client.hset(self.keys.worker(self.identity.worker), "refused", refusal)
            stop_process(refusal)

    # --- engine and housekeeping ---------------------------------------------------------------

    @property
    def engine(self) -> DraftEngine:
        return self._engine

    def reader(self) -> InboxReader:
        return InboxReader(self.settings.redis_url, self.inbox, self._engine.deliver)

    def on_renewal(self, held: Mapping[str, int], outcomes: Mapping[str, str]) -> None:
        """Sessions are no possession: nothing to do."""

    def tick(self) -> None:
        if not self._look.is_due():
            return
        if refusal := self._refusal():  # the target may come later than this worker
            self._give_up(refusal)
        now = time.monotonic()
        alive = live_workers(self.client, self.keys, "verify", self.model_name)
        self._engine.close_where(
            lambda session: session.verify_worker not in alive, "the verify worker is gone"
        )
        silent = [s for s in self._engine.sessions() if now - s.last_frame > IDLE_SECONDS]
        over = {session.job for session in silent if self._is_over(session)}
        if over:
            self._engine.close_where(lambda session: session.job in over, "the job has moved on")
        resting = any(session.is_resting for session in silent)
        if resting and self._broker.llen(self._waiting_list) > 0:
            self._engine.close_where(
                lambda s: s.is_resting and s.last_frame < now - IDLE_SECONDS,
                "nothing is asked for here, and others wait for a slot",
            )

    @property
    def _waiting_list(self) -> str:
        return self.keys.celery_queue(draft_queue(self.model_name))

    def _is_over(self, session: DraftSession) -> bool:
        status, epoch = self.client.hmget(self.keys.job(session.job), "status", "epoch")
        return status != b"running" or int(epoch) != session.epoch
