"""Many sampled jobs through both engines at once, the same on every machine.

What is drafted in which round decides which random numbers are looked at. So that equal jobs give
equal outputs here whatever the machine's load, no sequence begins before all draft sessions are
open, and every round waits for its proposal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pilotfish_broker.keys import Keys
from pilotfish_broker.sampling import SamplingParams
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import JobSpec
from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.model.text import Text
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.sampler import Case
from pilotfish_workers.verify import sessions
from tests.engines_kit import Stage, until
from tests.system_law_kit import Samples
from tests.worker_kit import MODEL

KV_TOKENS = 1 << 16
PROMPT = (5, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 70)
"""One more than a block of the KV pool: a job that begins behind another's block lacks one token,
as in decoding, and is drafted for from its first round on."""

ALONE = SamplingParams(max_tokens=8, ignore_eos=True, speculation="off")
RUN_SECONDS = 280.0

Kind = TypeVar("Kind", bound=Hashable)
Jobs = Mapping[str, SamplingParams]


@contextmanager
def patience() -> Iterator[None]:
    """Meanwhile no round goes ahead without its proposal."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST", "LEAST", "MOST"):
            patch.setattr(sessions, f"{name}_WAIT_SECONDS", RUN_SECONDS)
        yield


class HeldRunner(ModelRunner):
    """A target that does not begin a pass before `go` is set."""

    go: threading.Event

    def verify(self, rows: Sequence[Rows], cases: Sequence[Case | None]) -> list[Outcome | None]:
        assert self.go.wait(RUN_SECONDS), "the test did not let it go"
        return super().verify(rows, cases)


@dataclass(slots=True)
class Pair:
    """A target, a draft model, and the tokenizer of both."""

    target: HeldRunner
    draft: ModelRunner
    text: Text

    @classmethod
    def load(cls, target: Path, draft: Path) -> Pair:
        """From their folders."""
        return cls(load(HeldRunner, target), load(ModelRunner, draft), Text(str(target)))


def load(runner: type[Any], folder: Path) -> Any:
    """A model as this kind of runner."""
    return runner.load(str(folder), device="cpu", num_threads=1, kv_tokens=KV_TOKENS, gate=False)


class Bench:
    """Runs jobs through engines of their own each time.

    Args:
        url: the server; each run has a namespace of its own.
    """

    def __init__(self, url: str, client: Any, pair: Pair) -> None:
        self._url, self._client, self._pair = url, client, pair
        self._num_runs = 0

    def run(
        self,
        kinds: Mapping[Kind, Jobs],
        *,
        draft: ModelRunner | None = None,
        asked: Callable[[SamplingParams], SamplingParams] = lambda params: params,
    ) -> dict[Kind, Samples]:
        """Samples of each kind of job, by the jobs' ids and parameters.

        Args:
            draft: another draft model than the pair's.
            asked: see `Drafter`.
        """
        self._num_runs += 1
        self._pair.target.go = threading.Event()
        keys = Keys(f"law{self._num_runs}")
        settings = Settings.from_env({}, broker_url=self._url, namespace=keys.namespace, model="m")
        stage = Stage(self._client, keys, settings)
        try:
            with patience():
                return self._run(stage, kinds, draft or self._pair.draft, asked)
        finally:
            self._pair.target.go.set()
            stage.close()

    def _run(
        self,
        stage: Stage,
        kinds: Mapping[Kind, Jobs],
        draft: ModelRunner,
        asked: Callable[[SamplingParams], SamplingParams],
    ) -> dict[Kind, Samples]:
        target, text = self._pair.target, self._pair.text
        jobs = {job: params for some in kinds.values() for job, params in some.items()}
        stage.records.submit(
            (job, JobSpec(model=MODEL, prompt=[*PROMPT], params=params))
            for job, params in {"first": ALONE, **jobs}.items()
        )
        verifier = stage.verifier(target, prefill_tokens=len(PROMPT), words=text)
        drafter = stage.drafter(
            ModelSource(draft, len(PROMPT) * len(jobs)), info=draft.info, words=text, asked=asked
        )
        first = verifier.run("first")
        sequences = {job: verifier.claim(job) for job in jobs}
        for sequence in sequences.values():
            verifier.engine.add(sequence)
        for job in jobs:
            drafter.draft(job)
        until(lambda: verifier.asking == {*jobs}, "every session's first frame", RUN_SECONDS)
        target.go.set()
        first.result(RUN_SECONDS)
        samples = {}
        for kind, some in kinds.items():
            samples[kind] = Samples()
            for job in some:
                sequences[job].future.result(RUN_SECONDS)
            for job, output in zip(some, stage.outputs([*some]), strict=True):
                samples[kind].add(output, stage.record(job))
        return samples
