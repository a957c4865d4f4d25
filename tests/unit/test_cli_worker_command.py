"""The command line of a worker, and the environment that it gets."""

from __future__ import annotations

import sys

import pytest

from pilotfish.worker_command import process_environment, worker_command
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.settings import Settings


def test_a_worker_is_an_ordinary_celery_worker() -> None:
    settings = Settings.from_env({}, target="org/name", slots=3)
    command = worker_command("verify", settings, log_level="WARNING", environ={})
    line = " ".join(command.argv)
    assert line.startswith(f"{sys.executable} -m celery --app pilotfish_workers.verify.app worker")
    for part in ("--pool threads", "--concurrency 3", "--without-gossip", "--without-mingle"):
        assert part in line
    assert "--task-events" in line
    assert "--loglevel WARNING" in line
    assert "pilotfish_workers.draft.app" in worker_command("draft", settings, environ={}).argv


def test_each_worker_has_a_name_of_its_own() -> None:
    settings = Settings.from_env({}, target="t")
    lines = [worker_command("draft", settings).argv for _ in range(20)]
    names = {argv[argv.index("--hostname") + 1] for argv in lines}
    assert len(names) == 20
    assert all(name.startswith("draft-") and name.endswith("@%h") for name in names)


def test_the_environment_makes_the_same_settings_again() -> None:
    settings = Settings.from_env({}, target="t", slots=7, broker_url="redis://:x@h/1", kv_tokens=64)
    other = {"PILOTFISH_SLOTS": "9", "PILOTFISH_DATA_URL": "redis://elsewhere", "HOME": "/h"}
    environ = process_environment(settings, other)
    assert Settings.from_env(environ) == settings
    assert environ["HOME"] == "/h"


def test_a_password_stands_in_no_argument() -> None:
    settings = Settings.from_env({}, target="t", broker_url="redis://:hunter2@h/1")
    assert "hunter2" not in " ".join(worker_command("verify", settings).argv)


def test_waiting_threads_sleep_and_their_number_is_the_one_asked_for() -> None:
    settings = Settings.from_env({}, target="t", threads=3)
    environ = process_environment(settings, {})
    assert (environ["OMP_NUM_THREADS"], environ["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert "OMP_NUM_THREADS" not in process_environment(Settings.from_env({}, target="t"), {})


def test_a_worker_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="PILOTFISH_TARGET"):
        worker_command("verify", Settings.from_env({}))
