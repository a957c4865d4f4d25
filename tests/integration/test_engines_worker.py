"""What a verify worker does around its engine, on a simulated model and without Celery."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from pilotfish_broker.celery_app import make_app
from pilotfish_broker.errors import ConfigError, JobFailed
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.ownership import Identity
from pilotfish_broker.records import JobRecord, JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import JobSpec, SamplingParams, Status
from pilotfish_broker.stream import pack_ids
from pilotfish_checkpoint.progress import read_progress
from pilotfish_workers.simulated import SimulatedModel
from pilotfish_workers.verify.worker import NotMine, VerifyWorker
from tests.engines_kit import LIMIT_SECONDS, until
from tests.tiny_models import build_tiny
from tests.worker_kit import plain

pytestmark = pytest.mark.integration

TARGET = "simulated:pass_ms=1,vocab=300,context=64"


class Desk:
    """A worker whose engine runs, and the records it works on."""

    def __init__(self, client: Any, keys: Keys, url: str, target: str = TARGET) -> None:
        self.client, self.keys = client, keys
        self.settings = Settings.from_env({}, broker_url=url, model="m", target=target)
        self.worker = VerifyWorker(self.settings, make_app(self.settings))
        self.worker.open()
        self.worker.engine.start()
        identity = self.worker.identity
        Leases(client, keys, identity, "verify", "m", 600).register(16, {})
        self.records = JobRecords(client, keys, 100)

    def submit(self, job: str, prompt: Any, group: str = "", **params: Any) -> None:
        spec = JobSpec(model="m", prompt=prompt, params=SamplingParams(**params), group=group)
        self.records.submit([(job, spec)])

    def record(self, job: str) -> JobRecord:
        return self.records.get(job)

    def output(self, job: str) -> list[int]:
        return read_progress(self.client, self.keys, self.records, job).output


@contextmanager
def serving(desk: Desk) -> Iterator[Desk]:
    yield desk
    desk.worker.engine.stop()
    desk.worker.engine.join(LIMIT_SECONDS)
    assert not desk.worker.engine.is_alive
    assert desk.worker.held() == {}


@pytest.fixture
def desk(redis_client: Any, keys: Keys, redis_url: str) -> Iterator[Desk]:
    with serving(Desk(redis_client, keys, redis_url)) as desk:
        yield desk


def test_text_chat_and_ids_are_served_and_summarised(desk: Desk) -> None:
    desk.submit("text", "hello", max_tokens=9)
    desk.submit("chat", [{"role": "user", "content": "hello"}], max_tokens=9)
    desk.submit("ids", list(b"hello"), max_tokens=9)
    for job in ("text", "chat", "ids"):
        summary = desk.worker.run(job)
        assert (summary["tokens"], summary["finish_reason"]) == (9, "length")
        assert desk.output(job) == plain(SimulatedModel(TARGET), list(b"hello"), 9)
    assert desk.record("text").visible == 9


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        pytest.param("x" * 64, "leaves no room", id="as long as the context"),
        pytest.param([1, 300], "300 is not below", id="an id that the model does not have"),
    ],
)
def test_a_prompt_that_cannot_be_served_fails_that_job_with_the_reason(
    desk: Desk, prompt: Any, reason: str
) -> None:
    desk.submit("j", prompt, group="g")
    with pytest.raises(JobFailed, match=reason):
        desk.worker.run("j")
    record = desk.record("j")
    assert record.status is Status.FAILED
    assert reason in record.error
    assert desk.client.xlen(desk.keys.done("g")) == 1


def test_a_damaged_job_fails_for_good_instead_of_coming_back_for_ever(desk: Desk) -> None:
    desk.submit("j", [1, 2], group="g")
    desk.client.hset(desk.keys.job("j"), "committed", 5)
    with pytest.raises(JobFailed, match="holds 0 of 5"):
        desk.worker.run("j")
    assert desk.record("j").status is Status.FAILED
    assert desk.client.xlen(desk.keys.done("g")) == 1
    with pytest.raises(NotMine, match="ended"):
        desk.worker.run("j")


@pytest.mark.parametrize("output", [[7, 300], [7, 2**32 - 1], [7] * 4, [7] * 9])
def test_output_that_the_job_cannot_have_fails_it_before_the_engine_sees_it(
    desk: Desk, output: list[int]
) -> None:
    desk.submit("j", [1, 2], max_tokens=4)
    desk.client.hset(desk.keys.job("j"), "committed", len(output))
    desk.client.xadd(desk.keys.tokens("j"), {"p": 0, "t": pack_ids(output), "o": 0, "x": ""})
    with pytest.raises(JobFailed, match="cannot have written"):
        desk.worker.run("j")
    assert desk.record("j").status is Status.FAILED
    desk.submit("other", [1, 2], max_tokens=4)
    assert desk.worker.run("other")["tokens"] == 4


def test_the_longest_prompt_that_leaves_room_gets_what_room_there_is(desk: Desk) -> None:
    desk.submit("j", [1] * 60, max_tokens=1000)
    assert desk.worker.run("j")["tokens"] == 4


def test_a_second_doorbell_for_a_running_job_does_nothing(desk: Desk) -> None:
    desk.submit("j", [1, 2], max_tokens=60)
    runner = threading.Thread(target=desk.worker.run, args=("j",))
    runner.start()
    until(lambda: desk.record("j").status is Status.RUNNING, "the job runs")
    with pytest.raises(NotMine, match=r"here already|ended"):
        desk.worker.run("j")
    runner.join(LIMIT_SECONDS)
    assert (desk.record("j").committed, desk.record("j").epoch) == (60, 1)
    with pytest.raises(NotMine, match="ended"):
        desk.worker.run("j")


def test_a_claim_whose_answer_was_lost_is_made_good_by_the_next(desk: Desk) -> None:
    desk.submit("j", [1, 2], max_tokens=5)
    assert desk.worker._ownership.claim("j") == ("claimed", 1)
    assert desk.worker.run("j")["tokens"] == 5
    assert desk.record("j").epoch == 1


def test_a_spec_that_cannot_be_read_fails_its_job_once(desk: Desk) -> None:
    desk.submit("j", [1, 2], group="g")
    desk.client.hset(desk.keys.job("j"), "spec", msgpack.packb([99, {"from": "the future"}]))
    with pytest.raises(JobFailed, match="format version 99"):
        desk.worker.run("j")
    assert desk.client.hget(desk.keys.job("j"), "status") == b"failed"
    assert desk.client.xlen(desk.keys.done("g")) == 1


def test_a_failure_that_nobody_foresaw_fails_its_job_with_its_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.submit("j", "text")
    monkeypatch.setattr(desk.worker._text, "encode", lambda text: {}["surprise"])
    with pytest.raises(JobFailed, match="KeyError: 'surprise'"):
        desk.worker.run("j")
    assert desk.record("j").status is Status.FAILED
    assert desk.worker.held() == {}


def test_what_no_repetition_heals_fails_the_job_instead_of_going_round(desk: Desk) -> None:
    desk.submit("j", [1, 2])
    desk.client.set(desk.keys.tokens("j"), "no stream")
    with pytest.raises(NotMine, match="refuses to end the job"):
        desk.worker.run("j")  # its end cannot be written to such a stream either
    assert desk.worker.held() == {}
    assert desk.record("j").status is Status.FAILED


def test_a_job_that_somebody_else_took_meanwhile_is_not_reported_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.submit("j", "text")

    def encode(text: str) -> list[int]:
        desk.client.hset(desk.keys.job("j"), mapping={"owner": "somebody", "epoch": 2})
        raise KeyError(text)

    monkeypatch.setattr(desk.worker._text, "encode", encode)
    with pytest.raises(NotMine, match="fenced"):
        desk.worker.run("j")
    assert desk.record("j").status is Status.RUNNING


def test_output_that_another_model_began_is_not_continued(desk: Desk) -> None:
    desk.submit("new", [1, 2], max_tokens=3)
    desk.client.hset(desk.keys.job("new"), mapping={"fingerprint": "other", "prompt_ids": b""})
    assert desk.worker.run("new")["tokens"] == 3  # nothing was committed: it starts afresh
    desk.submit("begun", [1, 2], max_tokens=3)
    desk.client.hset(desk.keys.job("begun"), mapping={"fingerprint": "other", "committed": 1})
    desk.client.xadd(desk.keys.tokens("begun"), {"p": 0, "t": pack_ids([7]), "o": 0, "x": "h"})
    with pytest.raises(JobFailed, match="another model"):
        desk.worker.run("begun")
    assert desk.record("begun").committed == 1


def test_two_models_do_not_serve_under_one_name(desk: Desk, redis_url: str) -> None:
    fields = {"fingerprint": "another"}
    other = Identity("verify-other", "nonce")
    Leases(desk.client, desk.keys, other, "verify", "m", 600).register(1, fields)
    late = VerifyWorker(desk.settings, make_app(desk.settings))
    with pytest.raises(ConfigError, match="verify-other serves another model"):
        late.open()


def test_a_draining_worker_claims_nothing(desk: Desk) -> None:
    desk.submit("j", [1, 2])
    desk.worker.drain()
    with pytest.raises(NotMine, match="draining"):
        desk.worker.run("j")
    assert desk.record("j").status is Status.QUEUED


def test_a_job_that_was_drained_is_queued_again_with_what_it_has(desk: Desk) -> None:
    desk.submit("j", [1, 2], max_tokens=60)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            desk.worker.run("j")
        except NotMine as error:
            errors.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    until(lambda: desk.record("j").committed > 3, "the job is under way")
    desk.worker.engine.stop()
    runner.join(LIMIT_SECONDS)
    assert [str(error) for error in errors] == ["drained"]
    record = desk.record("j")
    assert (record.status, record.attempts) == (Status.QUEUED, 0)
    output = desk.output("j")
    assert output == plain(SimulatedModel(TARGET), [1, 2], 60)[: len(output)]
    assert len(output) == record.committed < 60


@pytest.mark.slow
def test_a_grammar_that_takes_long_to_compile_keeps_no_other_job_waiting(
    redis_client: Any, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    target = str(build_tiny(tmp_path, "llama"))
    with (
        serving(Desk(redis_client, keys, redis_url, target)) as desk,
        ThreadPoolExecutor() as slots,
    ):
        desk.submit("first", "a", regex="a", max_tokens=4)  # reads the vocabulary
        desk.worker.run("first")
        desk.submit("slow", "a", regex="a?" * 12_000)
        desk.submit("text", "a", bad_words=["b"], max_tokens=4)
        slow = slots.submit(desk.worker.run, "slow")
        until(lambda: "grammar" in {thread.name for thread in threading.enumerate()}, "compiling")
        assert desk.worker.run("text")["tokens"] == 4
        assert not slow.done()
        assert slow.result(LIMIT_SECONDS)["finish_reason"] == "stop"
