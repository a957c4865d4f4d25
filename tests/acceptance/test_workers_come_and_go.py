"""Promises 2 and 4, durable and elastic: workers of a deployment die, leave and join; no answer
changes, nothing is committed twice, and nobody starts a dead worker again but the test.

Up to two verify and two draft workers serve one model; each test first starts what it needs and
an earlier one has killed.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pilotfish import JobRecord, JobSpec, SamplingParams, Status
from pilotfish_broker.keys import Keys
from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.process_kit import Program, wait_until
from tests.reference_kit import (
    Greedy,
    Line,
    check_results,
    check_stream,
    random_prompts,
    simulated_line,
    stream,
)
from tests.tiny_models import build_tiny

JOBS = 32
MAX_TOKENS = 192
LEASE_SECONDS = "1.5"

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.integration]

BAD_CONFIGURATION = 2  # exit status


@dataclass(slots=True)
class Deployment:
    """The fleet, its references, and the jobs of one test."""

    fleet: Fleet
    greedy: Greedy
    folder: Path
    redis: Any
    keys: Keys
    rounds: int = 0

    def submit(self, speculation: int | str) -> dict[str, Line]:
        """Submit all prompts; gives the references by job id."""
        self.rounds += 1
        lines = [
            self.greedy.line(number, MAX_TOKENS, speculation, ignore_eos=True)
            for number in range(JOBS)
        ]
        params = SamplingParams(max_tokens=MAX_TOKENS, speculation=speculation, ignore_eos=True)
        specs = [JobSpec(model="tiny", prompt=line.source, params=params) for line in lines]
        ids = [f"t{self.rounds}-{line.custom_id}" for line in lines]
        self.fleet.client.submit_many(specs, ids=ids)
        return dict(zip(ids, lines, strict=True))

    def records(self, jobs: dict[str, Line]) -> list[JobRecord]:
        found = self.fleet.client.records(jobs)
        return [record for record in found if record is not None]

    def await_middle(self, jobs: dict[str, Line], owner: str = "") -> None:
        """Wait until a good part is committed, drafts were accepted, and much is to come; with
        `owner`, also that this worker has running jobs with committed tokens."""

        def is_middle() -> bool:
            records = self.records(jobs)
            done = sum(record.committed for record in records)
            mine = [r for r in records if r.worker == owner and r.status == Status.RUNNING]
            return (
                done > JOBS * MAX_TOKENS // 10
                and sum(record.accepted for record in records) > JOBS
                and (not owner or any(record.committed for record in mine))
            )

        wait_until(is_middle, "jobs to be in their middle", self.programs)
        done = sum(record.committed for record in self.records(jobs))
        assert done < JOBS * MAX_TOKENS * 3 // 4, "too late: most tokens are committed already"

    @property
    def programs(self) -> list[Program]:
        return [*self.fleet.running("verify"), *self.fleet.running("draft")]

    def await_end(self, jobs: dict[str, Line]) -> list[JobRecord]:
        """Wait until all have ended, then check all that was committed; gives the records."""

        def all_ended() -> bool:
            return all(record.status.is_terminal for record in self.records(jobs))

        wait_until(all_ended, "all jobs to end", self.programs)
        check_results(self.fleet.client, jobs)
        for job, line in jobs.items():
            check_stream(self.redis, self.keys, job, line)
        return self.records(jobs)


@pytest.fixture(scope="module")
def deployment(
    start_fleet: StartFleet, tmp_path_factory: pytest.TempPathFactory, valkey: Any
) -> Deployment:
    folder = tmp_path_factory.mktemp("fleet")
    target = build_tiny(folder / "tiny", "llama", seed=0)
    common = ["--target", str(target), "--dtype", "float32", "--slots", "16"]
    common += ["--lease-seconds", LEASE_SECONDS]
    fleet = start_fleet("fleet", verify=common, draft=[*common, "--draft", str(target)])
    for kind in ("verify", "draft"):
        fleet.start(kind)
        fleet.start(kind)
    prompts = [*random_prompts(4, 1, 60), *random_prompts(JOBS - 4, 40, 40)]
    greedy = Greedy(target, prompts, [MAX_TOKENS] * JOBS)
    return Deployment(fleet, greedy, folder, valkey.client(), Keys("fleet"))


def test_two_verify_and_two_draft_workers_share_the_work(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=2, draft=2)
    jobs = deployment.submit(speculation=3)
    records = deployment.await_end(jobs)
    verify = {deployment.fleet.record(program).id for program in deployment.fleet.running("verify")}
    assert {record.worker for record in records} == verify
    assert sum(record.accepted for record in records) > JOBS
    drafting = {entry for job in jobs for entry in drafted_by(deployment, job)}
    assert drafting == {program.name for program in deployment.fleet.running("draft")}


def drafted_by(deployment: Deployment, job: str) -> list[str]:
    """Names of the draft workers whose logs tell of a finished draft session for a job."""
    needle = f"[{job}-draft] succeeded"
    return [
        program.name
        for program in deployment.fleet.running("draft")
        if needle in program.log.read_text()
    ]


def test_jobs_of_a_killed_verify_worker_are_taken_over(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=2, draft=1)
    victim, heir = deployment.fleet.running("verify")
    victims_id, heirs_id = deployment.fleet.record(victim).id, deployment.fleet.record(heir).id
    jobs = deployment.submit(speculation=2)
    deployment.await_middle(jobs, owner=victims_id)
    victim.send(signal.SIGKILL)
    victim.wait()
    orphans = [
        record
        for record in deployment.records(jobs)
        if record.worker == victims_id and record.status is Status.RUNNING
    ]
    assert any(record.committed for record in orphans), "it owned nothing that had begun"
    records = {record.id: record for record in deployment.await_end(jobs)}
    for orphan in orphans:
        record = records[orphan.id]
        assert record.worker == heirs_id
        assert record.epoch > orphan.epoch
        assert record.committed >= orphan.committed
    committed = sum(orphan.committed for orphan in orphans)
    assert {records[o.id].attempts for o in orphans if o.committed} == {0}, committed


def test_a_verify_worker_that_is_told_to_end_hands_its_jobs_over(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=2, draft=1)
    leaver, heir = deployment.fleet.running("verify")
    leavers_id, heirs_id = deployment.fleet.record(leaver).id, deployment.fleet.record(heir).id
    jobs = deployment.submit(speculation=2)
    deployment.await_middle(jobs, owner=leavers_id)
    leaver.send(signal.SIGTERM)
    before = {job: tokens_of(deployment, job) for job in jobs}
    leaver.wait()
    assert leavers_id not in {worker.id for worker in deployment.fleet.client.workers()}
    records = deployment.await_end(jobs)
    for job, tokens in before.items():
        assert tokens_of(deployment, job)[: len(tokens)] == tokens
    moved = [record for record in records if record.epoch > 1]
    assert moved, "no job moved"
    assert {record.worker for record in moved} == {heirs_id}
    assert {record.attempts for record in records} == {0}


def test_jobs_go_on_when_all_draft_workers_are_killed(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=1, draft=2)
    jobs = deployment.submit(speculation=2)
    deployment.await_middle(jobs)
    before = {record.id: record for record in deployment.records(jobs)}
    for program in deployment.fleet.running("draft"):
        program.send(signal.SIGKILL)
        program.wait()
    records = deployment.await_end(jobs)
    assert not deployment.fleet.running("draft")
    assert any(not record.status.is_terminal for record in before.values())
    assert {record.attempts for record in records} == {0}
    assert {record.epoch for record in records} == {1}, "a draft worker's death moved a job"


def test_a_drafter_with_another_vocabulary_is_refused_and_the_jobs_decode_plainly(
    deployment: Deployment,
) -> None:
    fleet = deployment.fleet
    fleet.ensure(verify=1)
    for program in fleet.running("draft"):
        program.kill()
    other = build_tiny(deployment.folder / "other", "llama", seed=1, vocab_size=300)
    stranger = fleet.start("draft", "--draft", str(other))
    assert stranger.wait() == BAD_CONFIGURATION
    refusal = stranger.log.read_text()
    assert "the draft has 300 tokens, the target 288" in refusal
    assert "the first difference is id 288" in refusal
    records = deployment.await_end(deployment.submit(speculation=4))
    assert sum(record.drafted for record in records) == 0


def test_a_drafter_ends_when_a_target_with_another_vocabulary_comes_after_it(
    start_fleet: StartFleet,
) -> None:
    target, draft = "simulated:pass_ms=1,vocab=300", "simulated:pass_ms=1,vocab=200"
    fleet = start_fleet(
        "strangers",
        verify=["--target", target, "--model", "sim"],
        draft=["--draft", draft, "--model", "sim"],
    )
    fleet.ensure(draft=1)
    (stranger,) = fleet.running("draft")
    fits = fleet.start("verify", "--target", draft)
    fleet.await_ready()
    fits.send(signal.SIGTERM)
    assert fits.wait() == 0
    assert stranger.is_running, "the target that it fitted has left, which is no reason to"
    fleet.start("verify")
    assert stranger.wait() == BAD_CONFIGURATION
    assert "the draft has 200 tokens, the target 300" in stranger.log.read_text()
    fleet.await_ready()
    job = fleet.client.submit("on my own", SamplingParams(max_tokens=9))
    assert job.result(timeout=60).completion_tokens == 9


def tokens_of(deployment: Deployment, job: str) -> list[int]:
    entries = stream(deployment.redis, deployment.keys, job)
    return [token for _, entry in entries for token in entry.tokens]


def test_a_verify_worker_that_is_told_to_end_does_not_wait_for_its_jobs(
    start_fleet: StartFleet,
) -> None:
    """SIGTERM with long jobs and nobody to take them: it leaves, a later worker finishes them."""
    options = ["--target", "simulated:pass_ms=20", "--model", "sim", "--slots", "8"]
    fleet = start_fleet("leaving", verify=options, draft=options)
    fleet.ensure(verify=1)
    lines = {f"long{number}": simulated_line(number, 250) for number in range(6)}
    params = SamplingParams(max_tokens=250)
    specs = [JobSpec(model="sim", prompt=line.source, params=params) for line in lines.values()]
    fleet.client.submit_many(specs, ids=lines)
    wait_until(lambda: fleet.client.committed(lines) > 100, "some tokens", fleet.running("verify"))
    (leaver,) = fleet.running("verify")
    leaver.send(signal.SIGTERM)
    before = fleet.client.committed(lines)
    assert leaver.wait() == 0, leaver.tail()
    assert "Traceback" not in leaver.log.read_text()
    assert not fleet.client.workers()
    records = fleet.client.records(lines)
    assert {record.status for record in records if record} == {"queued"}
    assert fleet.client.committed(lines) >= before
    fleet.ensure(verify=1)
    for job in lines:
        fleet.client.job(job).result(timeout=90)
    check_results(fleet.client, lines)
