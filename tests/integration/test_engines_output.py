"""Both engines together: the output is the target's own greedy output, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pilotfish_broker.keys import Keys
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import Status
from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.draft.ngram import NgramSource
from pilotfish_workers.draft.source import Draft, Drafted, DraftSource
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from tests.engines_kit import Drafter, HeldModel, Stage, Verifier, until
from tests.tiny_models import build_tiny
from tests.worker_kit import FunctionModel, plain

pytestmark = pytest.mark.integration

LENGTHS = (1, 2, 3, 15, 16, 17, 40, 90)
TOKENS = 24
Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads tiny float32 models: ``load(seed)``; equal seeds give equal models."""
    folders: dict[int, Any] = {}

    def load(seed: int, kv_tokens: int = 8192) -> ModelRunner:
        if seed not in folders:
            folder = tmp_path_factory.mktemp("model")
            folders[seed] = build_tiny(folder, "llama", seed, num_layers=1, hidden=32)
        return ModelRunner.load(
            str(folders[seed]), device="cpu", num_threads=1, kv_tokens=kv_tokens, gate=False
        )

    return load


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    chosen = random.Random(5)
    return {f"job-{n}": [chosen.randrange(4, 280) for _ in range(n)] for n in LENGTHS}


@pytest.fixture(scope="module")
def expected(load: Load, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    target = load(0)
    return {job: plain(target, prompt, TOKENS) for job, prompt in prompts.items()}


@pytest.fixture
def stage(redis_client: Any, keys: Keys, settings: Settings) -> Iterator[Stage]:
    stage = Stage(redis_client, keys, settings)
    yield stage
    stage.close()


def run_all(
    stage: Stage,
    verifier: Verifier,
    drafters: list[Drafter],
    prompts: dict[str, list[int]],
    **params: Any,
) -> dict[str, list[int]]:
    futures = []
    for job, prompt in prompts.items():
        stage.submit(job, prompt, **{"max_tokens": TOKENS, "ignore_eos": True, **params})
        futures.append(verifier.run(job))
    stage.finish(verifier, futures, drafters)
    for job, future in zip(prompts, futures, strict=True):
        summary, record = future.result(), stage.record(job)
        assert record.status is Status.SUCCEEDED
        assert (record.rounds, record.drafted, record.accepted) == (
            summary["rounds"],
            summary["drafted"],
            summary["accepted"],
        )
    return {job: stage.output(job) for job in prompts}


def totals(stage: Stage, jobs: Any) -> tuple[int, int, int]:
    records = [stage.record(job) for job in jobs]
    return (
        sum(record.rounds for record in records),
        sum(record.drafted for record in records),
        sum(record.accepted for record in records),
    )


def test_without_any_drafter_jobs_decode_plainly(
    stage: Stage, load: Load, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    assert run_all(stage, stage.verifier(load(0)), [], prompts) == expected
    assert totals(stage, prompts) == (len(prompts) * TOKENS, 0, 0)


@pytest.mark.parametrize("k", [1, 5, "auto"])
def test_a_self_draft_is_accepted_whole(
    stage: Stage,
    load: Load,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    k: int | str,
) -> None:
    verifier = stage.verifier(load(0))
    drafter = stage.drafter(ModelSource(load(0), 64))
    assert run_all(stage, verifier, [drafter], prompts, speculation=k) == expected
    rounds, drafted, accepted = totals(stage, prompts)
    assert drafted == accepted > 0
    assert rounds < len(prompts) * TOKENS


def sources(load: Load) -> dict[str, Callable[[], DraftSource]]:
    return {
        "unrelated model": lambda: ModelSource(load(9), 64),
        "n-gram": NgramSource,
    }


@pytest.mark.parametrize("kind", ["unrelated model", "n-gram"])
def test_a_poor_drafter_changes_no_token(
    stage: Stage,
    load: Load,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    kind: str,
) -> None:
    verifier = stage.verifier(load(0))
    drafter = stage.drafter(sources(load)[kind]())
    assert run_all(stage, verifier, [drafter], prompts, speculation=4) == expected


def test_a_pool_of_one_and_a_half_jobs_changes_no_token(
    stage: Stage, load: Load, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    verifier = stage.verifier(load(0, kv_tokens=(90 + TOKENS) * 3 // 2), prefill_tokens=32)
    drafter = stage.drafter(ModelSource(load(0, kv_tokens=192), 32))
    assert run_all(stage, verifier, [drafter], prompts, speculation=3) == expected
    assert verifier.engine._scheduler.num_preempted > 0, "the pool was not short of blocks"


def test_two_verifiers_and_two_drafters_share_the_work(stage: Stage) -> None:
    """Sessions of one drafter belong to several verify workers, and the other way round."""
    verifiers = [stage.verifier(FunctionModel(num_blocks=400), f"v{n}") for n in range(2)]
    drafters = [
        stage.drafter(ModelSource(FunctionModel(num_blocks=400), 64), f"d{n}") for n in range(2)
    ]
    futures, expected = [], {}
    for number in range(12):
        job, prompt = f"j{number}", [number, *range(number)]
        stage.submit(job, prompt, max_tokens=30, speculation=4)
        futures.append(verifiers[number % 2].run(job))
        expected[job] = plain(FunctionModel(), prompt, 30)
        drafters[number // 2 % 2].draft(job)
    for verifier in verifiers:
        stage.finish(verifier, futures)
    assert {job: stage.output(job) for job in expected} == expected
    _, drafted, accepted = totals(stage, expected)
    assert drafted == accepted > 0


@pytest.mark.parametrize("speculation", ["off", 6])
def test_a_stop_token_within_drafts_ends_text_tokens_and_counts_alike(
    stage: Stage, speculation: str | int
) -> None:
    """Decode once, then declare a token in the middle to be the end."""
    model = FunctionModel()
    whole = plain(model, [1, 2, 3], 30)
    stop = next(token for place, token in enumerate(whole) if place > 9 and whole.index(token) > 9)
    length = whole.index(stop) + 1
    verifier = stage.verifier(model)
    drafter = stage.drafter(ModelSource(FunctionModel(), 64))
    stage.submit("j", [1, 2, 3], max_tokens=30, speculation=speculation)
    future = verifier.run("j", stop_ids=[stop])
    stage.finish(verifier, [future], [drafter])
    record = stage.record("j")
    assert stage.output("j") == whole[:length]
    assert (record.finish_reason, record.committed) == ("stop", length)
    assert record.visible == length - 1, "the token that stops has no text"
    assert record.accepted <= record.drafted <= length


def test_the_limit_cuts_a_round_and_a_stop_beyond_it_is_never_seen(stage: Stage) -> None:
    whole = plain(FunctionModel(), [4, 5], 11)
    assert whole[10] not in whole[:10]
    verifier = stage.verifier(FunctionModel())
    drafter = stage.drafter(ModelSource(FunctionModel(), 64))
    stage.submit("j", [4, 5], max_tokens=10, speculation=7)
    stage.finish(verifier, [verifier.run("j", stop_ids=[whole[10]])], [drafter])
    assert stage.output("j") == whole[:10]
    assert stage.record("j").finish_reason == "length"


def test_one_token_needs_no_drafting(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel())
    drafter = stage.drafter(NgramSource())
    stage.submit("j", [4, 5], max_tokens=1)
    stage.finish(verifier, [verifier.run("j")], [drafter])
    assert stage.output("j") == plain(FunctionModel(), [4, 5], 1)
    assert drafter.engine.sessions() == []


def test_an_output_ends_with_the_models_context(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel(context=20))
    drafter = stage.drafter(ModelSource(FunctionModel(context=20), 64))
    stage.submit("j", [1] * 12, max_tokens=100, speculation=5)
    stage.finish(verifier, [verifier.run("j")], [drafter])
    assert stage.output("j") == plain(FunctionModel(context=40), [1] * 12, 8)
    assert stage.record("j").finish_reason == "length"


class TightModel(FunctionModel):
    """Refuses block tables that are longer than their rows."""

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        for row in rows:
            if len(row.blocks) != self.pool.num_blocks_for(row.start + len(row.tokens)):
                raise ValueError("a sequence holds blocks that rejected tokens needed")
        return super().greedy(rows)


class MoodySource:
    """Drafts many wrong tokens, then none, and so on."""

    def __init__(self) -> None:
        self._is_full = False

    def propose(self, drafts: Sequence[Draft], ks: Sequence[int]) -> list[Drafted | None]:
        self._is_full = not self._is_full
        return [Drafted([1] * k if self._is_full else []) for k in ks]

    def learn(self, draft: Draft, num_valid: int | None) -> None:
        """Nothing to learn."""


def test_rejected_tokens_give_their_blocks_back_each_round(stage: Stage) -> None:
    verifier = stage.verifier(TightModel(num_blocks=200))
    drafter = stage.drafter(MoodySource())
    stage.submit("j", [4, 5], max_tokens=200, speculation=16)
    future = verifier.run("j")
    stage.finish(verifier, [future], [drafter])
    assert future.result()["drafted"] > future.result()["accepted"]


def test_a_job_that_can_never_fit_fails_alone_and_says_why(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel(num_blocks=4, block_size=4))
    stage.submit("big", [1] * 10, max_tokens=10)
    stage.submit("small", [1] * 4, max_tokens=4)
    futures = [verifier.run("big"), verifier.run("small")]
    stage.finish(verifier, futures)
    record = stage.record("big")
    assert record.status is Status.FAILED
    assert "20 tokens" in record.error
    assert "16" in record.error
    assert futures[1].result()["tokens"] == 4


def test_finished_sessions_leave_nothing_on_the_drafters_side(stage: Stage) -> None:
    model = HeldModel(hold_at=2, num_blocks=200, context=1000)
    verifier = stage.verifier(model)
    source = ModelSource(FunctionModel(num_blocks=200, context=1000), 64)
    drafter = stage.drafter(source)
    stage.submit("j", [1, 2], max_tokens=300, speculation=3)
    future = verifier.run("j")
    session = drafter.draft("j")
    until(lambda: any(s.last_open for s in drafter.engine.sessions()), "the session is opened")
    model.go()
    stage.finish(verifier, [future])
    until(session.done, "the session of an ended job is closed")
    summary = session.result()
    record = stage.record("j")
    assert summary["drafted"] >= record.drafted > 0
    assert drafter.engine.sessions() == []
    source.check_integrity()
    assert source._live == {}
