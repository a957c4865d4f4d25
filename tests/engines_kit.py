"""Both engines in one process over a real server, with faults that a test can ask for."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from pilotfish_broker.connection import connect
from pilotfish_broker.inbox import InboxReader
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.messages import Frame, Open
from pilotfish_broker.ownership import Identity, Ownership
from pilotfish_broker.records import JobRecord, JobRecords
from pilotfish_broker.sampling import SamplingParams
from pilotfish_broker.settings import Settings
from pilotfish_broker.stream import Entry
from pilotfish_checkpoint.progress import read_progress
from pilotfish_workers.draft.engine import DraftEngine
from pilotfish_workers.draft.sampling import draft_sampler
from pilotfish_workers.draft.session import DraftSession
from pilotfish_workers.draft.source import Draft, DraftSource
from pilotfish_workers.model.interface import ModelInfo, Rows
from pilotfish_workers.sampling import Words, build_sampler
from pilotfish_workers.verify.committer import Committer
from pilotfish_workers.verify.engine import VerifyEngine
from pilotfish_workers.verify.sequence import Sequence as Active
from tests.worker_kit import MODEL, FunctionModel, active_of, job_spec

LIMIT_SECONDS = 60.0
TTL_SECONDS = 100


def until(is_so: Callable[[], object], what: str, seconds: float = LIMIT_SECONDS) -> None:
    """Wait for something, or fail with its name."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.005)


class HeldModel(FunctionModel):
    """Stops before the pass number `hold_at` until `go` is called."""

    def __init__(self, *args: Any, hold_at: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hold_at = hold_at
        self.is_held = threading.Event()
        self._gate = threading.Event()

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        if self.hold_at and self.num_passes + 1 == self.hold_at:
            self.is_held.set()
            self._gate.wait(LIMIT_SECONDS)
        return super().greedy(rows)

    def wait(self) -> None:
        """Until it is held."""
        assert self.is_held.wait(LIMIT_SECONDS), "the pass to hold at never came"

    def go(self) -> None:
        self._gate.set()


class Faults:
    """A lossy, doubling, reordering and delaying line, the same for the same seed."""

    def __init__(
        self, seed: int, *, lose: float = 0.0, double: float = 0.0, delay: float = 0.0
    ) -> None:
        self._random = random.Random(seed)
        self._lose, self._double, self._delay = lose, double, delay
        self._late: list[Frame] = []
        self.num_lost = 0

    def __call__(self, frames: Iterable[Frame]) -> list[Frame]:
        """What arrives now."""
        arriving: list[Frame] = []
        for frame in frames:
            if self._random.random() < self._lose:
                self.num_lost += 1
            elif self._random.random() < self._delay:
                self._late.append(frame)
            else:
                arriving.append(frame)
                if self._random.random() < self._double:
                    self._late.append(frame)
        if self._late and self._random.random() < 0.5:
            arriving += self._late
            self._late = []
            self._random.shuffle(arriving)
        return arriving


def direct(frames: list[Frame]) -> list[Frame]:
    """A line without faults."""
    return frames


class Verifier:
    """One verify worker without its process: identity, committer, engine, inbox.

    Args:
        words: the tokenizer, for jobs whose words or grammar it has to know; their end-of-sequence
            tokens are then the model's own.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        model: Any,
        *,
        prefill_tokens: int = 64,
        line: Callable[[list[Frame]], list[Frame]] = direct,
        ownership: type[Ownership] = Ownership,
        words: Words | None = None,
    ) -> None:
        self.stage, self.model, self._words = stage, model, words
        name = stage.unique(name)
        self.identity = Identity(name, f"nonce-of-{name}")
        self.own = ownership(
            stage.client,
            stage.keys,
            self.identity,
            MODEL,
            result_ttl_seconds=TTL_SECONDS,
            inbox_frames=4096,
        )
        Leases(stage.client, stage.keys, self.identity, "verify", MODEL, 600).register(64, {})
        self.committer = Committer(connect(stage.url), self.own, 4096)
        self.engine = VerifyEngine(
            model,
            self.committer,
            inbox_prefix=stage.keys.inbox(""),
            prefill_tokens=prefill_tokens,
        )
        self.asking: set[str] = set()  # jobs whose draft sessions have asked to be opened
        self._line = line
        self._reader = InboxReader(stage.url, stage.keys.inbox(name), self._deliver)
        self.engine.start()
        self._reader.start()

    def _deliver(self, frames: list[Frame]) -> None:
        frames = self._line(frames)
        self.engine.deliver(frames)
        self.asking |= {frame.job for frame in frames if isinstance(frame, Open)}

    def claim(self, job: str, *, stop_ids: Iterable[int] = ()) -> Active:
        """Own a queued job and make its sequence, as the worker does."""
        outcome, epoch = self.own.claim(job)
        assert outcome == "claimed"
        progress = read_progress(self.stage.client, self.stage.keys, self.stage.records, job)
        spec = progress.record.spec
        prompt = [int(token) for token in spec.prompt]  # type: ignore[call-overload]
        assert self.own.admit(job, epoch, prompt, "f") == "ok"
        sequence = active_of(
            spec,
            prompt + progress.output,
            len(prompt),
            job,
            epoch,
            tuple(stop_ids),
            spec.params.speculation,
        )
        sequence.limit = min(sequence.limit, self.model.info.context_length - len(prompt))
        if self._words is not None:
            sequence.sampler = build_sampler(
                spec.params,
                job=job,
                sample=spec.sample,
                tokens=sequence.tokens,
                num_prompt=len(prompt),
                eos_ids=self.model.info.eos_ids,
                vocab_size=self.model.info.vocab_size,
                words=self._words,
            )
        return sequence

    def run(self, job: str, **options: Any) -> Future[dict[str, Any]]:
        """Claim a job and hand it to the engine."""
        sequence = self.claim(job, **options)
        self.engine.add(sequence)
        return sequence.future

    def check(self) -> None:
        """After the engine has left: it did not die, and nothing is held."""
        assert self.engine.failure is None, f"the engine died: {self.engine.failure!r}"
        self.model.pool.check_integrity([])
        assert self.engine._drafting._sessions.num_open == 0
        assert self.engine._inside == set()

    def close(self) -> None:
        self._reader.stop()
        self.engine.stop()
        self.engine.join(LIMIT_SECONDS)
        assert not self.engine.is_alive, "the engine does not leave"


class Drafter:
    """One draft worker without its process.

    Args:
        info: of the draft model, which then draws as each job asks for; None for the argmax.
        words: its tokenizer.
        asked: what it makes of a job's parameters; whatever it draws from, the target is right.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        source: DraftSource,
        line: Callable[[list[Frame]], list[Frame]] = direct,
        *,
        info: ModelInfo | None = None,
        words: Words | None = None,
        asked: Callable[[SamplingParams], SamplingParams] = lambda params: params,
    ) -> None:
        self.stage, self.name, self.source = stage, stage.unique(name), source
        self._info, self._words, self._asked = info, words, asked
        inbox = stage.keys.inbox(self.name)
        self.engine = DraftEngine(source, connect(stage.url), inbox, 4096)
        self._reader = InboxReader(
            stage.url, inbox, lambda frames: self.engine.deliver(line(frames))
        )
        self.engine.start()
        self._reader.start()

    def draft(self, job: str) -> Future[dict[str, Any]]:
        """Begin a session for a running job."""
        progress = read_progress(self.stage.client, self.stage.keys, self.stage.records, job)
        record = progress.record
        prompt = record.prompt_ids or []
        draft = Draft(prompt + progress.output)
        if self._info is not None:
            draft.sampler = draft_sampler(
                replace(record.spec, params=self._asked(record.spec.params)),
                job=job,
                tokens=draft.tokens,
                num_prompt=len(prompt),
                info=self._info,
                words=self._words,
            )
        session = DraftSession(
            job=job,
            epoch=record.epoch,
            verify_worker=record.worker,
            verify_inbox=self.stage.keys.inbox(record.worker),
            num_prompt=len(prompt),
            draft=draft,
        )
        self.engine.add(session)
        return session.future

    def vanish(self) -> None:
        """Fall silent without a word, as a killed process does."""
        self._reader.stop()
        self.engine.deliver = lambda frames: None  # type: ignore[method-assign]
        self.engine._client = _Nowhere()

    def close(self) -> None:
        self._reader.stop()
        self.engine.stop()
        self.engine.join(LIMIT_SECONDS)
        assert not self.engine.is_alive, "the draft engine does not leave"
        assert self.engine.failure is None, f"the draft engine died: {self.engine.failure!r}"
        assert self.engine._inside == set()
        assert self.engine._by_handle == {}


class _Nowhere:
    """A client whose frames reach nobody."""

    def pipeline(self, **_: Any) -> _Nowhere:
        return self

    def rpush(self, *_: Any) -> None: ...
    def ltrim(self, *_: Any) -> None: ...
    def pexpire(self, *_: Any) -> None: ...
    def execute(self, *, raise_on_error: bool = True) -> list[Any]:
        return []


class Stage:
    """One namespace of one server, and the engines on it."""

    def __init__(self, client: Any, keys: Keys, settings: Settings) -> None:
        self.client, self.keys, self.url = client, keys, settings.redis_url
        self.records = JobRecords(client, keys, TTL_SECONDS)
        self._tag = secrets.token_hex(4)
        self._open: list[Verifier | Drafter] = []
        self._asked: dict[str, float] = {}

    def unique(self, name: str) -> str:
        """A worker id; a reader of an earlier test may still read the inbox of another."""
        return f"{name}-{self._tag}"

    def verifier(self, model: Any, name: str = "v1", **options: Any) -> Verifier:
        self._open.append(verifier := Verifier(self, name, model, **options))
        return verifier

    def drafter(self, source: DraftSource, name: str = "d1", **options: Any) -> Drafter:
        self._open.append(drafter := Drafter(self, name, source, **options))
        return drafter

    def submit(self, job: str, prompt: Sequence[int], **options: Any) -> None:
        self.records.submit([(job, job_spec(prompt, **options))])

    def record(self, job: str) -> JobRecord:
        return self.records.get(job)

    def output(self, job: str) -> list[int]:
        return read_progress(self.client, self.keys, self.records, job).output

    def outputs(self, jobs: Sequence[str]) -> list[list[int]]:
        """What many jobs have committed, in one round trip."""
        pipeline = self.client.pipeline(transaction=False)
        for job in jobs:
            pipeline.xrange(self.keys.tokens(job))
        streams = [
            [Entry.from_fields(fields) for _, fields in found] for found in pipeline.execute()
        ]
        return [[token for entry in stream for token in entry.tokens] for stream in streams]

    def finish(
        self,
        verifier: Verifier,
        futures: Iterable[Future[Any]],
        drafters: Sequence[Drafter] = (),
        seconds: float = LIMIT_SECONDS,
    ) -> None:
        """Wait until all futures are resolved; meanwhile ask for sessions as the worker does."""
        waiting = list(futures)
        deadline = time.monotonic() + seconds
        while not all(future.done() for future in waiting):
            if time.monotonic() > deadline:
                pytest.fail(f"stuck: {sum(not f.done() for f in waiting)} jobs after {seconds} s")
            self.ask(verifier, drafters)
            time.sleep(0.01)

    def ask(self, verifier: Verifier, drafters: Sequence[Drafter]) -> None:
        """Ring for the jobs without a session, each at most four times a second."""
        now = time.monotonic()
        for job in verifier.engine.jobs_without_session():
            if drafters and now - self._asked.get(job, 0.0) > 0.25:
                self._asked[job] = now
                drafters[hash(job) % len(drafters)].draft(job)

    def close(self) -> None:
        """Stop all engines; each must have balanced books."""
        for item in self._open:
            item.close()
        for item in self._open:
            if isinstance(item, Verifier):
                item.check()
