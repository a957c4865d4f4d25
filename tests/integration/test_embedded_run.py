"""`pilotfish run` with real workers of its own, killed, interrupted and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_models import build_tiny

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_SECONDS = 120
GONE_SECONDS = 10
PAUSE_SECONDS = 2
ADMISSION_MS = 1000  # the first jobs begin a little before all workers are known to be ready
CLI = [sys.executable, "-c", "from pilotfish.cli import main; main()"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama")


class Command:
    """A `pilotfish run` in a process of its own."""

    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.state = folder / "out.jsonl.pilotfish"
        self.log = folder / "stderr.txt"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PILOTFISH_")}
        arguments = [*CLI, "run", str(folder / "in.jsonl"), "-o", str(self.output)]
        arguments += ["--target", str(model), "--threads", "1", "--dtype", "float32", *options]
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(arguments, stderr=errors, env=environ)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


def write_input(folder: Path, count: int, tokens: int) -> None:
    lines = [{"prompt": f"once upon {n} times", "max_tokens": tokens} for n in range(count)]
    text = "".join(json.dumps({**line, "ignore_eos": True}) + "\n" for line in lines)
    (folder / "in.jsonl").write_text(text)


def all_end(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    return not alive


def test_a_killed_run_leaves_no_process_and_the_same_command_continues(
    tmp_path: Path, model: Path
) -> None:
    write_input(tmp_path, 24, 300)
    killed = Command(tmp_path, model, "--slots", "4")
    killed.until(lambda: killed.output.exists() and killed.output.read_bytes().count(b"\n") > 3)
    children = killed.children()
    assert len(children) >= 6  # three launchers with their commands
    killed.process.kill()
    killed.process.wait()
    assert all_end(children)
    before = killed.output.read_bytes()
    assert before.count(b"\n") < 24, "it was killed in the middle"
    ((begun, last_seen),) = json.loads((killed.state / "parts.json").read_text())
    time.sleep(PAUSE_SECONDS)
    resumed_after = time.time() * 1000

    other = Command(tmp_path, model, "--slots", "4", "--draft", "off")
    assert other.process.wait(WAIT_SECONDS) == 2
    assert "other arguments (different: draft)" in other.log.read_text()

    again = Command(tmp_path, model, "--slots", "4", "--summary", str(tmp_path / "s.json"))
    assert again.process.wait(WAIT_SECONDS) == 0, again.log.read_text()
    assert again.output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    ids = [line["custom_id"] for line in again.lines()]
    assert sorted(ids) == sorted({f"line-{n}" for n in range(1, 25)})
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["completion_tokens"] == 24 * 300
    # nothing ran between the kill and the second command's start
    whole = time.time() * 1000 - begun + ADMISSION_MS
    assert summary["seconds"] * 1000 < whole - (resumed_after - last_seen)
    assert not again.state.exists()


def test_an_interrupt_ends_all_processes_and_keeps_the_state(tmp_path: Path, model: Path) -> None:
    write_input(tmp_path, 16, 800)
    command = Command(tmp_path, model, "--slots", "2")
    command.until(lambda: command.output.exists() and command.output.stat().st_size > 0)
    children = command.children()
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(GONE_SECONDS * 2) == 130
    assert all_end(children)
    assert "interrupted" in command.log.read_text()
    assert command.state.is_dir()


def test_workers_that_refuse_the_model_end_the_run_and_leave_nothing(tmp_path: Path) -> None:
    write_input(tmp_path, 1, 4)
    (tmp_path / "empty").mkdir()
    command = Command(tmp_path, tmp_path / "empty")
    assert command.process.wait(WAIT_SECONDS) == 2
    log = command.log.read_text()
    assert "worker refused to start" in log
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "empty", "stderr.txt"}


def test_a_killed_draft_worker_is_replaced_and_changes_no_output(
    tmp_path: Path, model: Path
) -> None:
    write_input(tmp_path, 16, 300)
    command = Command(tmp_path, model, "--slots", "4", "--draft", str(model))
    command.until(lambda: command.output.exists() and command.output.stat().st_size > 0)
    drafters = [
        child for child in command.children() if "pilotfish_workers.draft.app" in child.cmdline()
    ]
    for drafter in drafters:
        drafter.kill()
    assert command.process.wait(WAIT_SECONDS) == 0, command.log.read_text()
    with_death = {line["custom_id"]: line["response"]["body"] for line in command.lines()}
    (tmp_path / "plain").mkdir()
    write_input(tmp_path / "plain", 16, 300)
    plain = Command(tmp_path / "plain", model, "--draft", "off")
    assert plain.process.wait(WAIT_SECONDS) == 0, plain.log.read_text()
    expected = {line["custom_id"]: line["response"]["body"] for line in plain.lines()}
    assert len(expected) == 16
    for name, body in expected.items():
        assert with_death[name]["choices"] == body["choices"]
