"""Submitting and dispatching: jobs enter once, in order, and bells ring for free slots only."""

from __future__ import annotations

import base64
import json

import pytest

from pilotfish_broker.celery_app import GENERATE
from pilotfish_broker.dispatch import RING_AGAIN_MS
from pilotfish_broker.errors import InvalidRequest, JobNotFound
from pilotfish_broker.keys import verify_queue
from pilotfish_broker.models import ModelRecord, list_models, read_vocabulary, write_model
from pilotfish_broker.records import new_job_id
from pilotfish_broker.spec import Status
from tests.broker_kit import MODEL, Bench, spec

pytestmark = pytest.mark.integration


def dispatch_order(bench: Bench) -> list[str]:
    """Ids in the order in which their doorbells wait in the Celery list, oldest first."""
    raw = bench.client.lrange(bench.keys.celery_queue(verify_queue(MODEL)), 0, -1)
    return [json.loads(message)["headers"]["id"] for message in reversed(raw)]


def test_a_repeated_submission_changes_nothing(bench: Bench) -> None:
    jobs = [("a", spec("one")), ("b", spec("two", priority=5))]
    assert bench.records.submit(jobs) == 2
    before = bench.dump()
    assert bench.records.submit(jobs) == 0
    assert bench.dump() == before


def test_the_same_id_twice_in_one_call_is_one_job(bench: Bench) -> None:
    assert bench.records.submit([("a", spec()), ("a", spec())]) == 1
    assert bench.pending() == {"a"}


@pytest.mark.parametrize("other", [spec("other"), spec(priority=1), spec(group="g")])
def test_an_id_of_another_request_is_refused_and_the_job_stays(bench: Bench, other: object) -> None:
    bench.submit("a")
    before = bench.dump()
    with pytest.raises(InvalidRequest, match="another request"):
        bench.records.submit([("a", other)])  # type: ignore[list-item]
    assert bench.dump() == before


@pytest.mark.parametrize("job", ["", "a:tokens", "a b", "ä", "x" * 129])
def test_a_malformed_id_is_refused_before_anything_is_written(bench: Bench, job: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bench.records.submit([("good", spec()), (job, spec())])
    assert caught.value.field == "id"
    assert bench.dump() == {}


def test_more_jobs_than_one_pipeline_holds_all_arrive(bench: Bench) -> None:
    ids = [f"j{number}" for number in range(1201)]
    assert bench.records.submit((job, spec()) for job in ids) == 1201
    assert bench.pending() == set(ids)


def test_a_fresh_record_reads_back_what_was_submitted(bench: Bench) -> None:
    submitted = spec("né🦈", priority=-3, group="g")
    bench.records.submit([("a", submitted)])
    record = bench.records.get("a")
    assert record.spec == submitted
    assert (record.status, record.epoch, record.attempts) == (Status.QUEUED, 0, 0)
    assert (record.committed, record.visible, record.rounds) == (0, 0, 0)
    assert record.prompt_ids is None
    assert record.submitted_ms > 1_700_000_000_000
    assert (record.started_ms, record.finished_ms) == (0, 0)


def test_an_unknown_job_is_not_found(bench: Bench) -> None:
    with pytest.raises(JobNotFound) as caught:
        bench.records.get("nobody")
    assert caught.value.job_id == "nobody"


def test_job_ids_are_valid_and_differ() -> None:
    assert len({new_job_id() for _ in range(1000)}) == 1000


def test_bells_ring_by_priority_and_then_by_age(bench: Bench) -> None:
    for job, priority in [("d", 0), ("b", 7), ("f", -100), ("a", 100), ("e", 0), ("c", 7)]:
        bench.submit(job, priority=priority)
    bench.worker("w", slots=10)
    assert bench.dispatcher.top_up(MODEL) == 6
    assert dispatch_order(bench) == ["a", "b", "c", "d", "e", "f"]


def test_no_more_bells_ring_than_live_workers_have_free_slots(bench: Bench) -> None:
    bench.submit(*"abcdefgh")
    assert bench.dispatcher.top_up(MODEL) == 0, "there is no worker"
    worker = bench.worker("w1", slots=2)
    assert bench.dispatcher.top_up(MODEL) == 2
    assert bench.dispatcher.top_up(MODEL) == 0, "both slots are rung for"
    worker.own.claim("a")
    worker.own.claim("b")
    assert bench.dispatcher.top_up(MODEL) == 0, "both slots are taken"
    bench.worker("w2", slots=3)
    assert bench.dispatcher.top_up(MODEL) == 3
    worker.finish("a", 1, 0, [])
    assert bench.dispatcher.top_up(MODEL) == 1
    assert bench.pending() == {"g", "h"}
    assert bench.dispatched() == {"c", "d", "e", "f"}


def test_slots_of_a_worker_whose_lease_ended_do_not_count(bench: Bench) -> None:
    bench.submit(*"abcd")
    dead = bench.worker("dead", slots=3)
    bench.worker("live", slots=1)
    dead.expire()
    assert bench.dispatcher.top_up(MODEL) == 1


def test_slots_of_draft_workers_and_other_models_do_not_count(bench: Bench) -> None:
    bench.submit("a")
    bench.records.submit([("other", spec(model="m2"))])
    bench.worker("w", slots=5)
    assert bench.dispatcher.top_up("m2") == 0
    assert bench.dispatcher.top_up(MODEL) == 1
    assert bench.ids(bench.keys.pending("m2")) == {"other"}


def test_a_bell_that_was_lost_rings_again_and_one_that_waits_does_not(bench: Bench) -> None:
    bench.submit(*"ab")
    bench.worker("w")
    bench.dispatcher.top_up(MODEL)
    queue = bench.keys.celery_queue(verify_queue(MODEL))
    long_ago = {"a": 1, "b": 1}
    bench.client.zadd(bench.keys.dispatched(MODEL), long_ago)
    assert bench.dispatcher.ring_lost(MODEL) == 0, "both messages wait"
    bench.client.lpop(queue)
    assert bench.dispatcher.ring_lost(MODEL) == 2
    bench.client.delete(queue)
    assert bench.dispatcher.ring_lost(MODEL) == 0, "they have just rung"
    assert bench.dispatched() == {"a", "b"}


def test_a_bell_that_rang_just_now_is_given_time(bench: Bench) -> None:
    bench.submit("a")
    bench.worker("w")
    bench.dispatcher.top_up(MODEL)
    bench.client.delete(bench.keys.celery_queue(verify_queue(MODEL)))
    assert bench.dispatcher.ring_lost(MODEL) == 0
    key = bench.keys.dispatched(MODEL)
    bench.client.zincrby(key, -RING_AGAIN_MS - 1, "a")
    assert bench.dispatcher.ring_lost(MODEL) == 1


def test_a_message_carries_the_id_and_nothing_of_the_job(bench: Bench) -> None:
    bench.submit("job-1", prompt="a secret prompt", group="grp")
    bench.worker("w")
    bench.dispatcher.top_up(MODEL)
    (raw,) = bench.client.lrange(bench.keys.celery_queue("verify.m"), 0, -1)
    message = json.loads(raw)
    assert message["content-type"] == "application/json"
    assert message["content-encoding"] == "utf-8"
    assert message["headers"]["task"] == GENERATE
    assert message["headers"]["id"] == "job-1"
    args, kwargs, embedded = json.loads(base64.b64decode(message["body"]))
    assert (args, kwargs) == (["job-1"], {})
    assert not any(embedded.values())
    assert b"secret" not in raw + base64.b64decode(message["body"])
    assert b"grp" not in raw


def test_celerys_keys_stay_under_the_namespace(bench: Bench) -> None:
    bench.submit("a")
    bench.worker("w")
    bench.dispatcher.top_up(MODEL)
    assert all(key.startswith(b"pf:") for key in bench.client.scan_iter())


def test_a_model_record_stays_when_workers_leave(bench: Bench) -> None:
    record = ModelRecord("m", 2048, 3, "tok", "print", "llama")
    write_model(bench.client, bench.keys, record, ["a", "né", "🦈"])
    assert list_models(bench.client, bench.keys) == [record]
    assert read_vocabulary(bench.client, bench.keys, "m") == ["a", "né", "🦈"]
    assert read_vocabulary(bench.client, bench.keys, "other") is None
    assert all(bench.client.ttl(key) == -1 for key in bench.client.scan_iter())
