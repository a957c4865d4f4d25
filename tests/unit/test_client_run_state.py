"""The state folder: who may continue a run, and who is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pilotfish.folder_lock as folder_lock
from pilotfish.run_state import RunState, job_id, run_key
from pilotfish_broker.errors import InvalidRequest

IDENTITY = {"input": "abc", "target": "t"}


def test_the_same_arguments_continue_a_run(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first = RunState(output, IDENTITY)
    assert first.is_new
    first.release()
    output.write_text("something\n")
    second = RunState(output, IDENTITY)
    assert not second.is_new
    assert second.key == first.key
    second.release()


def test_other_arguments_with_the_same_output_are_refused_by_name(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    RunState(output, IDENTITY).release()
    with pytest.raises(InvalidRequest, match=r"different: target\)"):
        RunState(output, {**IDENTITY, "target": "other"})
    RunState(output, IDENTITY).release()  # the refusal let go of the lock


def test_an_output_without_a_run_is_never_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    with pytest.raises(InvalidRequest, match="choose another -o"):
        RunState(output, IDENTITY)
    assert not (tmp_path / "out.jsonl.pilotfish").exists()


def test_an_empty_output_is_no_obstacle(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.touch()
    RunState(output, IDENTITY).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_new_run_never_takes_an_older_ones_jobs_for_its_own(tmp_path: Path) -> None:
    first = RunState(tmp_path / "first.jsonl", IDENTITY)
    second = RunState(tmp_path / "second.jsonl", IDENTITY)
    assert first.key != second.key
    first.remove()
    again = RunState(tmp_path / "first.jsonl", IDENTITY)
    assert again.key != first.key
    again.release()
    second.release()


def test_an_output_that_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for output in (pipe, tmp_path, Path(os.devnull)):
        with pytest.raises(InvalidRequest, match="no ordinary file"):
            RunState(output, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_run_that_never_began_deletes_no_output_but_its_own(tmp_path: Path) -> None:
    empty, link, fresh = (tmp_path / name for name in ("empty", "link", "fresh"))
    empty.touch()
    link.symlink_to(tmp_path / "elsewhere")
    for output in (empty, link, fresh):
        state = RunState(output, IDENTITY)
        output.touch()
        state.remove_new_output()
        state.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "empty", "link"]


@pytest.mark.parametrize(
    "text", ["", '{"format": "1", "inp', "[]", '{"format": "1"}', '{"format": "0", "nonce": "x"}']
)
def test_a_state_that_cannot_be_read_names_what_to_delete(tmp_path: Path, text: str) -> None:
    output = tmp_path / "out.jsonl"
    RunState(output, IDENTITY).release()
    output.write_text("a line\n")
    state = tmp_path / "out.jsonl.pilotfish"
    (state / "run.json").write_text(text)
    with pytest.raises(InvalidRequest, match=f"or delete {state} and {output}$"):
        RunState(output, IDENTITY)
    assert output.read_text() == "a line\n"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no folder"):
        RunState(tmp_path / "nowhere" / "out.jsonl", IDENTITY)


def test_a_second_run_on_the_same_output_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.0)
    output = tmp_path / "out.jsonl"
    state = RunState(output, IDENTITY)
    with pytest.raises(InvalidRequest, match="another run is writing"):
        RunState(output, IDENTITY)
    state.release()
    RunState(output, IDENTITY).release()


def test_the_lock_is_held_as_long_as_a_process_of_the_run_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.0)
    output = tmp_path / "out.jsonl"
    state = RunState(output, IDENTITY)
    code = "import sys; sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[state.lock]
    )
    state.release()
    with pytest.raises(InvalidRequest, match="another run is writing"):
        RunState(output, IDENTITY)
    child.communicate(b"")
    RunState(output, IDENTITY).release()


def test_names_of_runs_and_jobs_depend_on_all_that_names_them() -> None:
    key = run_key(IDENTITY, "n")
    assert key == run_key(dict(reversed(IDENTITY.items())), "n")
    assert key != run_key({**IDENTITY, "input": "x"}, "n")
    assert key != run_key(IDENTITY, "m")
    assert job_id(key, "a") == job_id(key, "a")
    assert len({job_id(key, "a"), job_id(key, "b"), job_id("other", "a")}) == 3
