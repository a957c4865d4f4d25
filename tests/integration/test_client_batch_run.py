"""`pilotfish run --broker` from end to end, the target being a worker that repeats the prompt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotfish.batch_lines import Request, read_requests
from pilotfish.batch_output import OutputFile
from pilotfish.batch_run import BatchRun
from pilotfish.cli import run_command
from pilotfish.client import Client
from pilotfish.result import Result
from pilotfish.run_state import job_id
from pilotfish_broker.keys import Keys
from pilotfish_broker.records import JobRecords
from pilotfish_broker.spec import SamplingParams, Status
from tests.client_kit import CONTEXT, MODEL, VOCABULARY, Background, Speaker, serve_model
from tests.conftest import Valkey

pytestmark = pytest.mark.integration

WAIT_SECONDS = 30


class Parrot:
    """A fleet of one worker that answers each job with its own prompt, one job at a time; a sample
    of several with its number too."""

    def __init__(self, url: str, keys: Keys, most: int = 1_000_000) -> None:
        self.speaker = Speaker(url, keys)
        self.speaker.register(slots=1000)
        self._keys = keys
        self._records = JobRecords(self.speaker.client, keys, 60)
        self._most = most
        self.answered: Counter[str] = Counter()
        self.stopped = threading.Event()

    def run(self) -> None:
        names = (self._keys.pending(MODEL), self._keys.dispatched(MODEL))
        while not self.stopped.wait(0.005):
            for name in names:
                for job in self.speaker.client.zrange(name, 0, -1):
                    if sum(self.answered.values()) < self._most:
                        self._answer(job.decode())

    def _answer(self, job: str) -> None:
        epoch = self.speaker.begin(job)
        record = self._records.get(job)
        text = str(record.spec.prompt)
        if record.spec.params.n > 1:
            text += f"#{record.spec.sample}"
        self.answered[text] += 1
        if text in ("fail", "fail#1"):
            self.speaker.end(job, epoch, 0, Status.FAILED, "no luck", record.spec.group)
            return
        length = self.speaker.say(job, epoch, [([1, 2], text), ([3], "!")])
        self.speaker.end(job, epoch, length, group=record.spec.group)


@pytest.fixture
def parrot(redis_url: str, redis_client: Any, keys: Keys) -> Iterator[Parrot]:
    serve_model(redis_client, keys)
    parrot = Parrot(redis_url, keys)
    yield parrot
    parrot.speaker.close()


def write(tmp_path: Path, *lines: dict[str, Any]) -> tuple[str, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(source), tmp_path / "out.jsonl"


def read(output: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def run(parrot: Parrot, *arguments: str) -> int:
    with Background(parrot.run):
        try:
            return run_command(["run", *arguments])
        finally:
            parrot.stopped.set()


def test_every_request_is_answered_once(tmp_path: Path, redis_url: str, parrot: Parrot) -> None:
    source, output = write(tmp_path, *({"prompt": f"p{n}"} for n in range(40)))
    summary = tmp_path / "summary.json"
    arguments = [source, "-o", str(output), "--broker", redis_url, "--summary", str(summary)]
    assert run(parrot, *arguments) == 0
    lines = read(output)
    assert set(lines) == {f"line-{n}" for n in range(1, 41)}
    for n in range(40):
        body = lines[f"line-{n + 1}"]["response"]["body"]
        assert body["choices"][0]["text"] == f"p{n}!"
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    counts = json.loads(summary.read_text())
    assert (counts["jobs"], counts["failed"], counts["completion_tokens"]) == (40, 0, 120)
    assert (counts["rounds"], counts["drafted"], counts["accepted"]) == (80, 160, 40)
    assert counts["mean_tokens_per_round"] == 1.5
    assert counts["startup_seconds"] == 0
    assert (counts["model"], counts["draft"]) == (MODEL, None)
    assert counts["seconds"] > 0
    assert not (tmp_path / "out.jsonl.pilotfish").exists()


def test_on_a_deployment_speculation_is_the_default_of_each_job(
    tmp_path: Path, redis_url: str, redis_client: Any, keys: Keys, parrot: Parrot
) -> None:
    source, output = write(tmp_path, {"prompt": "a"}, {"prompt": "b", "speculation": 3})
    summary = tmp_path / "summary.json"
    arguments = [source, "-o", str(output), "--broker", redis_url, "--speculation", "off"]
    assert run(parrot, *arguments, "--summary", str(summary)) == 0
    records = JobRecords(redis_client, keys, 60)
    jobs = [line["id"].removeprefix("batch_req_") for line in read(output).values()]
    params = {record.spec.prompt: record.spec.params for record in map(records.get, jobs)}
    assert {prompt: given.speculation for prompt, given in params.items()} == {"a": "off", "b": 3}
    assert json.loads(summary.read_text())["speculation"] == "off"


def test_failed_requests_become_error_lines_and_status_1(
    tmp_path: Path, redis_url: str, parrot: Parrot, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path, {"prompt": "fail", "custom_id": "bad"}, {"prompt": "good"})
    assert run(parrot, source, "-o", str(output), "--broker", redis_url) == 1
    lines = read(output)
    assert lines["bad"]["error"] == {"code": "failed", "message": "no luck"}
    assert lines["line-2"]["response"]["status_code"] == 200
    assert "1 of 2 jobs failed" in capsys.readouterr().err


def test_all_samples_of_a_request_are_choices_of_one_line(
    tmp_path: Path,
    redis_url: str,
    parrot: Parrot,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pilotfish.batch_run.RECONCILE_JOBS", 7)
    lines = [{"prompt": f"p{n}", "n": 3, "temperature": 1, "seed": n} for n in range(9)]
    source, output = write(tmp_path, *lines, {"prompt": "alone"}, {"prompt": "fail", "n": 2})
    summary = tmp_path / "summary.json"
    arguments = [source, "-o", str(output), "--broker", redis_url, "--summary", str(summary)]
    assert run(parrot, *arguments) == 1
    assert "1 of 11 jobs failed" in capsys.readouterr().err
    answers = read(output)
    assert len(answers) == 11
    for n in range(9):
        body = answers[f"line-{n + 1}"]["response"]["body"]
        choices = [(choice["index"], choice["text"]) for choice in body["choices"]]
        assert choices == [(sample, f"p{n}#{sample}!") for sample in range(3)]
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
        assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == 6
    assert len(answers["line-10"]["response"]["body"]["choices"]) == 1
    assert answers["line-11"]["error"] == {"code": "failed", "message": "sample 1: no luck"}
    counts = json.loads(summary.read_text())
    assert (counts["jobs"], counts["failed"], counts["prompt_tokens"]) == (11, 1, 22)
    assert counts["completion_tokens"] == 3 * (9 * 3 + 1 + 1)


def test_the_options_of_run_are_for_lines_that_do_not_say(
    tmp_path: Path, redis_url: str, redis_client: Any, keys: Keys, parrot: Parrot
) -> None:
    source, output = write(tmp_path, {"prompt": "a"}, {"prompt": "b", "temperature": 0, "seed": 2})
    typed = "--temperature 0.8 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 1 --max-tokens 7"
    options = typed.split()
    assert run(parrot, source, "-o", str(output), "--broker", redis_url, *options) == 0
    records = JobRecords(redis_client, keys, 60)
    jobs = [line["id"].removeprefix("batch_req_") for line in read(output).values()]
    params = {record.spec.prompt: record.spec.params for record in map(records.get, jobs)}
    asked = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=5, min_p=0.1, seed=1, max_tokens=7, speculation="auto"
    )
    assert params == {"a": asked, "b": replace(asked, temperature=0, seed=2)}


@pytest.mark.parametrize("samples", [1, 3])
def test_a_killed_run_continues_with_exactly_what_is_missing(
    tmp_path: Path,
    redis_url: str,
    redis_client: Any,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    samples: int,
) -> None:
    serve_model(redis_client, keys)
    lines = ({"prompt": f"p{n}", "n": samples} for n in range(30))
    source, output = write(tmp_path, *lines)
    arguments = [source, "-o", str(output), "--broker", redis_url]
    # of more than one sample, the thirteenth request is left half done
    first = Parrot(redis_url, keys, most=12 * samples + samples // 2)
    code = "from pilotfish.cli import main; main()"
    with Background(first.run):
        command = subprocess.Popen([sys.executable, "-c", code, "run", *arguments])
        deadline = time.monotonic() + WAIT_SECONDS
        while not output.exists() or output.read_bytes().count(b"\n") < 12:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        command.send_signal(signal.SIGKILL)
        command.wait()
        first.stopped.set()
    first.speaker.close()
    before = output.read_bytes()
    output.write_bytes(before[:-20])  # the twelfth line was torn by the crash

    monkeypatch.setenv("PILOTFISH_DRAFT", "off")  # of workers; it does not shape this run
    for other in (["--max-tokens", "7"], ["--temperature", "0.5"], ["--seed", "1"]):
        assert run_command(["run", *arguments, *other]) == 2
        assert f"(different: {other[0][2:]})" in capsys.readouterr().err
    assert output.read_bytes() == before[:-20]

    second = Parrot(redis_url, keys)
    assert run(second, *arguments) == 0
    second.speaker.close()
    assert set(read(output)) == {f"line-{n}" for n in range(1, 31)}
    assert output.read_bytes().startswith(before[: before[:-20].rfind(b"\n") + 1])
    numbers = [""] if samples == 1 else [f"#{sample}" for sample in range(samples)]
    for line in read(output).values():
        texts = [choice["text"] for choice in line["response"]["body"]["choices"]]
        assert [text.lstrip("p0123456789") for text in texts] == [f"{n}!" for n in numbers]
    answered = first.answered + second.answered
    assert answered == Counter({f"p{n}{number}": 1 for n in range(30) for number in numbers})


def test_a_sample_that_the_server_lost_is_made_again_and_no_other(
    tmp_path: Path,
    redis_url: str,
    redis_client: Any,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pilotfish.batch_run.RECONCILE_SECONDS", 0.2)
    serve_model(redis_client, keys)
    source, output = write(tmp_path, {"prompt": "a", "n": 3})
    parrot = Parrot(redis_url, keys, most=2)

    def lose_then_serve() -> None:
        """The record of a sample goes after its end has been told of."""
        with Background(parrot.run):
            until(lambda: sum(parrot.answered.values()) == 2)
            time.sleep(0.5)  # until the run has read of the ends; the test holds as well if not
            parrot.stopped.set()
        lost = next(
            job
            for job in redis_client.keys("pf:job:*")
            if b":tokens" not in job and redis_client.hget(job, "status") == b"succeeded"
        )
        redis_client.delete(lost, lost + b":tokens")
        parrot.stopped.clear()
        parrot._most = 100
        parrot.run()

    with Background(lose_then_serve):
        status = run_command(["run", source, "-o", str(output), "--broker", redis_url])
        parrot.stopped.set()
    parrot.speaker.close()
    assert status == 0
    choices = read(output)["line-1"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == ["a#0!", "a#1!", "a#2!"]
    assert sorted(parrot.answered.values()) == [1, 1, 2]


def test_jobs_that_the_server_lost_are_submitted_again(
    tmp_path: Path,
    redis_url: str,
    redis_client: Any,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pilotfish.batch_run.RECONCILE_SECONDS", 0.2)
    serve_model(redis_client, keys)
    source, output = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    parrot = Parrot(redis_url, keys)

    def lose_then_serve() -> None:
        while not redis_client.keys("pf:job:*"):
            time.sleep(0.01)
        redis_client.flushall()
        serve_model(redis_client, keys)
        parrot.speaker.register(slots=10)
        parrot.run()

    with Background(lose_then_serve):
        status = run_command(["run", source, "-o", str(output), "--broker", redis_url])
        parrot.stopped.set()
    parrot.speaker.close()
    assert status == 0
    assert set(read(output)) == {"line-1", "line-2"}


AWAY_SECONDS = 2.0  # many looks at whether somebody serves the model


@pytest.mark.parametrize("away", ["while jobs run", "before the summary"])
def test_a_run_bears_a_server_that_is_away_for_a_while(
    tmp_path: Path,
    keys: Keys,
    start_valkey: Callable[..., Valkey],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    away: str,
) -> None:
    monkeypatch.setattr("pilotfish.cli.running.LIVE_LOOK_SECONDS", 0.0)
    server = start_valkey(appendonly="yes", appendfsync="always")
    serve_model(server.client(), keys)
    source, output = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    parrot = Parrot(server.url, keys)
    reading = threading.Event()

    def go_away_then_serve() -> None:
        if away == "before the summary":
            with Background(parrot.run):
                assert reading.wait(WAIT_SECONDS)
                parrot.stopped.set()
        else:
            until(lambda: len(parrot.speaker.client.keys("pf:job:*")) == 2)
        server.stop()
        reading.clear()
        time.sleep(AWAY_SECONDS)
        server.start()
        if away == "while jobs run":
            parrot.run()

    records = BatchRun.records

    def records_after_the_fall(batch: BatchRun) -> Iterator[Any]:
        reading.set()
        until(lambda: not reading.is_set())
        return records(batch)

    if away == "before the summary":
        monkeypatch.setattr(BatchRun, "records", records_after_the_fall)
    summary = tmp_path / "summary.json"
    arguments = [source, "-o", str(output), "--broker", server.url, "--summary", str(summary)]
    with Background(go_away_then_serve):
        status = run_command(["run", *arguments])
        parrot.stopped.set()
    parrot.speaker.close()
    assert status == 0
    assert set(read(output)) == {"line-1", "line-2"}
    assert json.loads(summary.read_text())["completion_tokens"] == 6
    assert capsys.readouterr().err.count("trying again") == 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Ear:
    """A listener that remembers the token counts that it was shown."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def ended(self, request: Request, result: Result) -> None:
        pass

    def running(self, tokens: int) -> None:
        self.tokens.append(tokens)

    def note(self, text: str) -> None:
        pass


class Enough(Exception):
    """Ends a run from its watch."""


def test_a_long_run_is_watched_while_it_is_submitted_and_asks_about_running_jobs_only(
    tmp_path: Path,
    redis_url: str,
    redis_client: Any,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pilotfish.batch_run.RECONCILE_JOBS", 10)
    serve_model(redis_client, keys)
    speaker = Speaker(redis_url, keys)
    speaker.register()
    source, output = write(tmp_path, *({"prompt": f"p{n}"} for n in range(45)))
    ear = Ear()
    written: list[int] = []

    def watch() -> None:
        names = (keys.pending(MODEL), keys.dispatched(MODEL))
        written.append(sum(redis_client.zcard(name) for name in names))
        if written[-1] == 45 and not redis_client.scard(keys.running(MODEL)):
            first = job_id("key", "line-1")
            speaker.say(first, speaker.begin(first), [([1, 2], "ab"), ([3], "")])
            speaker.begin(job_id("key", "line-2"))
            redis_client.config_resetstat()
        elif any(ear.tokens):
            raise Enough

    with Client(redis_url) as client, OutputFile(output) as file:
        batch = BatchRun(
            client=client,
            key="key",
            model=MODEL,
            requests=read_requests(Path(source)),
            output=file,
            listener=ear,
            watch=watch,
        )
        with pytest.raises(Enough):
            batch.finish()
    assert written[:5] == [0, 10, 20, 30, 40]
    assert ear.tokens[-1] == 3
    assert redis_client.info("commandstats")["cmdstat_hget"]["calls"] == 2
    speaker.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": [VOCABULARY]}, f"line 2: token id {VOCABULARY} is not below"),
        ({"prompt": [1] * CONTEXT}, f"line 2: the prompt has {CONTEXT} tokens"),
        ({"prompt": "x", "model": "other"}, "line 2: model 'other' is not served here"),
    ],
)
def test_what_the_served_model_cannot_take_starts_nothing(
    tmp_path: Path,
    redis_url: str,
    redis_client: Any,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
    line: dict[str, Any],
    said: str,
) -> None:
    serve_model(redis_client, keys)
    source, output = write(tmp_path, {"prompt": "fine", "model": MODEL}, line)
    assert run_command(["run", source, "-o", str(output), "--broker", redis_url]) == 2
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]
    assert not redis_client.keys("pf:job:*")


def test_a_deployment_that_never_served_the_model_is_refused(
    tmp_path: Path, redis_url: str, redis_client: Any, keys: Keys
) -> None:
    serve_model(redis_client, keys)
    source, output = write(tmp_path, {"prompt": "x"})
    arguments = ["run", source, "-o", str(output), "--broker", redis_url, "--model", "other"]
    assert run_command(arguments) == 2
    assert os.listdir(tmp_path) == ["in.jsonl"]
