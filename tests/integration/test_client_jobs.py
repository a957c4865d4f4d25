"""The client against a real server: submit, stream, wait, cancel, and what it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
import redis

from pilotfish import (
    BrokerMisconfigured,
    BrokerUnavailable,
    Client,
    ConfigError,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFound,
    JobSpec,
    JobTimeout,
    SamplingParams,
    Status,
    UnknownModel,
)
from pilotfish_broker.connection import connect
from pilotfish_broker.keys import Keys
from tests.client_kit import CONTEXT, MODEL, VOCABULARY, Background, Speaker, serve_model

pytestmark = pytest.mark.integration

ROUNDS = [([1, 2], "ab"), ([3], ""), ([4, 5], "cde")]


@pytest.fixture
def client(redis_url: str, redis_client: Any, keys: Keys) -> Iterator[Client]:
    serve_model(redis_client, keys)
    with Client(redis_url) as client:
        yield client


@pytest.fixture
def speaker(redis_url: str, keys: Keys) -> Iterator[Speaker]:
    speaker = Speaker(redis_url, keys)
    speaker.register()
    yield speaker
    speaker.close()


def queued(redis_client: Any, keys: Keys) -> set[bytes]:
    """Ids that wait, with or without a doorbell."""
    names = (keys.pending(MODEL), keys.dispatched(MODEL))
    return {job for name in names for job in redis_client.zrange(name, 0, -1)}


def test_a_submitted_job_is_queued_for_the_only_model(
    client: Client, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi", SamplingParams(max_tokens=3), priority=2)
    record = job.record()
    assert (record.spec.model, record.spec.prompt, record.spec.priority) == (MODEL, "hi", 2)
    assert job.status() is Status.QUEUED
    assert queued(redis_client, keys) == {job.id.encode()}


def test_submitting_rings_for_a_live_worker(
    client: Client, speaker: Speaker, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi")
    assert redis_client.zrange(keys.dispatched(MODEL), 0, -1) == [job.id.encode()]
    assert redis_client.llen(keys.celery_queue(f"verify.{MODEL}")) == 1


def test_the_same_id_is_the_same_job_and_another_request_under_it_is_refused(
    client: Client, redis_client: Any, keys: Keys
) -> None:
    client.submit("hi", id="a")
    client.submit("hi", id="a")
    assert queued(redis_client, keys) == {b"a"}
    with pytest.raises(InvalidRequest, match="job id a belongs to another request"):
        client.submit("other", id="a")


def test_without_a_name_there_must_be_exactly_one_model(
    client: Client, redis_client: Any, keys: Keys
) -> None:
    serve_model(redis_client, keys, "n")
    with pytest.raises(UnknownModel, match="m, n"):
        client.submit("hi")
    assert client.submit("hi", model="n").record().spec.model == "n"


def test_a_name_that_nobody_served_is_refused_unless_it_is_waited_for(
    client: Client, redis_client: Any
) -> None:
    with pytest.raises(UnknownModel, match=r"'nope'; served so far: m"):
        client.submit("hi", model="nope")
    assert not redis_client.keys("pf:job:*")
    assert client.submit("hi", model="nope", wait_for_model=True).status() is Status.QUEUED


def test_with_no_model_at_all_the_client_says_so(redis_url: str) -> None:
    with Client(redis_url) as client, pytest.raises(UnknownModel, match="no model has been served"):
        client.submit("hi")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([VOCABULARY], f"token id {VOCABULARY} is not below the vocabulary size {VOCABULARY}"),
        ([1] * CONTEXT, f"has {CONTEXT} tokens; the model's context of {CONTEXT} leaves"),
        ("", "empty"),
        ([], "not empty"),
    ],
)
def test_a_prompt_that_cannot_be_served_writes_nothing(
    client: Client, redis_client: Any, prompt: Any, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        client.submit(prompt)
    assert not redis_client.keys("pf:job:*")


def test_many_jobs_are_all_checked_before_one_is_written(client: Client, redis_client: Any) -> None:
    good = JobSpec(model=MODEL, prompt="a", params=SamplingParams())
    bad = JobSpec(model=MODEL, prompt=[VOCABULARY], params=SamplingParams())
    with pytest.raises(InvalidRequest):
        client.submit_many([good, bad])
    with pytest.raises(InvalidRequest, match="2 jobs, but 1 ids"):
        client.submit_many([good, good], ids=["a"])
    with pytest.raises(InvalidRequest, match="is no job id"):
        client.submit_many([good, good], ids=["a", "b c"])
    assert not redis_client.keys("pf:job:*")
    assert len({job.id for job in client.submit_many([good] * 3)}) == 3


def test_a_stream_gives_each_commit_as_it_comes_and_ends(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    epoch = speaker.begin(job.id)
    read = threading.Semaphore(0)

    def speak() -> None:
        length = 0
        for tokens, text in ROUNDS:
            length = speaker.commit(job.id, epoch, length, tokens, text)
            assert read.acquire(timeout=20)  # the next only after the reader has this one
        speaker.end(job.id, epoch, length)

    with Background(speak):
        chunks = []
        for chunk in job.stream(timeout=30):
            chunks.append((chunk.token_ids, chunk.text, chunk.position))
            read.release()
    assert chunks == [([1, 2], "ab", 0), ([3], "", 2), ([4, 5], "cde", 3)]


def test_a_result_holds_all_that_was_committed(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    speaker.run(job.id, ROUNDS)
    result = job.result(timeout=10)
    assert (result.text, result.token_ids) == ("abcde", [1, 2, 3, 4, 5])
    assert (result.finish_reason, result.prompt_tokens, result.completion_tokens) == ("stop", 2, 5)
    assert (result.rounds, result.drafted, result.accepted) == (3, 6, 2)
    assert 0 < result.started_ms <= result.finished_ms
    assert client.job(job.id).result(timeout=0) == result


def test_entries_that_stand_in_the_stream_twice_are_read_once(
    client: Client, speaker: Speaker, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi")
    epoch = speaker.begin(job.id)
    length = speaker.say(job.id, epoch, ROUNDS)
    for _, fields in redis_client.xrange(keys.tokens(job.id))[1:]:
        redis_client.xadd(keys.tokens(job.id), fields)
    speaker.end(job.id, epoch, length)
    assert "".join(chunk.text for chunk in job.stream(timeout=10)) == "abcde"
    assert job.result(timeout=0).token_ids == [1, 2, 3, 4, 5]


def test_a_stream_longer_than_one_read_is_whole_even_without_waiting(
    client: Client, speaker: Speaker
) -> None:
    job = client.submit("hi")
    speaker.run(job.id, [([n % 250], "y") for n in range(1200)])
    assert len(job.result(timeout=0).token_ids) == 1200


def test_a_failed_job_raises_its_reason_after_its_last_chunk(
    client: Client, speaker: Speaker
) -> None:
    job = client.submit("hi")
    epoch = speaker.begin(job.id)
    length = speaker.say(job.id, epoch, ROUNDS[:1])
    speaker.end(job.id, epoch, length, Status.FAILED, "the model exploded")
    with pytest.raises(JobFailed, match="the model exploded"):
        job.result(timeout=5)
    stream = job.stream(timeout=5)
    assert next(stream).text == "ab"
    with pytest.raises(JobFailed, match="the model exploded"):
        next(stream)
    assert job.wait(timeout=5).error == "the model exploded"


def test_a_queued_job_is_cancelled_at_once(client: Client) -> None:
    job = client.submit("hi")
    assert job.cancel() == "cancelled"
    assert job.status() is Status.CANCELLED
    with pytest.raises(JobCancelled):
        job.result(timeout=5)
    assert job.cancel() == "ended"


def test_a_running_job_is_flagged_for_its_worker(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    epoch = speaker.begin(job.id)
    assert client.cancel(job.id) == "flagged"
    assert speaker.leases.renew({job.id: epoch}) == {job.id: "cancel"}


def test_a_deadline_of_the_caller_leaves_the_job_alone(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    for seconds in (0, 0.3):
        with pytest.raises(JobTimeout, match=f"{seconds:g} s"):
            job.result(timeout=seconds)
    speaker.run(job.id)
    assert job.result(timeout=5).token_ids == [7]


def test_a_deadline_holds_while_tokens_keep_coming(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    epoch = speaker.begin(job.id)
    stopped = threading.Event()

    def speak() -> None:
        length = 0
        while not stopped.wait(0.01):
            length = speaker.commit(job.id, epoch, length, [9], "z")

    with Background(speak):
        try:
            with pytest.raises(JobTimeout):
                list(job.stream(timeout=0.5))
        finally:
            stopped.set()


def test_an_unknown_job_is_not_found(client: Client) -> None:
    job = client.job("nope")
    calls: list[Callable[[], Any]] = [job.status, job.result, job.cancel, lambda: [*job.stream()]]
    for call in calls:
        with pytest.raises(JobNotFound):
            call()


def test_a_record_that_goes_away_ends_the_wait(
    client: Client, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi")

    def forget() -> None:
        time.sleep(0.2)  # until the reader waits; if it does not yet, the test holds as well
        redis_client.delete(keys.job(job.id), keys.tokens(job.id))

    with Background(forget), pytest.raises(JobNotFound):
        job.result(timeout=20)


def test_completions_of_a_group_can_be_read_on_from_any_of_them(
    client: Client, speaker: Speaker
) -> None:
    jobs = [client.submit("hi", group="g", id=name) for name in ("a", "b", "c")]
    for job in jobs[:2]:
        speaker.run(job.id, group="g")
    first = list(client.completions("g", timeout=0))
    assert [(item.job_id, item.status) for item in first] == [
        ("a", Status.SUCCEEDED),
        ("b", Status.SUCCEEDED),
    ]
    jobs[2].cancel()
    rest = list(client.completions("g", after=first[0].cursor, timeout=0.1))
    assert [item.job_id for item in rest] == ["b", "c"]
    assert rest[1].status is Status.CANCELLED


def test_results_of_many_jobs_tell_the_ended_from_the_rest(
    client: Client, speaker: Speaker
) -> None:
    ended, waiting = client.submit("hi"), client.submit("hi")
    speaker.run(ended.id)
    found = client.results([waiting.id, ended.id, "nope"])
    assert [result and result.job_id for result in found] == [None, ended.id, None]
    assert client.committed([ended.id, waiting.id, "nope"]) == 1


def test_the_deployment_can_be_looked_at(client: Client, speaker: Speaker) -> None:
    client.submit("hi")
    speaker.begin(client.submit("hi").id)
    assert [model.name for model in client.models()] == [MODEL]
    assert [(w.id, w.kind, w.is_alive) for w in client.workers()] == [("w1", "verify", True)]
    assert "nonce" not in client.workers()[0].fields
    (queue,) = client.queues()
    assert (queue.queued + queue.ringing, queue.running) == (1, 1)
    assert client.is_served(MODEL)
    assert not client.is_served("n")


def test_a_stream_outlives_a_restart_of_the_server(
    start_valkey: Callable[..., Any], keys: Keys
) -> None:
    server = start_valkey(appendonly="yes", appendfsync="always")
    speaker = Speaker(server.url, keys)
    with Client(server.url) as client:
        serve_model(speaker.client, keys)
        speaker.register()
        job = client.submit("hi")
        epoch = speaker.begin(job.id)
        length = speaker.say(job.id, epoch, ROUNDS)

        def restart() -> None:
            server.stop()
            server.start()
            speaker.end(job.id, epoch, length)

        stream = job.stream(timeout=60)
        text = next(stream).text
        with Background(restart):
            text += "".join(chunk.text for chunk in stream)
        assert text == "abcde"
    speaker.close()


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with Client("redis://127.0.0.1:1/0") as client:
        for call in (client.models, client.workers, lambda: client.submit("hi", model="m")):
            with pytest.raises(BrokerUnavailable, match=r"redis://127\.0\.0\.1:1/0"):
                call()


def test_a_password_never_reaches_a_message() -> None:
    with (
        Client("redis://:hunter2@127.0.0.1:1/0") as client,
        pytest.raises(BrokerUnavailable) as caught,
    ):
        client.models()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_keys_is_refused_before_anything_is_written(
    start_valkey: Callable[..., Any], policy: str
) -> None:
    server = start_valkey(maxmemory_policy=policy)
    with Client(server.url) as client, pytest.raises(BrokerMisconfigured, match=policy):
        client.submit("hi", model="m", wait_for_model=True)
    with connect(server.url) as plain:
        assert plain.dbsize() == 0


def test_an_evicting_broker_beside_a_good_data_server_is_refused(
    start_valkey: Callable[..., Any], redis_url: str
) -> None:
    server = start_valkey(maxmemory_policy="allkeys-lru")
    with (
        Client(server.url, data_url=redis_url) as client,
        pytest.raises(BrokerMisconfigured, match="allkeys-lru"),
    ):
        client.models()


def test_a_full_server_refuses_with_a_typed_error(start_valkey: Callable[..., Any]) -> None:
    server = start_valkey(maxmemory="2mb")
    with connect(server.url) as plain, suppress(redis.exceptions.OutOfMemoryError):
        for _ in range(64):
            plain.append("filler", "x" * 65536)
    with Client(server.url) as client, pytest.raises(BrokerUnavailable, match="refused"):
        client.submit("hi", model="m", wait_for_model=True)


@pytest.mark.parametrize("url", ["localhost:6379", "redis://host:port/0", "http://x"])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError):
        Client(url)


def test_a_client_from_the_environment_reads_its_variables(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, redis_client: Any
) -> None:
    monkeypatch.setenv("PILOTFISH_BROKER_URL", redis_url)
    monkeypatch.setenv("PILOTFISH_NAMESPACE", "other")
    serve_model(redis_client, Keys("other"))
    with Client.from_env() as client:
        assert [model.name for model in client.models()] == [MODEL]


def test_a_closed_client_opens_again(client: Client) -> None:
    client.submit("hi")
    client.close()
    assert client.submit("hi").status() is Status.QUEUED


def test_closing_one_client_leaves_another_of_the_same_server_alone(
    client: Client, speaker: Speaker, redis_client: Any, redis_url: str, keys: Keys
) -> None:
    client.submit("hi")
    with Client(redis_url) as other:
        other.submit("hi")
    client.submit("hi")
    assert redis_client.llen(keys.celery_queue(f"verify.{MODEL}")) == 3


def test_doorbells_are_counted_on_the_brokers_server_not_on_that_of_the_records(
    redis_client: Any, redis_url: str, keys: Keys
) -> None:
    broker_url = redis_url.rpartition("/")[0] + "/1"
    serve_model(redis_client, keys)
    speaker = Speaker(redis_url, keys)
    speaker.register()
    with Client(broker_url, data_url=redis_url) as client, connect(broker_url) as broker:
        job = client.submit("hi")
        assert broker.llen(keys.celery_queue(f"verify.{MODEL}")) == 1
        redis_client.zadd(keys.dispatched(MODEL), {job.id: 0})  # it rang long ago
        assert client._connection._dispatcher.ring_lost(MODEL) == 0
        broker.flushdb()
        assert client._connection._dispatcher.ring_lost(MODEL) == 1
        broker.flushdb()
    speaker.close()


def test_a_record_does_not_hand_out_what_fences_its_owner(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    speaker.begin(job.id)
    record = job.record()
    assert record.worker == speaker.identity.worker
    assert speaker.identity.nonce not in str(asdict(record))


def test_a_client_leaves_no_thread_behind(client: Client, speaker: Speaker) -> None:
    before = threading.active_count()
    job = client.submit("hi")
    speaker.run(job.id)
    job.result(timeout=5)
    assert threading.active_count() == before
