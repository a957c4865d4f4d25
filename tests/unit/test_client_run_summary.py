"""What a run did, in numbers; and the time that it took when it was stopped and continued."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import pilotfish.run_clock as run_clock
from pilotfish.run_clock import RunClock
from pilotfish.run_summary import check_place, running_ms, summarise, write_json
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import JobSpec, SamplingParams

SPEC = JobSpec(model="m", prompt="hi", params=SamplingParams()).to_bytes()


class Clock:
    """Stands in for the time module."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def time(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_clock, "time", clock)
    return clock


def record(job: str, started_ms: int, finished_ms: int, spec: bytes = SPEC) -> JobRecord:
    fields = {"status": "succeeded", "committed": 10, "rounds": 5, "drafted": 8, "accepted": 5}
    fields |= {"started_ms": started_ms, "finished_ms": finished_ms}
    raw = {name.encode(): str(value).encode() for name, value in fields.items()}
    return JobRecord.from_hash(job, {**raw, b"spec": spec, b"prompt_ids": bytes(8)})


def test_an_uninterrupted_run_takes_from_the_first_admission_to_the_last_completion() -> None:
    records = [record("a", 5_000, 9_000), None, record("b", 6_000, 12_500)]
    summary = summarise(iter(records), jobs=3, failed=1, startup_seconds=2.0)
    assert summary.seconds == 7.5
    assert (summary.jobs, summary.failed, summary.prompt_tokens) == (3, 1, 4)
    assert (summary.completion_tokens, summary.rounds) == (20, 10)
    assert (summary.drafted, summary.accepted) == (16, 10)
    assert summary.mean_tokens_per_round == 2.0


def test_without_a_record_there_is_no_time() -> None:
    assert summarise([None], jobs=1, failed=0, startup_seconds=0).seconds == 0


def test_samples_are_one_job_with_one_prompt() -> None:
    params = SamplingParams(n=3)
    specs = [JobSpec(model="m", prompt="hi", params=params, sample=sample) for sample in range(3)]
    records = [record("a", 5_000, 9_000 + sample, specs[sample].to_bytes()) for sample in range(3)]
    summary = summarise(records, jobs=1, failed=0, startup_seconds=0)
    assert (summary.jobs, summary.prompt_tokens, summary.completion_tokens) == (1, 2, 30)
    assert (summary.rounds, summary.mean_tokens_per_round) == (15, 2.0)


@pytest.mark.parametrize(
    ("pauses", "left"),
    [
        ([], 1000),
        ([(1200, 1500)], 700),
        ([(1200, 1500), (1600, 1700)], 600),
        ([(0, 1100)], 900),  # before the first admission nothing ran anyway
        ([(1900, 5000)], 900),
        ([(2500, 9000)], 1000),
        ([(1500, 1400)], 1000),  # the clock was set back
    ],
)
def test_only_the_part_of_a_pause_that_lies_in_the_run_is_left_out(
    pauses: list[tuple[int, int]], left: int
) -> None:
    assert running_ms(1000, 2000, pauses) == left


def test_the_pause_lasts_from_the_last_sign_of_life_to_the_next_beginning(
    tmp_path: Path, clock: Clock
) -> None:
    first = RunClock(tmp_path)
    first.begin()
    assert first.pauses() == []
    clock.seconds = 1007.5
    first.tick()
    clock.seconds = 1060.0
    second = RunClock(tmp_path)
    second.begin()
    clock.seconds = 1070.0
    second.tick()
    assert second.pauses() == [(1_007_500, 1_060_000)]
    third = RunClock(tmp_path)
    clock.seconds = 1100.0
    third.begin()
    assert third.pauses() == [(1_007_500, 1_060_000), (1_070_000, 1_100_000)]


def test_a_file_that_a_power_cut_tore_does_not_stop_a_run(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / run_clock.FILE).write_text("[[1,")
    torn = RunClock(tmp_path)
    torn.begin()
    assert torn.pauses() == []


def test_a_summary_over_the_input_or_the_output_is_refused(tmp_path: Path) -> None:
    source, output, link = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "link"))
    source.write_text("precious\n")
    link.symlink_to(output)
    hard = tmp_path / "hard"
    hard.hardlink_to(source)
    for path in (source, output, link, hard, tmp_path / "." / "out.jsonl"):
        with pytest.raises(InvalidRequest, match="choose another --summary"):
            check_place(path, (source, output))
    check_place(tmp_path / "summary.json", (source, output))


def test_a_summary_goes_into_a_file_of_a_folder_that_exists(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a folder"):
        check_place(tmp_path, ())
    with pytest.raises(InvalidRequest, match="there is no folder"):
        check_place(tmp_path / "nowhere" / "s.json", ())


def test_a_summary_replaces_a_file_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path, link = tmp_path / "s.json", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    with path.open() as reader:
        write_json(link, {"jobs": 1})
        assert reader.read() == "old"
    assert json.loads(path.read_text()) == {"jobs": 1}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "s.json"]


def test_a_summary_into_a_pipe_goes_through_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, {"jobs": 1})
    assert json.loads(os.read(reader, 1000)) == {"jobs": 1}
    os.close(reader)
    assert pipe.is_fifo()
