"""Which records the samples of a request are, and where it stands by them."""

from __future__ import annotations

import pytest

from pilotfish.samples import overall, sample_id, sample_ids, spread
from pilotfish_broker.settings import MODEL_NAME
from pilotfish_broker.spec import JobSpec, SamplingParams, Status

Q, R, S = Status.QUEUED, Status.RUNNING, Status.SUCCEEDED
F, C, E = Status.FAILED, Status.CANCELLED, Status.EXPIRED


def spec(n: int, sample: int = 0) -> JobSpec:
    return JobSpec(model="m", prompt="hi", params=SamplingParams(n=n, seed=4), sample=sample)


def test_a_single_sample_is_the_job_itself() -> None:
    assert sample_ids("a", spec(1)) == ["a"]
    assert list(spread("a", spec(1))) == [("a", spec(1))]


def test_samples_differ_in_nothing_but_their_number_and_the_first_comes_last() -> None:
    jobs = list(spread("a", spec(3)))
    assert jobs == [("a.2", spec(3, 2)), ("a.1", spec(3, 1)), ("a", spec(3))]
    assert [job for job, _ in reversed(jobs)] == sample_ids("a", spec(3))


def test_a_later_samples_id_is_that_sample_alone() -> None:
    assert sample_ids("a.2", spec(3, 2)) == ["a.2"]
    assert list(spread("b", spec(3, 2))) == [("b", spec(3, 2))]


def test_every_samples_id_is_one_that_may_be_used() -> None:
    job = "f" * 24
    assert all(MODEL_NAME.fullmatch(sample_id(job, sample)) for sample in range(128))


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([Q], Q),
        ([Q, Q], Q),
        ([Q, R], R),
        ([Q, S], R),
        ([R, F], R),
        ([S, Q, C], R),
        ([S, S], S),
        ([S, E], E),
        ([E, C, S], C),
        ([C, F, S], F),
    ],
)
def test_a_request_stands_where_its_samples_do(statuses: list[Status], status: Status) -> None:
    assert overall(statuses) is status
    assert overall(reversed(statuses)) is status
