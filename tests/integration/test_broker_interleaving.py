"""Three workers, three jobs, any order of calls: a model of the rules against the real server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pilotfish_broker.keys import Keys
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import TERMINAL, Status
from tests.broker_kit import MODEL, Bench, Worker

pytestmark = pytest.mark.integration

JOBS = ("a", "b", "c")
WORKERS = ("w1", "w2", "w3")
GROUP = "g"

jobs = st.sampled_from(JOBS)
workers = st.sampled_from(WORKERS)
# how far a caller's idea of epoch or length is off; mostly it is right
offs = st.sampled_from([0, 0, 0, 0, -1, 1])
new_tokens = st.lists(st.integers(0, 5), max_size=3)


@dataclass
class Call:
    """A commit as it was last accepted: what its exact repeat must look like."""

    worker: str
    epoch: int
    expected: int
    tokens: list[int]


@dataclass
class Job:
    """What the rules say of one job."""

    status: Status = Status.QUEUED
    owner: str = ""
    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    attempts: int = 0
    is_cancelled: bool = False
    is_unlisted: bool = False
    claimed_length: int = 0
    ended_by: tuple[str, int] = ("", 0)
    last: Call | None = None

    def is_owned(self, worker: str, epoch: int) -> bool:
        return (self.status, self.owner, self.epoch) == (Status.RUNNING, worker, epoch)

    def append(self, worker: str, epoch: int, expected: int, tokens: list[int]) -> str:
        if not self.is_owned(worker, epoch):
            return "fenced"
        if tokens and self.last and (self.last.expected, self.last.tokens) == (expected, tokens):
            return "already"
        if expected != len(self.tokens):
            return "fenced"
        if tokens:
            self.tokens += tokens
            self.rounds += 1
            self.last = Call(worker, epoch, expected, tokens)
        return "ok"

    def end(self, status: Status, ended_by: tuple[str, int] = ("", 0)) -> None:
        self.status, self.owner, self.ended_by = status, "", ended_by

    def queue_again(self) -> None:
        self.status, self.owner = Status.QUEUED, ""


class Interleaving(RuleBasedStateMachine):
    """Every rule predicts its reply; the invariant compares the whole state."""

    client: Any
    settings: Settings

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.bench = Bench(self.client, Keys(), self.settings)
        self.bench.submit(*JOBS, group=GROUP)
        self.workers: dict[str, Worker] = {n: self.bench.worker(n, slots=1) for n in WORKERS}
        self.alive = dict.fromkeys(WORKERS, True)
        self.known = dict.fromkeys(WORKERS, True)
        self.jobs = {name: Job() for name in JOBS}
        self.rung: set[str] = set()

    def owned(self, worker: str) -> list[str]:
        return [name for name, job in self.jobs.items() if job.owner == worker]

    @rule(worker=workers, name=jobs)
    def claim(self, worker: str, name: str) -> None:
        job = self.jobs[name]
        if job.status == Status.RUNNING:
            expected = "yours" if job.owner == worker else "held"
        elif job.status in TERMINAL:
            expected = "ended"
        elif not self.alive[worker]:
            expected = "unregistered"
        else:
            expected = "claimed"
            job.status, job.owner, job.epoch = Status.RUNNING, worker, job.epoch + 1
            job.claimed_length, job.is_unlisted = len(job.tokens), False
            self.rung.discard(name)
        outcome, epoch = self.workers[worker].own.claim(name)
        assert outcome == expected
        assert epoch == (0 if outcome == "unregistered" else job.epoch)

    @rule(worker=workers, name=jobs, late=offs, shift=offs, tokens=new_tokens)
    def commit(self, worker: str, name: str, late: int, shift: int, tokens: list[int]) -> None:
        job = self.jobs[name]
        epoch, expected = job.epoch + late, max(0, len(job.tokens) + shift)
        outcome = job.append(worker, epoch, expected, tokens)
        if outcome != "fenced" and job.is_cancelled:
            outcome = "cancel"
        text = "".join(map(str, tokens))
        assert self.workers[worker].commit(name, epoch, expected, tokens, text) == outcome

    @rule(name=jobs)
    def repeat_the_last_commit(self, name: str) -> None:
        job = self.jobs[name]
        if job.last is None:
            return
        call = job.last
        outcome = "already" if job.is_owned(call.worker, call.epoch) else "fenced"
        if outcome == "already" and job.is_cancelled:
            outcome = "cancel"
        worker = self.workers[call.worker]
        assert worker.commit(name, call.epoch, call.expected, call.tokens, "x") == outcome

    @rule(worker=workers, name=jobs, late=offs, shift=offs, tokens=new_tokens)
    def finish(self, worker: str, name: str, late: int, shift: int, tokens: list[int]) -> None:
        job = self.jobs[name]
        epoch, expected = job.epoch + late, max(0, len(job.tokens) + shift)
        if job.status in TERMINAL and job.ended_by == (worker, epoch):
            outcome = "already"
        else:
            outcome = job.append(worker, epoch, expected, tokens)
            if outcome != "fenced":
                outcome = "finished"
                job.end(Status.SUCCEEDED, (worker, epoch))
        text = "".join(map(str, tokens))
        reply = self.workers[worker].finish(name, epoch, expected, tokens, text, group=GROUP)
        assert reply == outcome

    @rule(worker=workers, name=jobs, late=offs)
    def release(self, worker: str, name: str, late: int) -> None:
        job = self.jobs[name]
        epoch = job.epoch + late
        is_owned = job.is_owned(worker, epoch)
        if is_owned and job.is_cancelled:
            job.end(Status.CANCELLED)
        elif is_owned:
            job.queue_again()
        assert self.workers[worker].own.release(name, epoch) == is_owned

    @rule(name=jobs)
    def cancel(self, name: str) -> None:
        job = self.jobs[name]
        if job.status in TERMINAL:
            expected = "ended"
        elif job.status == Status.RUNNING:
            expected = "flagged"
            job.is_cancelled = True
        else:
            expected = "cancelled"
            job.end(Status.CANCELLED)
            self.rung.discard(name)
        assert self.bench.records.cancel(name) == expected

    @rule(worker=workers, listed=st.sets(jobs))
    def renew(self, worker: str, listed: set[str]) -> None:
        reply = self.workers[worker].leases.renew({n: self.jobs[n].epoch for n in listed})
        if not self.known[worker]:
            assert reply is None
            return
        self.alive[worker] = True
        expected = {}
        for name in listed:
            job = self.jobs[name]
            if not job.is_owned(worker, job.epoch):
                expected[name] = "fenced"
                continue
            job.is_unlisted = False
            expected[name] = "cancel" if job.is_cancelled else "ok"
        assert reply == expected

    @rule(worker=workers)
    def lease_ends(self, worker: str) -> None:
        self.workers[worker].expire()
        self.alive[worker] = False

    @rule(worker=workers)
    def register_again(self, worker: str) -> None:
        self.workers[worker].leases.register(1, {"pid": 1})
        self.alive[worker] = self.known[worker] = True

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        may_leave = self.known[worker] and not self.owned(worker)
        if may_leave:
            self.alive[worker] = self.known[worker] = False
        assert self.workers[worker].leases.leave() == may_leave

    @rule(name=jobs)
    def not_listed_for_long(self, name: str) -> None:
        if self.jobs[name].status == Status.RUNNING:
            self.client.hset(self.bench.keys.job(name), "seen_ms", 1)
            self.jobs[name].is_unlisted = True

    @rule()
    def reap(self) -> None:
        taken = 0
        for job in self.jobs.values():
            if job.status != Status.RUNNING:
                continue
            is_dead = not self.alive[job.owner]
            if not is_dead and not job.is_unlisted:
                continue
            taken += 1
            has_counted = is_dead and len(job.tokens) == job.claimed_length
            if job.is_cancelled:
                job.end(Status.CANCELLED)
            elif has_counted and job.attempts + 1 == self.settings.max_attempts:
                job.attempts += 1
                job.end(Status.FAILED)
            else:
                starts_anew = is_dead and not has_counted  # it had committed since its claim
                job.attempts = 0 if starts_anew else job.attempts + has_counted
                job.queue_again()
        for worker in WORKERS:
            self.known[worker] = self.known[worker] and self.alive[worker]
        assert self.bench.reap() == taken

    @rule()
    def top_up(self) -> None:
        queued = {name for name, job in self.jobs.items() if job.status == Status.QUEUED}
        running = sum(job.status == Status.RUNNING for job in self.jobs.values())
        free = sum(self.alive.values()) - running - len(self.rung)
        expected = max(0, min(free, len(queued - self.rung)))
        assert self.bench.dispatcher.top_up(MODEL) == expected
        self.rung |= set(sorted(queued - self.rung)[:expected])

    @invariant()
    def the_server_holds_what_the_rules_say(self) -> None:
        bench = self.bench
        by_status: dict[Status, set[str]] = {status: set() for status in Status}
        for name, job in self.jobs.items():
            by_status[job.status].add(name)
            record = bench.records.get(name)
            assert (record.status, record.epoch, record.attempts, record.rounds) == (
                job.status,
                job.epoch,
                job.attempts,
                job.rounds,
            )
            self._check_stream(name, job, record.committed, record.visible)
        assert bench.dispatched() == self.rung
        assert bench.pending() == by_status[Status.QUEUED] - self.rung
        assert bench.running() == by_status[Status.RUNNING]
        for worker in WORKERS:
            assert bench.ids(bench.keys.worker_jobs(worker)) == set(self.owned(worker))
        ended = {
            (fields[b"job"].decode(), fields[b"status"].decode())
            for _, fields in self.client.xrange(bench.keys.done(GROUP))
        }
        assert ended == {(n, str(j.status)) for n, j in self.jobs.items() if j.status in TERMINAL}
        assert self.client.xlen(bench.keys.done(GROUP)) == len(ended)

    def _check_stream(self, name: str, job: Job, committed: int, visible: int) -> None:
        entries = self.bench.stream(name)
        position = offset = 0
        for entry in entries:
            if entry.end is None:
                assert (entry.position, entry.offset) == (position, offset)
            position += len(entry.tokens)
            offset += len(entry.text)
        assert self.bench.tokens(name) == job.tokens
        assert committed == position == len(job.tokens)
        assert visible == offset
        ends = [entry.end for entry in entries if entry.end is not None]
        assert ends == ([job.status] if job.status in TERMINAL else [])


def test_no_order_of_calls_breaks_the_rules(redis_client: Any, settings: Settings) -> None:
    """Never two commits for one place, never a job that ends twice or opens again."""

    class OnThisServer(Interleaving):
        pass

    OnThisServer.client = redis_client
    OnThisServer.settings = settings
    run_state_machine_as_test(
        OnThisServer,
        settings=hypothesis_settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
