"""What a verify worker does around its engine, on a simulated model and without Celery."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pilotfish_broker.celery_app import make_app
from pilotfish_broker.errors import JobFailed
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.records import JobRecord, JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import JobSpec, SamplingParams, Status
from pilotfish_checkpoint.progress import read_progress
from pilotfish_workers.simulated import SimulatedModel
from pilotfish_workers.verify.worker import NotMine, VerifyWorker
from tests.engines_kit import LIMIT_SECONDS, until
from tests.worker_kit import plain

pytestmark = pytest.mark.integration

TARGET = "simulated:pass_ms=1,vocab=300,context=64"


class Desk:
    """A worker whose engine runs, and the records it works on."""

    def __init__(self, client: Any, keys: Keys, url: str) -> None:
        self.client, self.keys = client, keys
        self.settings = Settings.from_env({}, broker_url=url, model="m", target=TARGET)
        self.worker = VerifyWorker(self.settings, make_app(self.settings))
        self.worker.open()
        self.worker.start_engine()
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


@pytest.fixture
def desk(redis_client: Any, keys: Keys, redis_url: str) -> Iterator[Desk]:
    desk = Desk(redis_client, keys, redis_url)
    yield desk
    desk.worker.stop_engine()
    desk.worker.join_engine(LIMIT_SECONDS)
    assert not desk.worker.is_engine_alive
    assert desk.worker.held() == {}


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


def test_the_longest_prompt_that_leaves_room_gets_what_room_there_is(desk: Desk) -> None:
    desk.submit("j", [1] * 60, max_tokens=1000)
    assert desk.worker.run("j")["tokens"] == 4


def test_a_second_doorbell_for_a_running_job_does_nothing(desk: Desk) -> None:
    desk.submit("j", [1, 2], max_tokens=60)
    runner = threading.Thread(target=desk.worker.run, args=("j",))
    runner.start()
    until(lambda: desk.record("j").status is Status.RUNNING, "the job runs")
    with pytest.raises(NotMine, match=r"yours|ended"):
        desk.worker.run("j")
    runner.join(LIMIT_SECONDS)
    assert desk.record("j").committed == 60
    with pytest.raises(NotMine, match="ended"):
        desk.worker.run("j")


def test_a_job_of_an_earlier_epoch_does_not_take_the_later_one_off_the_list(desk: Desk) -> None:
    """The worker lost a job and claimed it again: it must still say that it holds it."""
    desk.submit("j", [1, 2], max_tokens=2)
    desk.worker._held["j"] = 0
    held: list[dict[str, int]] = []
    engine = desk.worker._engine
    original = engine.add

    def add(sequence: Any) -> None:
        desk.worker._held["j"] = sequence.epoch + 1
        original(sequence)

    engine.add = add  # type: ignore[method-assign]
    desk.worker.run("j")
    held.append(dict(desk.worker.held()))
    desk.worker._held.clear()
    assert held == [{"j": 2}]


def test_a_draining_worker_claims_nothing(desk: Desk) -> None:
    desk.submit("j", [1, 2])
    desk.worker.is_draining.set()
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
    desk.worker.stop_engine()
    runner.join(LIMIT_SECONDS)
    assert [str(error) for error in errors] == ["drained"]
    record = desk.record("j")
    assert (record.status, record.attempts) == (Status.QUEUED, 0)
    output = desk.output("j")
    assert output == plain(SimulatedModel(TARGET), [1, 2], 60)[: len(output)]
    assert len(output) == record.committed < 60
