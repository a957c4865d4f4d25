"""Leases, renewal, cancelling, and what expires when a job has ended."""

from __future__ import annotations

import pytest

from pilotfish_broker.errors import JobNotFound
from pilotfish_broker.leases import Leases, list_workers, live_workers
from pilotfish_broker.ownership import Identity
from pilotfish_broker.spec import Status
from tests.broker_kit import TTL_SECONDS, Bench

pytestmark = pytest.mark.integration


def test_a_registered_worker_is_listed_without_its_nonce(bench: Bench) -> None:
    worker = bench.worker("w", slots=3)
    worker.leases.register(3, {"pid": 1, "host": "h"})
    (record,) = list_workers(bench.client, bench.keys)
    assert (record.id, record.kind, record.model, record.slots) == ("w", "verify", "m", 3)
    assert record.is_alive
    assert record.fields["host"] == "h"
    assert worker.identity.nonce not in record.fields.values()


def test_only_workers_of_that_kind_and_model_with_a_lease_are_live(bench: Bench) -> None:
    bench.worker("w1")
    bench.worker("w2").expire()
    Leases(bench.client, bench.keys, Identity("d", "n"), "draft", "m", 1).register(1, {})
    Leases(bench.client, bench.keys, Identity("x", "n"), "verify", "m2", 1).register(1, {})
    assert live_workers(bench.client, bench.keys, "verify", "m") == {"w1"}
    assert live_workers(bench.client, bench.keys, "draft", "m") == {"d"}
    assert live_workers(bench.client, bench.keys, "draft", "m2") == set()
    alive = {worker.id: worker.is_alive for worker in list_workers(bench.client, bench.keys)}
    assert alive == {"w1": True, "w2": False, "d": True, "x": True}


def test_a_renewal_tells_of_each_job_whether_it_is_still_held(bench: Bench) -> None:
    bench.submit(*"abcde")
    worker = bench.worker("w")
    for job in "abc":
        worker.own.claim(job)
    bench.worker("other").own.claim("d")
    bench.records.cancel("b")
    held = {"a": 1, "b": 1, "c": 2, "d": 1, "e": 0, "nobody": 1}
    expected = dict.fromkeys(held, "fenced") | {"a": "ok", "b": "cancel"}
    assert worker.leases.renew(held) == expected
    assert worker.leases.renew(held) == expected
    assert worker.leases.renew({}) == {}
    assert not bench.client.exists(bench.keys.job("nobody"))


def test_a_renewal_moves_the_lease_and_revives_one_that_ended(bench: Bench) -> None:
    worker = bench.worker("w")
    worker.expire()
    assert live_workers(bench.client, bench.keys, "verify", "m") == set()
    assert worker.leases.renew({}) == {}
    assert live_workers(bench.client, bench.keys, "verify", "m") == {"w"}


def test_a_worker_that_is_not_known_any_more_has_lost_its_lease(bench: Bench) -> None:
    worker = bench.worker("w")
    worker.leases.leave()
    assert worker.leases.renew({}) is None
    assert live_workers(bench.client, bench.keys, "verify", "m") == set()
    stranger = Leases(bench.client, bench.keys, Identity("w", "n2"), "verify", "m", 1)
    stranger.register(1, {})
    assert worker.leases.renew({}) is None, "its name belongs to another incarnation"
    assert not worker.leases.leave()
    assert stranger.renew({}) == {}


def test_a_renewal_of_many_jobs_is_one_call(bench: Bench) -> None:
    jobs = [f"j{number}" for number in range(1000)]
    bench.submit(*jobs)
    worker = bench.worker("w", slots=1000)
    for job in jobs:
        worker.own.claim(job)
    assert worker.leases.renew(dict.fromkeys(jobs, 1)) == dict.fromkeys(jobs, "ok")


def test_a_worker_leaves_only_when_it_owns_nothing(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    bench.client.rpush(bench.keys.inbox("w"), b"x")
    assert not worker.leases.leave()
    worker.own.release("a", 1)
    assert worker.leases.leave()
    assert list_workers(bench.client, bench.keys) == []
    assert [key for key in bench.client.scan_iter() if b":w" in key] == []


def test_a_queued_job_is_cancelled_at_once(bench: Bench) -> None:
    bench.submit("a", "b", group="g")
    bench.worker("w", slots=1)
    bench.dispatcher.top_up("m")
    assert (bench.dispatched(), bench.pending()) == ({"a"}, {"b"})
    assert [bench.records.cancel(job) for job in "ab"] == ["cancelled", "cancelled"]
    before = bench.dump()
    assert [bench.records.cancel(job) for job in "ab"] == ["ended", "ended"]
    assert bench.dump() == before
    assert (bench.dispatched(), bench.pending()) == (set(), set())
    record = bench.records.get("a")
    assert (record.status, record.finish_reason) == (Status.CANCELLED, "cancelled")
    assert bench.client.xlen(bench.keys.done("g")) == 2
    assert [entry.end for entry in bench.stream("a")] == [Status.CANCELLED]


def test_a_running_job_is_flagged_for_its_owner(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    assert bench.records.cancel("a") == "flagged"
    assert bench.records.cancel("a") == "flagged"
    assert bench.records.get("a").status == Status.RUNNING
    assert worker.leases.renew({"a": 1}) == {"a": "cancel"}
    assert worker.finish("a", 1, 0, [], status=Status.CANCELLED) == "finished"
    assert bench.records.cancel("a") == "ended"


def test_a_job_that_is_not_there_cannot_be_cancelled(bench: Bench) -> None:
    with pytest.raises(JobNotFound):
        bench.records.cancel("nobody")
    assert bench.dump() == {}


@pytest.mark.parametrize("way", ["finish", "cancel", "release", "reaper"])
def test_what_an_ended_job_leaves_expires_whichever_way_it_ended(bench: Bench, way: str) -> None:
    bench.submit("a", "other", group="g")
    worker = bench.worker("w")
    if way == "cancel":
        bench.records.cancel("a")
    else:
        worker.own.claim("a")
        worker.commit("a", 1, 0, [1])
        bench.records.cancel("a")
    if way == "finish":
        worker.finish("a", 1, 1, [], group="g", status=Status.CANCELLED)
    elif way == "release":
        worker.own.release("a", 1)
    elif way == "reaper":
        worker.expire()
        assert bench.reap() == 1
    assert bench.records.get("a").status == Status.CANCELLED
    keys = bench.keys
    ttls = [bench.client.ttl(key) for key in (keys.job("a"), keys.tokens("a"), keys.done("g"))]
    most = bench.settings.result_ttl_seconds if way == "reaper" else TTL_SECONDS
    assert all(0 < ttl <= most for ttl in ttls)
    assert bench.client.ttl(keys.job("other")) == -1


def test_a_job_that_goes_on_does_not_expire(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1])
    worker.own.release("a", 1)
    keys = (bench.keys.job("a"), bench.keys.tokens("a"))
    assert [bench.client.ttl(key) for key in keys] == [-1, -1]
