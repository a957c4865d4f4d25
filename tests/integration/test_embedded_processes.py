"""Children of the embedded stack: they end with their parent, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pilotfish.embedded.lifeline import Lifeline, kill_group
from pilotfish.embedded.supervisor import ProcessFailed, Supervisor, describe
from pilotfish.worker_command import Command
from pilotfish_broker.errors import ConfigError

pytestmark = pytest.mark.integration

WAIT_SECONDS = 20

# a parent that starts one child, says its process id, and waits
PARENT = """
import os, sys, time
from pathlib import Path
from pilotfish.embedded.lifeline import Lifeline
from pilotfish.worker_command import Command
lifeline = Lifeline()
lifeline.start(Command([sys.executable, "-c", sys.argv[2]], dict(os.environ)), Path(sys.argv[1]))
print("started", flush=True)
time.sleep(600)
"""
# a child that ignores every polite request
STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def python(code: str) -> Command:
    return Command([sys.executable, "-c", code], dict(os.environ))


def printed_pid(log: Path) -> int:
    until(lambda: log.exists() and b"\n" in log.read_bytes(), "the child says its pid")
    return int(log.read_text().split()[1])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    lifeline = Lifeline()
    yield lifeline
    lifeline.close()


@pytest.fixture
def supervisor(lifeline: Lifeline) -> Iterator[Supervisor]:
    supervisor = Supervisor(lifeline)
    yield supervisor
    supervisor.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_ends_with_its_parent_whatever_ends_that(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log), STUBBORN], stderr=subprocess.DEVNULL
    )
    try:
        pid = printed_pid(log)
        launcher = psutil.Process(pid).ppid()
        parent.send_signal(number)
        parent.wait(WAIT_SECONDS)
        until(lambda: is_gone(pid) and is_gone(launcher), "child and launcher are gone")
    finally:
        parent.kill()
        parent.wait()


def test_a_command_ends_with_its_launcher(tmp_path: Path, lifeline: Lifeline) -> None:
    process = lifeline.start(python(STUBBORN), tmp_path / "log")
    pid = printed_pid(tmp_path / "log")
    process.kill()
    process.wait()
    until(lambda: is_gone(pid), "the command is gone")


def test_closing_the_lifeline_ends_what_still_lives(tmp_path: Path) -> None:
    lifeline = Lifeline()
    process = lifeline.start(python(STUBBORN), tmp_path / "log")
    pid = printed_pid(tmp_path / "log")
    lifeline.close()
    process.wait(WAIT_SECONDS)
    until(lambda: is_gone(pid), "the command is gone")


def test_the_terminals_interrupt_does_not_reach_a_child(tmp_path: Path, lifeline: Lifeline) -> None:
    process = lifeline.start(python(STUBBORN), tmp_path / "log")
    pid = printed_pid(tmp_path / "log")
    assert os.getpgid(pid) == process.pid != os.getpgid(0)
    assert os.getsid(pid) != os.getsid(0)
    kill_group(process)
    until(lambda: is_gone(pid), "the command is gone")


def test_children_start_from_the_main_thread_only(tmp_path: Path, lifeline: Lifeline) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            lifeline.start(python(""), tmp_path / "log")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_the_exit_status_of_a_command_comes_through(tmp_path: Path, lifeline: Lifeline) -> None:
    assert lifeline.start(python("raise SystemExit(7)"), tmp_path / "a").wait(WAIT_SECONDS) == 7
    killed = python("import os; os.kill(os.getpid(), 9)")
    status = lifeline.start(killed, tmp_path / "b").wait(WAIT_SECONDS)
    assert describe(status) == "ended by SIGKILL"


def test_stopping_asks_once_and_politely_before_it_kills(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    polite = (
        "import signal, sys, time\n"
        "asked = 0\n"
        "def leave(*_):\n"
        "    global asked\n"
        "    asked += 1\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('pid', 0, flush=True)\n"
        "while not asked: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print('asked', asked, flush=True)\n"
    )
    supervisor.start("server", lambda: python("import time; time.sleep(600)"), tmp_path / "s")
    supervisor.start("polite", lambda: python(polite), tmp_path / "polite")
    supervisor.start("stubborn", lambda: python(STUBBORN), tmp_path / "stubborn")
    printed_pid(tmp_path / "polite")
    pid = printed_pid(tmp_path / "stubborn")
    supervisor.stop(grace_seconds=2)
    assert (tmp_path / "polite").read_text().splitlines()[-1] == "asked 1"
    assert is_gone(pid)


def test_a_killed_child_is_started_again(tmp_path: Path, supervisor: Supervisor) -> None:
    log = tmp_path / "log"
    supervisor.start("child", lambda: python(STUBBORN), log)
    first = printed_pid(log)
    os.kill(first, signal.SIGKILL)
    restarted: list[str] = []

    def is_back() -> bool:
        restarted.extend(supervisor.tick())
        return log.read_text().count("pid") == 2

    until(is_back, "the child is back")
    assert restarted == ["child"]
    assert int(log.read_text().split()[-1]) != first


def test_a_child_that_keeps_dying_is_given_up_with_the_end_of_its_log(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.embedded.supervisor.FIRST_PAUSE_SECONDS", 0.0)
    starts: list[int] = []

    def command() -> Command:
        starts.append(1)
        return python("print('no memory left'); raise SystemExit(1)")

    supervisor.start("child", command, tmp_path / "log")
    with pytest.raises(ProcessFailed, match=r"(?s)died 5 times.*exit status 1.*no memory left"):
        until(lambda: bool(supervisor.tick()) and False, "it gives up")
    assert len(starts) == 5


@pytest.mark.parametrize("prefix", ["", "[2030-01-01 00:00:00,000: WARNING/MainProcess] "])
def test_a_child_that_refuses_its_settings_is_not_tried_again(
    tmp_path: Path, supervisor: Supervisor, prefix: str
) -> None:
    code = f"print({prefix!r} + 'pilotfish: PILOTFISH_SLOTS is wrong'); raise SystemExit(2)"
    supervisor.start("verify worker", lambda: python(code), tmp_path / "log")
    with pytest.raises(
        ConfigError, match=r"^the verify worker refused to start: PILOTFISH_SLOTS is wrong$"
    ):
        until(lambda: bool(supervisor.tick()) and False, "it refuses")


def test_a_child_that_found_no_broker_is_tried_again_within_the_usual_limit(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.embedded.supervisor.FIRST_PAUSE_SECONDS", 0.0)
    starts: list[int] = []

    def command() -> Command:
        starts.append(1)
        return python("print('pilotfish: no answer from Redis'); raise SystemExit(3)")

    supervisor.start("verify worker", command, tmp_path / "log")
    with pytest.raises(ProcessFailed, match=r"(?s)died 5 times.*exit status 3.*no answer from"):
        until(lambda: bool(supervisor.tick()) and False, "it gives up")
    assert len(starts) == 5


def test_a_command_inherits_what_it_is_to_keep_and_nothing_else(tmp_path: Path) -> None:
    kept, other = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    lifeline = Lifeline(keep=[kept])
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))), flush=True)"
    lifeline.start(python(code), tmp_path / "log").wait(WAIT_SECONDS)
    lifeline.close()
    # standard streams, what is kept, and the folder that is being listed
    descriptors = eval((tmp_path / "log").read_text())
    os.close(kept)
    os.close(other)
    assert kept in descriptors
    assert len(descriptors) == 5
