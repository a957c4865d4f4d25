"""However a job ends here, its future is resolved once and its blocks are free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pilotfish_broker.connection import connect
from pilotfish_broker.digest import extend
from pilotfish_broker.errors import Fenced, JobCancelled, JobFailed
from pilotfish_broker.keys import Keys
from pilotfish_broker.messages import Open
from pilotfish_broker.ownership import Ownership
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import Status
from pilotfish_workers.draft.engine import SessionRefused
from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.draft.ngram import NgramSource
from pilotfish_workers.model.interface import BAD_LOGITS
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.verify import engine as verify_engine
from pilotfish_workers.verify import sessions as verify_sessions
from pilotfish_workers.verify.engine import Drained, EngineDied
from tests.engines_kit import LIMIT_SECONDS, HeldModel, Stage, Verifier, until
from tests.logits_model import LogitsModel
from tests.tiny_models import build_tiny
from tests.worker_kit import FunctionModel, plain

pytestmark = pytest.mark.integration

POISON = 13


@pytest.fixture
def stage(redis_client: Any, keys: Keys, settings: Settings) -> Iterator[Stage]:
    stage = Stage(redis_client, keys, settings)
    yield stage
    stage.close()


def error_of(future: Future[Any]) -> BaseException | None:
    return future.exception(timeout=LIMIT_SECONDS)


# --- the states in which a job may be met ------------------------------------------------------

State = Callable[[Stage, pytest.MonkeyPatch], tuple[Verifier, HeldModel, Future[Any]]]


def waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> tuple[Verifier, HeldModel, Future[Any]]:
    """Another job fills the pool."""
    model = HeldModel(hold_at=2, num_blocks=6, block_size=4)
    verifier = stage.verifier(model)
    stage.submit("other", [1] * 18, max_tokens=5)
    verifier.run("other")
    stage.submit("j", [1] * 18, max_tokens=5)
    future = verifier.run("j")
    model.wait()
    return verifier, model, future


def prefilling(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> tuple[Verifier, HeldModel, Future[Any]]:
    model = HeldModel(hold_at=2)
    verifier = stage.verifier(model, prefill_tokens=16)
    stage.submit("j", [1] * 100, max_tokens=5)
    future = verifier.run("j")
    model.wait()
    return verifier, model, future


def decoding(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> tuple[Verifier, HeldModel, Future[Any]]:
    model = HeldModel(hold_at=5)
    verifier = stage.verifier(model)
    stage.submit("j", [1] * 10, max_tokens=50)
    future = verifier.run("j")
    model.wait()
    return verifier, model, future


def awaiting_a_proposal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> tuple[Verifier, HeldModel, Future[Any]]:
    """Its drafter never answers, and the engine would wait for it for an hour."""
    monkeypatch.setattr(verify_sessions, "FIRST_WAIT_SECONDS", 3600.0)
    model = HeldModel(hold_at=3)
    verifier = stage.verifier(model)
    stage.submit("j", [1] * 10, max_tokens=50)
    sequence = verifier.claim("j")
    verifier.engine.add(sequence)
    model.wait()
    verifier.engine.deliver([Open("j", sequence.epoch, stage.keys.inbox("nobody"), 0)])
    model.go()
    until(lambda: sequence.await_until is not None, "the job waits for a proposal")
    until(lambda: not sequence.in_flight, "its round is written")
    return verifier, model, sequence.future


STATES = pytest.mark.parametrize(
    "bring", [waiting, prefilling, decoding, awaiting_a_proposal], ids=lambda state: state.__name__
)


@STATES
def test_a_cancelled_job_ends_in_every_state(
    stage: Stage, bring: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, model, future = bring(stage, monkeypatch)
    verifier.engine.cancel("j", 1)
    verifier.engine.cancel("j", 1)
    model.go()
    assert isinstance(error_of(future), JobCancelled)
    record = stage.record("j")
    assert record.status is Status.CANCELLED
    assert stage.output("j") == plain(FunctionModel(), record.prompt_ids or [], record.committed)


@STATES
def test_a_stopping_engine_drains_jobs_in_every_state_and_another_goes_on(
    stage: Stage, bring: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, model, future = bring(stage, monkeypatch)
    verifier.engine.stop()
    model.go()
    assert isinstance(error_of(future), Drained)
    assert verifier.own.release("j", 1)
    other = stage.verifier(FunctionModel(), "v2")
    stage.finish(other, [resumed := other.run("j")])
    record = stage.record("j")
    assert record.status is Status.SUCCEEDED
    assert record.epoch == 2
    assert stage.output("j") == plain(FunctionModel(), record.prompt_ids or [], record.committed)
    assert resumed.result()["tokens"] == record.spec.params.max_tokens


@STATES
def test_a_job_that_was_taken_away_is_dropped_in_every_state(
    stage: Stage, bring: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, model, future = bring(stage, monkeypatch)
    stage.client.hset(stage.keys.job("j"), mapping={"owner": "somebody", "epoch": 2})
    before = stage.client.xlen(stage.keys.tokens("j"))
    verifier.engine.drop("j", 1)
    model.go()
    assert isinstance(error_of(future), Fenced)
    assert stage.client.xlen(stage.keys.tokens("j")) == before, "a write without owning the job"
    assert stage.record("j").status is Status.RUNNING


def test_a_fenced_commit_drops_that_job_without_a_further_write_and_no_other(
    stage: Stage,
) -> None:
    model = HeldModel(hold_at=5)
    verifier = stage.verifier(model)
    for job in ("j", "k"):
        stage.submit(job, [1, 2, 3], max_tokens=20)
    futures = {job: verifier.run(job) for job in ("j", "k")}
    model.wait()
    until(lambda: stage.record("j").committed >= 2, "the rounds before are written")
    stage.client.hset(stage.keys.job("j"), "owner", "somebody")
    before = stage.client.xlen(stage.keys.tokens("j"))
    model.go()
    assert isinstance(error_of(futures["j"]), Fenced)
    assert futures["k"].result(LIMIT_SECONDS)["tokens"] == 20
    assert stage.client.xlen(stage.keys.tokens("j")) == before
    assert stage.output("k") == plain(FunctionModel(), [1, 2, 3], 20)


def test_a_fenced_finish_is_no_success(stage: Stage) -> None:
    model = HeldModel(hold_at=1)
    verifier = stage.verifier(model)
    stage.submit("j", [1, 2, 3], max_tokens=1)
    future = verifier.run("j")
    model.wait()
    stage.client.hset(stage.keys.job("j"), "epoch", 9)
    model.go()
    assert isinstance(error_of(future), Fenced)
    assert stage.output("j") == []


def test_a_cancel_flag_in_the_record_is_seen_by_the_next_commit(stage: Stage) -> None:
    model = HeldModel(hold_at=5)
    verifier = stage.verifier(model)
    stage.submit("j", [1, 2, 3], max_tokens=200)
    future = verifier.run("j")
    model.wait()
    assert stage.records.cancel("j") == "flagged"
    model.go()
    assert isinstance(error_of(future), JobCancelled)
    assert stage.record("j").committed < 200


def test_a_cancelled_job_closes_its_draft_session(stage: Stage) -> None:
    model = HeldModel(hold_at=3, num_blocks=400, context=2000)
    verifier = stage.verifier(model)
    drafter = stage.drafter(ModelSource(FunctionModel(num_blocks=400, context=2000), 64))
    stage.submit("j", [1, 2, 3], max_tokens=1500, speculation=2)
    future = verifier.run("j")
    session = drafter.draft("j")
    model.wait()
    model.go()
    until(lambda: stage.record("j").accepted > 0, "drafting is under way")
    verifier.engine.cancel("j", 1)
    assert isinstance(error_of(future), JobCancelled)
    assert session.result(LIMIT_SECONDS)["rounds"] > 0


def test_a_job_that_is_claimed_again_here_replaces_its_older_self(stage: Stage) -> None:
    """The worker was thought dead, its job was queued again, and it got it a second time."""
    model = HeldModel(hold_at=5)
    verifier = stage.verifier(model)
    stage.submit("j", [1, 2, 3], max_tokens=20)
    old = verifier.run("j")
    model.wait()
    until(lambda: stage.record("j").committed >= 2, "the rounds before are written")
    assert verifier.own.release("j", 1)
    new = verifier.run("j")
    model.go()
    assert isinstance(error_of(old), Fenced)
    assert new.result(LIMIT_SECONDS)["tokens"] == 20
    assert stage.record("j").epoch == 2
    assert stage.output("j") == plain(FunctionModel(), [1, 2, 3], 20)


# --- engines that end --------------------------------------------------------------------------


def test_a_job_that_comes_in_after_the_engine_left_is_sent_back(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel())
    stage.submit("j", [1, 2, 3])
    sequence = verifier.claim("j")
    verifier.engine.stop()
    verifier.engine.join(LIMIT_SECONDS)
    verifier.engine.add(sequence)
    assert isinstance(error_of(sequence.future), Drained)


def test_a_job_that_comes_in_while_the_engine_leaves_is_sent_back(stage: Stage) -> None:
    model = HeldModel(hold_at=2)
    verifier = stage.verifier(model)
    for job in ("j", "k"):
        stage.submit(job, [1, 2, 3], max_tokens=20)
    first, second = verifier.claim("j"), verifier.claim("k")
    verifier.engine.add(first)
    model.wait()
    verifier.engine.stop()
    verifier.engine.add(second)
    model.go()
    assert isinstance(error_of(first.future), Drained)
    assert isinstance(error_of(second.future), Drained)


def test_a_session_that_comes_in_after_the_draft_engine_left_is_refused(stage: Stage) -> None:
    verifier = stage.verifier(HeldModel(hold_at=1))
    stage.submit("j", [1, 2, 3])
    verifier.run("j")
    drafter = stage.drafter(NgramSource())
    drafter.engine.stop()
    drafter.engine.join(LIMIT_SECONDS)
    assert isinstance(error_of(drafter.draft("j")), SessionRefused)
    verifier.model.go()


def test_a_second_session_for_one_job_is_refused_and_the_first_lives(stage: Stage) -> None:
    verifier = stage.verifier(model := HeldModel(hold_at=3))
    drafter = stage.drafter(NgramSource())
    stage.submit("j", [1, 2, 3], max_tokens=50)
    future = verifier.run("j")
    first = drafter.draft("j")
    assert isinstance(error_of(drafter.draft("j")), SessionRefused)
    assert not first.done()
    model.go()
    stage.finish(verifier, [future])


class Broken(Ownership):
    """Fails in a way that nobody foresaw."""

    def commit(self, commits: Any) -> list[str]:
        raise KeyError("unforeseen")


def test_an_unforeseen_failure_of_the_committer_ends_the_engine_and_frees_the_slots(
    stage: Stage,
) -> None:
    verifier = stage.verifier(FunctionModel(), ownership=Broken)
    stage.submit("j", [1, 2, 3])
    future = verifier.run("j")
    assert isinstance(error_of(future), EngineDied)
    verifier.engine.join(LIMIT_SECONDS)
    assert isinstance(verifier.engine.failure, KeyError)
    stage._open.remove(verifier)  # it has nothing more to check
    verifier.close()


def test_a_model_that_fails_ends_the_engine_and_frees_the_slots(stage: Stage) -> None:
    def following(digest: int, position: int, token: int) -> int:
        if position == 5:
            raise RuntimeError("device lost")
        return 1

    verifier = stage.verifier(FunctionModel(following))
    for job in ("j", "k"):
        stage.submit(job, [1, 2, 3])
    futures = [verifier.run(job) for job in ("j", "k")]
    assert all(isinstance(error_of(future), EngineDied) for future in futures)
    assert isinstance(verifier.engine.failure, RuntimeError)
    stage._open.remove(verifier)
    verifier.close()


def test_an_engine_leaves_although_its_server_is_gone(
    start_valkey: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_engine, "LEAVE_SECONDS", 0.2)
    server = start_valkey()
    settings = Settings.from_env({}, broker_url=server.url, model="m")
    with connect(server.url) as client:
        stage = Stage(client, keys, settings)
        verifier = stage.verifier(model := HeldModel(hold_at=5))
        stage.submit("j", [1, 2, 3], max_tokens=50)
        future = verifier.run("j")
        model.wait()
        server.stop()
        verifier.engine.stop()
        model.go()
        assert isinstance(error_of(future), (Drained, Fenced))
        verifier.close()
        verifier.check()


# --- bad logits --------------------------------------------------------------------------------


def test_logits_without_a_number_fail_only_the_job_that_has_them(
    stage: Stage, tmp_path: Path
) -> None:
    """One row of the embedding is poisoned; one prompt holds that token."""
    folder = build_tiny(tmp_path / "model", "llama", num_layers=1, hidden=32, tie=False)
    model = ModelRunner.load(str(folder), device="cpu", num_threads=1, kv_tokens=2048)
    clean = [[5, 9, 20], [7] * 30, [40, 50]]
    expected = [plain(model, prompt, 15) for prompt in clean]
    assert not any(POISON in output for output in expected)
    with torch.no_grad():
        model._model.get_input_embeddings().weight[POISON] = torch.nan
    verifier = stage.verifier(model)
    futures = []
    for number, prompt in enumerate([*clean, [5, POISON, 6]]):
        stage.submit(f"j{number}", prompt, max_tokens=15)
        futures.append(verifier.run(f"j{number}"))
    error = error_of(futures[3])
    assert isinstance(error, JobFailed)
    assert "NaN" in str(error)
    assert stage.record("j3").status is Status.FAILED
    for number, output in enumerate(expected):
        assert futures[number].result(LIMIT_SECONDS)["tokens"] == 15
        assert stage.output(f"j{number}") == output


@pytest.mark.parametrize("place", [2, 9], ids=["in the first chunk", "in the last"])
def test_a_prompt_whose_logits_hold_no_number_is_not_scored(stage: Stage, place: int) -> None:
    """Its log-probabilities would be no number either, and nobody could read the job's stream."""
    prompt = [*range(10)]
    model = LogitsModel()
    model.logits[extend(0, prompt[:place])] = np.full(100, np.nan, np.float32)
    verifier = stage.verifier(model, prefill_tokens=4)
    stage.submit("j", prompt, max_tokens=5, prompt_logprobs=1)
    error = error_of(verifier.run("j"))
    assert isinstance(error, JobFailed)
    assert "NaN" in str(error)
    assert stage.output("j") == []
    stage.submit("other", prompt, max_tokens=5)
    assert verifier.run("other").result(LIMIT_SECONDS)["tokens"] == 5


def after_poison(digest: int, position: int, token: int) -> int:
    return BAD_LOGITS if token == POISON else (digest % 50) + 20


def only_poison(digest: int, position: int, token: int) -> int:
    return POISON


@pytest.mark.parametrize("speculation", ["off", 4])
def test_a_drafted_token_that_breaks_the_model_harms_nobody_when_it_is_rejected(
    stage: Stage, speculation: str | int
) -> None:
    verifier = stage.verifier(FunctionModel(after_poison, num_blocks=400, context=1000))
    drafter = stage.drafter(ModelSource(FunctionModel(only_poison, num_blocks=400), 64))
    stage.submit("j", [1, 2, 3], max_tokens=150, speculation=speculation)
    future = verifier.run("j")
    stage.finish(verifier, [future], [drafter])
    assert future.result()["tokens"] == 150
    reference = FunctionModel(after_poison, num_blocks=400, context=1000)
    assert stage.output("j") == plain(reference, [1, 2, 3], 150)
    if speculation != "off":
        assert future.result()["drafted"] > 0, "nothing was drafted: the test shows nothing"


def test_bad_logits_behind_a_stop_token_harm_nobody(stage: Stage) -> None:
    """The token that stops is accepted within a draft; what the model says after it is nothing."""

    def following(digest: int, position: int, token: int) -> int:
        if position >= 60:
            return BAD_LOGITS
        return 7 if position == 59 else 20 + position % 5

    def loose(digest: int, position: int, token: int) -> int:
        return 7 if position == 59 else 20 + position % 5

    verifier = stage.verifier(model := HeldModel(following, hold_at=3))
    drafter = stage.drafter(ModelSource(FunctionModel(loose), 64))
    stage.submit("j", [1, 2, 3], max_tokens=100, speculation=16)
    future = verifier.run("j", stop_ids=[7])
    drafter.draft("j")
    until(lambda: any(s.last_open for s in drafter.engine.sessions()), "the session is opened")
    model.go()
    stage.finish(verifier, [future], [drafter])
    assert future.result()["finish_reason"] == "stop"
    assert stage.output("j")[-1] == 7
