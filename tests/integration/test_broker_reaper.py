"""The reaper takes jobs from workers that are dead or do not hold them, and from nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from pilotfish_broker.leases import forget_keys, list_workers
from pilotfish_broker.models import ModelRecord, write_model
from pilotfish_broker.reaper import Reaper
from pilotfish_broker.scripts import Scripts
from pilotfish_broker.spec import Status
from tests.broker_kit import Bench

pytestmark = pytest.mark.integration


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pilotfish_broker.reaper.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_jobs_of_a_worker_whose_lease_ended_are_queued_again_in_their_place(bench: Bench) -> None:
    bench.submit(*"abc")
    dead, live = bench.worker("dead"), bench.worker("live")
    dead.own.claim("a")
    dead.commit("a", 1, 0, [1, 2], "xy")
    live.own.claim("b")
    dead.expire()
    assert bench.reap() == 1
    assert bench.client.zrange(bench.keys.pending("m"), 0, -1) == [b"a", b"c"]
    assert bench.running() == {"b"}
    record = bench.records.get("a")
    assert (record.status, record.worker) == (Status.QUEUED, "")
    assert record.committed == 2
    assert live.own.claim("a") == ("claimed", 2)
    assert dead.commit("a", 1, 2, [3]) == "fenced"
    assert dead.finish("a", 1, 2, []) == "fenced"
    assert not dead.own.release("a", 1)
    assert bench.tokens("a") == [1, 2]


def test_a_dead_worker_leaves_the_registry_and_a_live_one_stays(bench: Bench) -> None:
    dead = bench.worker("dead")
    bench.worker("live")
    bench.client.rpush(bench.keys.inbox("dead"), b"x")
    dead.expire()
    assert bench.reap() == 0
    assert [worker.id for worker in list_workers(bench.client, bench.keys)] == ["live"]
    assert [key for key in bench.client.scan_iter() if b"dead" in key] == []
    assert bench.client.hkeys(bench.keys.workers("verify", "m")) == [b"live"]
    assert dead.leases.renew({}) is None


def test_nothing_is_taken_from_a_live_worker(bench: Bench) -> None:
    bench.submit("a")
    bench.worker("w").own.claim("a")
    before = bench.dump()
    assert bench.reap() == 0
    assert bench.dump() == before


def test_only_deaths_in_a_row_without_a_commit_count_as_attempts(
    bench: Bench,
) -> None:
    bench.submit("a")
    attempts = []
    for number, tokens in enumerate([[], [], [1], [], [2, 3], []]):
        worker = bench.worker(f"w{number}")
        _, epoch = worker.own.claim("a")
        if tokens:
            worker.commit("a", epoch, len(bench.tokens("a")), tokens)
        worker.expire()
        assert bench.reap() == 1
        attempts.append(bench.records.get("a").attempts)
    assert attempts == [1, 2, 0, 1, 0, 1]


def test_a_job_that_kills_its_workers_fails_at_the_last_attempt_with_the_reason(
    bench: Bench,
) -> None:
    bench.submit("a", group="g")
    for number in range(bench.settings.max_attempts):
        assert bench.records.get("a").status == Status.QUEUED
        worker = bench.worker(f"w{number}")
        _, epoch = worker.own.claim("a")
        worker.expire()
        assert bench.reap() == 1
    record = bench.records.get("a")
    assert (record.status, record.attempts) == (Status.FAILED, 3)
    assert "died 3 times" in record.error
    assert [entry.end for entry in bench.stream("a")] == [Status.FAILED]
    assert bench.client.xlen(bench.keys.done("g")) == 1
    assert (bench.pending(), bench.running()) == (set(), set())
    assert worker.finish("a", epoch, 0, [1]) == "fenced", "the end is not its own"
    assert bench.reap() == 0


def test_drains_and_ended_jobs_never_count(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker("w")
    for epoch in range(1, 6):
        worker.own.claim("a")
        worker.own.release("a", epoch)
    worker.own.claim("b")
    worker.finish("b", 1, 0, [7])
    before = bench.client.dump(bench.keys.job("b"))
    worker.expire()
    assert bench.reap() == 0
    assert bench.records.get("a").attempts == 0
    assert bench.client.dump(bench.keys.job("b")) == before


def test_a_job_to_be_cancelled_ends_with_its_worker(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    bench.records.cancel("a")
    worker.expire()
    assert bench.reap() == 1
    record = bench.records.get("a")
    assert (record.status, record.attempts) == (Status.CANCELLED, 0)
    assert worker.finish("a", 1, 0, [1]) == "fenced"


def test_a_job_that_its_live_owner_does_not_list_is_queued_again(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.own.claim("b")
    for job in "ab":
        bench.client.hset(bench.keys.job(job), "seen_ms", 1)
    worker.leases.renew({"b": 1})
    assert bench.reap() == 1
    assert (bench.pending(), bench.running()) == ({"a"}, {"b"})
    assert bench.records.get("a").attempts == 0, "its owner did not die"
    assert bench.ids(bench.keys.worker_jobs("w")) == {"b"}


def test_a_job_that_was_just_claimed_has_time_to_be_listed(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    assert worker.leases.renew({}) == {}
    assert bench.reap() == 0


def test_an_owner_is_judged_by_its_own_lease_not_by_the_reapers(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    key = bench.keys.worker("w")
    assert bench.client.hget(key, "lease_ms") == b"10000"
    seconds, micros = bench.client.time()
    bench.client.hset(bench.keys.job("a"), "seen_ms", seconds * 1000 + micros // 1000 - 25_000)
    bench.client.hset(key, "lease_ms", 30_000)
    assert bench.reap() == 0
    bench.client.hset(key, "lease_ms", 10_000)
    assert bench.reap() == 1


def test_a_damaged_record_keeps_no_other_job_back(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.own.claim("b")
    bench.client.hset(bench.keys.job("a"), "attempts", "many")
    worker.expire()
    assert bench.reap() == 1
    assert bench.pending() == {"b"}


def test_a_job_that_another_worker_owns_by_now_stays_with_it(bench: Bench) -> None:
    bench.submit("a")
    dead, live = bench.worker("dead"), bench.worker("live")
    live.own.claim("a")
    bench.client.sadd(bench.keys.worker_jobs("dead"), "a")
    dead.expire()
    assert bench.reap() == 0
    assert live.commit("a", 1, 0, [1]) == "ok"
    assert bench.ids(bench.keys.worker_jobs("live")) == {"a"}


def test_a_worker_that_renews_before_it_is_forgotten_stays(bench: Bench) -> None:
    """The reaper's list of workers is older than its last step."""
    worker = bench.worker("w")
    script_keys = forget_keys(bench.keys, "w", "verify", "m")
    assert Scripts(bench.client).run("forget", script_keys, ["w", ""]) == b"kept"
    assert worker.leases.renew({}) == {}
    worker.expire()
    assert Scripts(bench.client).run("forget", script_keys, ["w", ""]) == b"forgotten"


def test_an_id_left_among_a_workers_jobs_is_swept_and_the_job_untouched(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    bench.client.sadd(bench.keys.worker_jobs("w"), "a", "nobody")
    worker.expire()
    assert bench.reap() == 0
    assert bench.records.get("a").status == Status.QUEUED
    assert not bench.client.exists(bench.keys.worker_jobs("w"))
    assert list_workers(bench.client, bench.keys) == []


def test_one_of_several_reapers_acts_at_a_time(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    first, second = bench.reaper(), bench.reaper()
    assert first.tick() == 0
    worker.expire()
    assert second.tick() == 0, "the other one's lock still holds"
    bench.client.delete(bench.keys.reaper)
    assert second.tick() == 1


def test_a_new_reaper_waits_one_lease_without_holding_others_up(bench: Bench, clock: Clock) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.expire()
    reaper = Reaper(bench.client, bench.keys, bench.settings, bench.dispatcher)
    for _ in range(3):
        assert reaper.tick() == 0
        clock.now += bench.settings.lease_seconds / 4
    assert not bench.client.exists(bench.keys.reaper)
    clock.now += bench.settings.lease_seconds / 4
    assert reaper.tick() == 1


def test_after_a_gap_between_two_answers_it_waits_one_lease(bench: Bench, clock: Clock) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    reaper = bench.reaper()
    worker.expire()
    clock.now += bench.settings.lease_seconds * 0.6
    assert reaper.tick() == 0
    clock.now += bench.settings.lease_seconds * 0.4
    assert reaper.tick() == 0
    clock.now += bench.settings.lease_seconds * 0.4
    assert reaper.tick() == 0
    clock.now += bench.settings.lease_seconds * 0.4
    assert reaper.tick() == 1


def test_after_an_outage_it_waits_one_lease(start_valkey: Any, bench: Bench, clock: Clock) -> None:
    server = start_valkey(appendonly="yes", appendfsync="always")
    own = Bench(server.client(), bench.keys, bench.settings)
    own.submit("a")
    worker = own.worker("w")
    worker.own.claim("a")
    reaper = own.reaper()
    server.stop()
    with pytest.raises(redis.ConnectionError):
        reaper.tick()
    server.start()
    worker.expire()
    assert reaper.tick() == 0
    clock.now += bench.settings.lease_seconds * 0.45
    assert reaper.tick() == 0
    clock.now += bench.settings.lease_seconds * 0.45
    assert reaper.tick() == 0
    clock.now += bench.settings.lease_seconds * 0.45
    assert reaper.tick() == 1
    assert own.records.get("a").status == Status.QUEUED


def test_it_rings_for_what_it_took_back_and_for_lost_bells_even_while_it_waits(
    bench: Bench, clock: Clock
) -> None:
    write_model(bench.client, bench.keys, ModelRecord("m", 1, 1, "", "", ""), [])
    bench.submit("a", "b")
    dead = bench.worker("dead", slots=1)
    bench.worker("live", slots=2)
    dead.own.claim("a")
    dead.expire()
    assert bench.reap() == 1
    assert bench.dispatched() == {"a", "b"}
    queue = bench.keys.celery_queue("verify.m")
    bench.client.delete(queue)
    bench.client.zadd(bench.keys.dispatched("m"), {"a": 1, "b": 1})
    Reaper(bench.client, bench.keys, bench.settings, bench.dispatcher).tick()
    assert bench.client.llen(queue) == 2
