"""Whatever stops `pilotfish run` leaves no process behind, and the same command goes on.

The models are simulated (passes of a given time, no torch), so that starting costs little and
every stop comes in the middle; the death of a draft worker meets real models.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pilotfish_broker.keys import Keys
from tests.process_kit import (
    Family,
    Program,
    embedded_server,
    pilotfish,
    run_cli,
    wait_until,
)
from tests.reference_kit import (
    Greedy,
    Line,
    check_output,
    random_prompts,
    read_output,
    simulated_line,
    write_input,
)
from tests.tiny_models import build_tiny

GONE_SECONDS = 10.0  # what is promised for after a SIGKILL
JOBS = 32

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]


class Run:
    """One `pilotfish run` in a folder of its own, and the same again."""

    def __init__(self, folder: Path, lines: list[Line], *options: str) -> None:
        self.folder = folder
        self.lines = lines
        self.output = folder / "out.jsonl"
        self.summary = folder / "summary.json"
        self.arguments: list[str | Path] = ["run", write_input(folder / "in.jsonl", lines)]
        self.arguments += ["-o", self.output, "--summary", self.summary, "--threads", "1"]
        self.arguments += options
        self.programs: list[Program] = []

    def start(self) -> tuple[Program, Family]:
        log = self.folder / f"run-{len(self.programs)}.log"
        program = Program("run", pilotfish(*self.arguments), log)
        self.programs.append(program)
        return program, Family(program, str(self.folder))

    def num_written(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def close(self) -> None:
        for program in self.programs:
            program.kill()


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[Run]:
    """32 jobs, four at a time, whose rounds take more than a twentieth of a second."""
    run = Run(
        tmp_path,
        [simulated_line(number, 24 + number % 5) for number in range(JOBS)],
        *("--target", "simulated:pass_ms=50", "--draft", "simulated:pass_ms=2,agree=60"),
        *("--model", "sim", "--slots", "4", "--speculation", "2"),
    )
    yield run
    run.close()


def stop_in_the_middle(run: Run, number: signal.Signals) -> int:
    """Start it, let it answer a few jobs more, stop it; gives the exit status once nothing of it
    is left."""
    before = run.num_written()
    program, family = run.start()
    wait_until(lambda: run.num_written() > before + 2, "further answers", [program])
    # the server, a worker of each kind, and what starts them
    assert len(family.note()) >= 3
    program.send(number)
    status = program.wait()
    wait_until(lambda: not family.survivors(), "its processes to end", limit=GONE_SECONDS)
    assert before + 2 < run.num_written() < JOBS, "it was not in the middle"
    return status


def test_a_run_that_was_stopped_in_every_way_is_completed_by_the_same_command(
    slow_run: Run,
) -> None:
    assert stop_in_the_middle(slow_run, signal.SIGINT) == 130
    assert stop_in_the_middle(slow_run, signal.SIGTERM) == 143
    assert stop_in_the_middle(slow_run, signal.SIGKILL) == -signal.SIGKILL
    kept = read_output(slow_run.output)
    done = run_cli(*slow_run.arguments)
    assert done.returncode == 0, done.stderr
    check_output(slow_run.output, slow_run.lines)
    now = read_output(slow_run.output)
    assert {name: now[name] for name in kept} == kept, "a finished line was done again"
    for program in slow_run.programs:
        assert "Traceback" not in program.tail()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_while_it_starts_leaves_nothing_behind(
    slow_run: Run, number: signal.Signals
) -> None:
    program, family = slow_run.start()
    wait_until(lambda: len(family.note()) >= 3, "its first children", [program])
    program.send(number)
    program.wait()
    wait_until(lambda: not family.survivors(), "its processes to end", limit=GONE_SECONDS)
    assert not slow_run.output.exists()
    assert "Traceback" not in program.tail()


def test_a_run_outlives_its_draft_worker(tmp_path: Path) -> None:
    """SIGKILL of the draft worker while 32 jobs run: all finish, no answer changes."""
    target = build_tiny(tmp_path / "models" / "tiny", "llama", seed=0)
    limit = 200
    greedy = Greedy(
        target, [*random_prompts(4, 1, 60), *random_prompts(JOBS - 4, 40, 40)], [limit] * JOBS
    )
    lines = [greedy.line(number, limit, 2, ignore_eos=True) for number in range(JOBS)]
    options = ["--target", str(target), "--draft", str(target), "--dtype", "float32"]
    run = Run(tmp_path, lines, *options, "--slots", "32")
    program, family = run.start()
    try:
        wait_until(lambda: list(run.folder.glob("*/valkey/valkey.conf")), "its server", [program])
        victim = wait_until(lambda: draft_worker(family), "its draft worker", [program])
        with embedded_server(run.output) as redis:
            wait_until(lambda: is_middle(redis, limit), "accepted drafts", [program])
            victim.kill()
            committed = progress(redis)[0]
        assert committed < JOBS * limit * 3 // 4, "it was not in the middle"
        assert program.wait() == 0, program.tail()
    finally:
        run.close()
    check_output(run.output, lines)
    assert not family.survivors()


def draft_worker(family: Family) -> psutil.Process | None:
    """The draft worker itself among the processes of a run, not what watches over it."""
    for process in family.note():
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "pilotfish_workers.draft.app" in words and "child.py" not in " ".join(words):
            return process
    return None


def progress(redis: Any) -> tuple[int, int]:
    """Committed and accepted tokens of all jobs."""
    keys = [key for key in redis.scan_iter(f"{Keys().job('*')}") if key.count(b":") == 2]
    rows = [redis.hmget(key, "committed", "accepted") for key in keys]
    return sum(int(row[0] or 0) for row in rows), sum(int(row[1] or 0) for row in rows)


def is_middle(redis: Any, limit: int) -> bool:
    committed, accepted = progress(redis)
    return committed > JOBS * limit // 10 and accepted > JOBS
