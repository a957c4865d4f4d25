"""A job's progress read back is what was committed, or a refusal; never something else."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish_broker.errors import JobNotFound
from pilotfish_broker.logprobs import Alternative, TokenLogprob, pack_logprobs
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import pack_ids
from pilotfish_checkpoint.progress import Progress, ProgressDamaged, read_progress
from tests.broker_kit import Bench, Worker

pytestmark = pytest.mark.integration


@pytest.fixture
def worker(bench: Bench) -> Worker:
    """Owns the job "a" in epoch 1."""
    worker = bench.worker("v1")
    bench.submit("a")
    assert worker.own.claim("a") == ("claimed", 1)
    assert worker.own.admit("a", 1, [1, 2, 3], "f") == "ok"
    return worker


def read(bench: Bench, job: str = "a") -> Progress:
    return read_progress(bench.client, bench.keys, bench.records, job)


def append(bench: Bench, position: int, tokens: list[int], **fields: Any) -> None:
    """Write a stream entry past the scripts, as damage would."""
    entry = {"p": position, "t": pack_ids(tokens), "o": 0, "x": "", **fields}
    bench.client.xadd(bench.keys.tokens("a"), entry)


def test_a_queued_job_has_no_output(bench: Bench) -> None:
    bench.submit("a")
    progress = read(bench)
    assert progress.output == []
    assert progress.record.status is Status.QUEUED
    assert progress.record.prompt_ids is None


def test_what_was_committed_is_read_back_in_order(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5, 6])
    worker.commit("a", 1, 2, [7], "x", drafted=2, accepted=1)
    progress = read(bench)
    assert progress.output == [5, 6, 7]
    assert progress.record.prompt_ids == [1, 2, 3]
    assert progress.record.committed == 3


def test_log_probabilities_do_not_keep_tokens_from_being_read(bench: Bench, worker: Worker) -> None:
    details = pack_logprobs([TokenLogprob(Alternative(5, -0.5, b"x"), [])])
    worker.commit("a", 1, 0, [], prompt_logprobs=details)
    worker.commit("a", 1, 0, [5], logprobs=details)
    worker.commit("a", 1, 1, [6], "x")
    assert read(bench).output == [5, 6]


def test_a_repeated_commit_counts_once(bench: Bench, worker: Worker) -> None:
    for _ in range(3):
        worker.commit("a", 1, 0, [5, 6])
    assert read(bench).output == [5, 6]


def test_a_finished_job_keeps_its_output(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5])
    worker.finish("a", 1, 1, [6, 7])
    progress = read(bench)
    assert progress.output == [5, 6, 7]
    assert progress.record.status is Status.SUCCEEDED


def test_the_next_owner_goes_on_where_the_last_one_stopped(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5, 6])
    worker.own.release("a", 1)
    other = bench.worker("v2")
    assert other.own.claim("a") == ("claimed", 2)
    assert worker.commit("a", 1, 2, [9]) == "fenced"
    progress = read(bench)
    assert other.commit("a", 2, len(progress.output), [7]) == "ok"
    assert read(bench).output == [5, 6, 7]


def test_text_without_tokens_changes_no_position(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5])
    worker.commit("a", 1, 1, [], "late text")
    worker.commit("a", 1, 1, [6])
    assert read(bench).output == [5, 6]


def test_commits_after_the_record_was_read_are_welcome(bench: Bench, worker: Worker) -> None:
    """Record and stream are two reads; the stream may be ahead."""
    worker.commit("a", 1, 0, [5])
    bench.client.hset(bench.keys.job("a"), "committed", 0)
    assert read(bench).output == [5]


def test_an_unknown_job_is_named(bench: Bench) -> None:
    with pytest.raises(JobNotFound, match="nobody"):
        read(bench, "nobody")


def test_a_gap_is_damage(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5])
    append(bench, 2, [7])
    with pytest.raises(ProgressDamaged, match="from position 1 to 2"):
        read(bench)


def test_an_overlap_is_damage(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5, 6])
    append(bench, 1, [6, 7])
    with pytest.raises(ProgressDamaged, match="from position 2 to 1"):
        read(bench)


def test_fewer_tokens_than_the_record_promises_are_damage(bench: Bench, worker: Worker) -> None:
    worker.commit("a", 1, 0, [5, 6])
    bench.client.delete(bench.keys.tokens("a"))
    with pytest.raises(ProgressDamaged, match="0 of 2"):
        read(bench)


@pytest.mark.parametrize(
    "fields",
    [
        {"t": b"abc"},
        {"p": "one"},
        {"x": b"\xff"},
        {"e": "ascended"},
    ],
    ids=["odd ids", "no number", "no text", "no status"],
)
def test_an_entry_that_is_no_entry_is_damage(
    bench: Bench, worker: Worker, fields: dict[str, Any]
) -> None:
    worker.commit("a", 1, 0, [5])
    append(bench, 1, [6], **fields)
    with pytest.raises(ProgressDamaged, match="cannot be read"):
        read(bench)


def test_log_probabilities_are_not_read_to_continue_a_job(bench: Bench, worker: Worker) -> None:
    """A long prompt's take seconds, and tokens are all that a resume needs."""
    worker.commit("a", 1, 0, [5])
    append(bench, 1, [6], l=b"rubbish", m=b"rubbish")
    assert read(bench).output == [5, 6]
