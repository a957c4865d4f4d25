"""submit, status, results and cancel against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish.cli import run_command
from pilotfish_broker.keys import Keys
from tests.client_kit import Background, Speaker, serve_model

pytestmark = pytest.mark.integration

ROUNDS = [([1, 2], "blå "), ([3], "himmel")]


@pytest.fixture
def broker(redis_url: str, redis_client: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PILOTFISH_BROKER_URL", redis_url)
    serve_model(redis_client, keys)
    return redis_url


@pytest.fixture
def speaker(broker: str, keys: Keys) -> Iterator[Speaker]:
    speaker = Speaker(broker, keys)
    speaker.register(host="here")
    yield speaker
    speaker.close()


def test_a_job_is_submitted_looked_at_and_fetched(
    speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["submit", "Why is the sky blue?", "--chat", "--max-tokens", "9"]) == 0
    job = capsys.readouterr().out.strip()
    assert run_command(["results", job]) == 1
    assert "was not done within 0 s" in capsys.readouterr().err

    assert run_command(["status", job, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["status"], record["max_tokens"]) == ("queued", 9)
    assert "owner" not in record
    speaker.run(job, ROUNDS)

    assert run_command(["results", job]) == 0
    assert capsys.readouterr().out == "blå himmel\n"
    assert run_command(["results", job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == [1, 2, 3]
    assert run_command(["cancel", job]) == 0
    assert "had ended before" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--stream", "--wait"])
def test_submit_can_stay_until_the_end(
    speaker: Speaker,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hej")

    def answer() -> None:
        while not (waiting := speaker.client.zrange(keys.dispatched("m"), 0, -1)):
            pass
        speaker.run(waiting[0].decode(), ROUNDS)

    with Background(answer):
        assert run_command(["submit", "--file", str(prompt), option]) == 0
    assert capsys.readouterr().out == "blå himmel\n"


def test_status_shows_workers_and_queues(
    speaker: Speaker, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(["submit", "x"])
    capsys.readouterr()
    assert run_command(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["models"] == [{"model": "m", "queued": 0, "ringing": 1, "running": 0}]
    (worker,) = shown["workers"]
    assert (worker["id"], worker["kind"], worker["host"]) == ("w1", "verify", "here")
    assert not any("nonce" in value for value in worker.values() if isinstance(value, str))
    assert run_command(["status"]) == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "results", "cancel"])
def test_an_unknown_job_is_status_1(
    broker: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run_command([command, "nope"]) == 1
    assert capsys.readouterr().err.startswith("pilotfish: there is no job nope")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit", ""], "the prompt is empty"),
        (["submit", "x", "--model", "nope"], "no worker has ever served a model named 'nope'"),
        (["submit", "x", "--max-tokens", "0"], "max_tokens must lie between 1"),
        (["submit", "x", "--priority", "101"], "priority must lie between"),
    ],
)
def test_a_request_that_is_refused_is_status_2_and_writes_nothing(
    broker: str,
    redis_client: Any,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert run_command(arguments) == 2
    assert said in capsys.readouterr().err
    assert not redis_client.keys("pf:job:*")


def test_a_server_that_evicts_keys_is_status_3(
    start_valkey: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start_valkey(maxmemory_policy="allkeys-lru").url
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    output = str(tmp_path / "out.jsonl")
    for arguments in (["submit", "x"], ["status"], ["run", str(source), "-o", output]):
        assert run_command([*arguments, "--broker", url]) == 3
        said = capsys.readouterr().err
        assert "maxmemory-policy allkeys-lru" in said
        assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
