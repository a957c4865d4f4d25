"""Several samples of one prompt: a job each, and one handle that speaks for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pilotfish import (
    Client,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFound,
    JobSpec,
    JobTimeout,
    SamplingParams,
    Status,
)
from pilotfish.cli import run_command
from pilotfish_broker.keys import Keys
from pilotfish_broker.logprobs import Alternative, TokenLogprob
from tests.client_kit import MODEL, VOCABULARY, Background, Speaker, serve_model

pytestmark = pytest.mark.integration

THREE = SamplingParams(n=3, temperature=0.8, seed=7)


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


def queued(redis_client: Any, keys: Keys) -> list[str]:
    """Ids that wait, in their order."""
    return [job.decode() for job in redis_client.zrange(keys.pending(MODEL), 0, -1)]


def test_each_sample_is_a_record_of_its_own_and_the_first_is_written_last(
    client: Client, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi", THREE, id="a", priority=2, group="g")
    assert queued(redis_client, keys) == ["a.2", "a.1", "a"]
    assert job.sample_ids() == ["a", "a.1", "a.2"]
    records = client.records(job.sample_ids())
    specs = [record.spec for record in records if record is not None]
    assert specs == [
        JobSpec(model=MODEL, prompt="hi", params=THREE, priority=2, group="g", sample=sample)
        for sample in range(3)
    ]
    assert job.record() == records[0]


def test_samples_end_in_any_order_and_the_result_is_there_with_the_last(
    client: Client, speaker: Speaker
) -> None:
    job = client.submit("hi", THREE)
    first, second, third = job.sample_ids()
    assert job.status() is Status.QUEUED
    speaker.run(third, [([5], "three")])
    assert job.status() is Status.RUNNING
    speaker.run(first, [([1, 2], "one")])
    assert client.results([job.id, third]) == [None, client.job(third).result(timeout=0)]
    with pytest.raises(JobTimeout, match=rf"job {second} was not done within 0 s"):
        job.result(timeout=0)
    epoch = speaker.begin(second)
    with Background(speaker.end, second, epoch, speaker.say(second, epoch, [([3], "two")])):
        result = client.job(job.id).result(timeout=20)  # from the id alone
    assert job.status() is Status.SUCCEEDED
    assert (result.job_id, result.text, result.token_ids) == (job.id, "one", [1, 2])
    assert [sample.text for sample in result.samples] == ["one", "two", "three"]
    assert [sample.sample for sample in result.samples] == [0, 1, 2]
    assert [sample.job_id for sample in result.samples] == [first, second, third]
    assert client.results([job.id]) == [result]


def test_a_single_sample_is_a_result_without_others(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi")
    speaker.run(job.id)
    result = job.result(timeout=5)
    assert (result.samples, result.sample) == ((result,), 0)


def test_a_later_samples_id_stands_for_that_sample_alone(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi", THREE, id="a")
    speaker.run("a.2", [([5], "three")])
    alone = client.job("a.2")
    assert alone.status() is Status.SUCCEEDED
    result = alone.result(timeout=5)
    assert (result.text, result.sample, result.others) == ("three", 2, ())
    assert client.cancel("a.1") == "cancelled"
    assert job.record().status is Status.QUEUED


def test_a_failed_sample_fails_the_job_when_all_have_ended(
    client: Client, speaker: Speaker
) -> None:
    job = client.submit("hi", THREE, id="a")
    speaker.end("a.1", speaker.begin("a.1"), 0, Status.FAILED, "no luck")
    assert job.status() is Status.RUNNING
    for sample in ("a", "a.2"):
        speaker.run(sample)
    assert job.status() is Status.FAILED
    with pytest.raises(JobFailed, match=r"job a\.1 failed: no luck"):
        job.result(timeout=5)
    result = job.wait(timeout=5)
    assert [sample.status for sample in result.samples] == [
        Status.SUCCEEDED,
        Status.FAILED,
        Status.SUCCEEDED,
    ]


def test_cancelling_ends_every_sample_that_has_not_ended(
    client: Client, speaker: Speaker, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi", THREE, id="a")
    speaker.run("a")
    epoch = speaker.begin("a.1")
    assert job.cancel() == "flagged"
    assert speaker.leases.renew({"a.1": epoch}) == {"a.1": "cancel"}
    assert client.job("a.2").status() is Status.CANCELLED
    assert speaker.own.release("a.1", epoch)
    assert job.status() is Status.CANCELLED
    assert job.cancel() == "ended"
    with pytest.raises(JobCancelled, match=r"job a\.1 was cancelled"):
        job.result(timeout=5)
    assert client.submit("hi", THREE).cancel() == "cancelled"
    assert queued(redis_client, keys) == []


def test_a_sample_whose_record_has_gone_is_past_cancelling_and_has_no_result(
    client: Client, speaker: Speaker, redis_client: Any, keys: Keys
) -> None:
    job = client.submit("hi", THREE, id="a")
    for sample in job.sample_ids():
        speaker.run(sample)
    redis_client.delete(keys.job("a.1"), keys.tokens("a.1"))
    assert job.cancel() == "ended"
    assert client.results(["a"]) == [None]
    for call in (job.status, job.result):
        with pytest.raises(JobNotFound, match=r"there is no job a\.1"):
            call()


def test_streams_are_read_sample_by_sample(client: Client, speaker: Speaker) -> None:
    job = client.submit("hi", THREE, id="a")
    speaker.run("a", [([1, 2], "on"), ([3], "e")])
    speaker.run("a.2", [([5], "three")])
    assert "".join(chunk.text for chunk in job.stream(timeout=5)) == "one"
    assert [chunk.token_ids for chunk in job.stream(timeout=5, sample=2)] == [[5]]
    with pytest.raises(JobTimeout):
        list(job.stream(timeout=0, sample=1))
    speaker.end("a.1", speaker.begin("a.1"), 0, Status.FAILED, "no luck")
    with pytest.raises(JobFailed, match=r"job a\.1 failed"):
        list(job.stream(timeout=5, sample=1))
    for sample in (-1, 3):
        with pytest.raises(InvalidRequest, match=f"has samples 0 to 2, not {sample}"):
            list(job.stream(sample=sample))


def test_submitting_again_adds_nothing_and_mends_what_is_missing(
    client: Client, speaker: Speaker, redis_client: Any, keys: Keys
) -> None:
    client.submit("hi", THREE, id="a")
    speaker.run("a.1", [([3], "two")])
    redis_client.delete(keys.job("a.2"))
    redis_client.delete(keys.pending(MODEL), keys.dispatched(MODEL))
    job = client.submit("hi", THREE, id="a")
    assert [record and record.status for record in client.records(job.sample_ids())] == [
        Status.QUEUED,
        Status.SUCCEEDED,
        Status.QUEUED,
    ]
    with pytest.raises(InvalidRequest, match="belongs to another request"):
        client.submit("hi", SamplingParams(n=2, temperature=0.8, seed=7), id="a")
    with pytest.raises(InvalidRequest, match=r"job id a\.1 belongs to another request"):
        client.submit("hi", id="a.1")


def test_an_id_that_leaves_no_room_for_the_samples_is_refused(
    client: Client, redis_client: Any
) -> None:
    longest = "x" * 128
    client.submit("hi", id=longest)
    before = redis_client.dbsize()
    with pytest.raises(InvalidRequest, match="is no job id"):
        client.submit("hi", SamplingParams(n=2), id=longest)
    assert redis_client.dbsize() == before


def test_the_most_samples_of_the_longest_id_can_be_submitted_and_read(
    client: Client, speaker: Speaker
) -> None:
    job = client.submit("hi", SamplingParams(n=128), id="x" * 124)
    ids = job.sample_ids()
    assert len({len(name) for name in ids[100:]}) == 1
    for number, sample in enumerate(ids):
        speaker.run(sample, [([number], f"{number} ")])
    result = job.result(timeout=20)
    assert [sample.token_ids for sample in result.samples] == [[number] for number in range(128)]
    assert client.results([job.id]) == [result]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {VOCABULARY: 1.0}},
        {"stop_token_ids": [VOCABULARY]},
        {"allowed_token_ids": [1, VOCABULARY]},
        {"bad_words": [[VOCABULARY]]},
    ],
)
def test_token_ids_that_the_model_does_not_have_are_refused(
    client: Client, redis_client: Any, params: dict[str, Any]
) -> None:
    (name,) = params
    with pytest.raises(InvalidRequest, match=f"{name} has the token id {VOCABULARY}"):
        client.submit("hi", SamplingParams(**params))
    assert not redis_client.keys("pf:job:*")


def scored(token: int) -> TokenLogprob:
    return TokenLogprob(Alternative(token, -0.5, b"x"), [Alternative(9, -0.25, b"y")])


def test_log_probabilities_come_with_the_tokens_they_belong_to(
    client: Client, speaker: Speaker
) -> None:
    job = client.submit("hi", SamplingParams(logprobs=1, prompt_logprobs=1))
    epoch = speaker.begin(job.id)
    length = speaker.commit(
        job.id, epoch, 0, [1, 2], "ab", logprobs=[scored(1), scored(2)], prompt=[scored(8)]
    )
    length = speaker.commit(job.id, epoch, length, [3], "c", logprobs=[scored(3)])
    speaker.end(job.id, epoch, length)
    chunks = list(job.stream(timeout=5))
    assert [chunk.logprobs for chunk in chunks] == [[scored(1), scored(2)], [scored(3)]]
    assert [chunk.prompt_logprobs for chunk in chunks] == [[None, scored(8)], []]
    result = job.result(timeout=5)
    assert result.logprobs == [scored(1), scored(2), scored(3)]
    assert result.prompt_logprobs == [None, scored(8)]


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture
def broker(redis_url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PILOTFISH_BROKER_URL", redis_url)
    return redis_url


def submit(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run_command(["submit", "hi", *options]) == 0
    return capsys.readouterr().out.strip()


def test_the_command_line_shows_where_each_sample_stands(
    broker: str, speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(capsys, "-n", "2", "--temperature", "0.5", "--seed", "3")
    speaker.run(f"{job}.1", [([1, 2], "two")])
    assert run_command(["status", job]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "status          running" in shown
    assert "rule            coupled" in shown
    assert [line.split() for line in shown[-2:]] == [
        [job, "queued,", "0", "tokens"],
        [f"{job}.1", "succeeded,", "2", "tokens,", "stop"],
    ]
    assert run_command(["status", job, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [sample["status"] for sample in values["samples"]] == ["queued", "succeeded"]
    assert run_command(["status", f"{job}.1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["sample"], values["status"]) == (1, "succeeded")
    assert "samples" not in values


def test_the_command_line_prints_all_samples(
    broker: str, speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(capsys, "--samples", "2")
    speaker.run(job, [([1], "one")])
    assert run_command(["results", job]) == 1
    assert f"job {job}.1 was not done within 0 s" in capsys.readouterr().err
    speaker.run(f"{job}.1", [([2], "two")])
    assert run_command(["results", job]) == 0
    assert capsys.readouterr().out == "==> sample 0 <==\none\n==> sample 1 <==\ntwo\n"
    assert run_command(["results", f"{job}.1"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert run_command(["results", job, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["text"] == "one"
    assert [sample["text"] for sample in values["samples"]] == ["one", "two"]


def test_the_command_line_prints_the_good_samples_and_says_which_is_not(
    broker: str, speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(capsys, "-n", "2")
    speaker.run(job, [([1], "one")])
    speaker.end(f"{job}.1", speaker.begin(f"{job}.1"), 0, Status.FAILED, "no luck")
    assert run_command(["results", job]) == 1
    said = capsys.readouterr()
    assert said.out == "==> sample 0 <==\none\n==> sample 1 <==\n(no luck)\n"
    assert said.err == f"pilotfish: job {job}.1 failed: no luck\n"


def test_the_command_line_shows_log_probabilities_as_json(
    broker: str, client: Client, speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = client.submit("hi", SamplingParams(logprobs=1))
    epoch = speaker.begin(job.id)
    speaker.end(job.id, epoch, speaker.commit(job.id, epoch, 0, [1], "x", logprobs=[scored(1)]))
    assert run_command(["results", job.id, "--json"]) == 0
    (token,) = json.loads(capsys.readouterr().out)["logprobs"]
    assert (token["token"], token["logprob"]) == ("x", -0.5)
    assert [other["token"] for other in token["top_logprobs"]] == ["y"]


def test_submit_streams_one_sample_after_another(
    broker: str,
    speaker: Speaker,
    redis_client: Any,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer() -> None:
        while len(ids := redis_client.zrange(keys.dispatched(MODEL), 0, -1)) < 2:
            pass
        for job in sorted(ids, reverse=True):  # the later sample first
            sample = b"." in job
            speaker.run(job.decode(), [([1], "two" if sample else "one")])

    with Background(answer):
        assert run_command(["submit", "hi", "-n", "2", "--stream"]) == 0
    assert capsys.readouterr().out == "==> sample 0 <==\none\n==> sample 1 <==\ntwo\n"
