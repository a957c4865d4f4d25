"""Claim, commit, finish and release: fenced by owner and epoch, and safe to repeat."""

from __future__ import annotations

import pytest

from pilotfish_broker.codec import decode_all
from pilotfish_broker.logprobs import Alternative, TokenLogprob, pack_logprobs
from pilotfish_broker.messages import Verdict
from pilotfish_broker.ownership import INBOX_TTL_MS, Commit, Identity, Ownership, Tail
from pilotfish_broker.spec import Status
from tests.broker_kit import TTL_SECONDS, Bench

pytestmark = pytest.mark.integration


def verdict(session: int) -> Verdict:
    return Verdict(session, 0, 1, 9, 4)


def known(*tokens: int, logprob: float = -0.5) -> list[TokenLogprob]:
    """Log-probabilities of some tokens, with an alternative each."""
    other = Alternative(99, -0.25, b"\xf0\x9f")
    return [TokenLogprob(Alternative(token, logprob, b"x"), [other]) for token in tokens]


def raw_fields(bench: Bench, job: str) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in bench.client.xrange(bench.keys.tokens(job))]


def test_a_claim_makes_this_worker_the_owner_in_the_next_epoch(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    assert worker.own.claim("a") == ("claimed", 1)
    record = bench.records.get("a")
    assert (record.status, record.epoch, record.worker) == (Status.RUNNING, 1, "w")
    assert bench.client.hget(bench.keys.job("a"), "owner") == worker.identity.nonce.encode()
    assert record.started_ms >= record.submitted_ms
    assert (bench.pending(), bench.running()) == (set(), {"a"})
    before = bench.dump()
    assert worker.own.claim("a") == ("yours", 1)
    assert bench.dump() == before


def test_a_job_that_another_worker_owns_is_held(bench: Bench) -> None:
    bench.submit("a")
    bench.worker("w1").own.claim("a")
    other = bench.worker("w2")
    before = bench.dump()
    assert other.own.claim("a") == ("held", 1)
    assert bench.dump() == before


def test_another_incarnation_under_the_same_name_does_not_own_the_job(bench: Bench) -> None:
    bench.submit("a")
    bench.worker("w").own.claim("a")
    again = Ownership(
        bench.client, bench.keys, Identity("w", "new"), "m", result_ttl_seconds=1, inbox_frames=4
    )
    assert again.claim("a") == ("held", 1)
    assert again.commit([Commit(Tail("a", 1, 0, [1]))]) == ["fenced"]


def test_an_ended_job_is_not_claimed(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.finish("a", 1, 0, [])
    bench.records.cancel("b")
    assert worker.own.claim("a") == ("ended", 1)
    assert worker.own.claim("b") == ("ended", 0)


def test_the_bell_of_a_job_that_is_gone_leaves_nothing_behind(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    bench.dispatcher.top_up("m")
    bench.client.delete(bench.keys.job("a"))
    assert worker.own.claim("a") == ("missing", 0)
    assert worker.own.claim("a") == ("missing", 0)
    assert bench.dispatched() == set()
    assert not bench.client.exists(bench.keys.job("a"))


def test_a_worker_without_a_live_lease_claims_nothing(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.expire()
    assert worker.own.claim("a") == ("unregistered", 0)
    assert worker.leases.leave()
    assert worker.own.claim("a") == ("unregistered", 0)
    assert bench.pending() == {"a"}


def test_a_dispatched_job_leaves_the_dispatched_ones_when_it_is_claimed(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    bench.dispatcher.top_up("m")
    worker.own.claim("a")
    assert (bench.dispatched(), bench.running()) == (set(), {"a"})


def test_prompt_ids_are_recorded_by_the_owner_only(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    assert worker.own.admit("a", 1, [5, 6], "f") == "ok"
    assert worker.own.admit("a", 1, [5, 6], "f") == "ok"
    assert worker.own.admit("a", 2, [7], "f") == "fenced"
    assert bench.worker("w2").own.admit("a", 1, [7], "f") == "fenced"
    assert worker.own.admit("nobody", 1, [7], "f") == "fenced"
    assert bench.records.get("a").prompt_ids == [5, 6]
    assert not bench.client.exists(bench.keys.job("nobody"))


def test_a_commit_appends_at_the_length_it_expects_and_once(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    assert worker.commit("a", 1, 0, [1, 2], "xy", drafted=4, accepted=1, near_ties=2) == "ok"
    before = bench.dump()
    assert worker.commit("a", 1, 0, [1, 2], "xy", drafted=4, accepted=1) == "already"
    assert worker.commit("a", 1, 0, [1, 3], "xz") == "fenced", "other tokens at the same place"
    assert worker.commit("a", 1, 0, [1], "x") == "fenced"
    assert worker.commit("a", 1, 1, [2], "y") == "fenced"
    assert worker.commit("a", 1, 3, [4]) == "fenced"
    assert worker.commit("a", 2, 2, [4]) == "fenced"
    assert worker.commit("nobody", 1, 0, [4]) == "fenced"
    assert bench.dump() == before
    assert worker.commit("a", 1, 2, [3], "z") == "ok"
    record = bench.records.get("a")
    assert (record.committed, record.visible, record.rounds) == (3, 3, 2)
    assert (record.drafted, record.accepted, record.near_ties) == (4, 1, 2)
    assert bench.tokens("a") == [1, 2, 3]


def test_text_without_tokens_is_committed_once(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    assert worker.commit("a", 1, 0, [], "early") == "ok"
    assert worker.commit("a", 1, 0, [], "early") == "already"
    worker.commit("a", 1, 0, [1])
    assert worker.commit("a", 1, 1, [], "late") == "ok"
    assert worker.commit("a", 1, 1, [], "late") == "already"
    assert worker.commit("a", 1, 0, [], "late") == "fenced"
    assert worker.commit("a", 1, 1, [], "!") == "ok", "another text at the same place"
    assert bench.text("a") == "earlylate!"
    assert bench.records.get("a").visible == 10
    assert bench.records.get("a").rounds == 1


def test_a_commit_of_nothing_writes_nothing(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1])
    before = bench.dump()
    assert worker.commit("a", 1, 1, []) == "ok"
    assert worker.commit("a", 1, 0, []) == "fenced"
    assert bench.dump() == before


def test_visible_offsets_count_characters_and_not_bytes_or_surrogates(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    parts = ["né🦈", "", "𝒳\u0301", "ok"]
    for position, text in enumerate(parts):
        assert worker.commit("a", 1, position, [position], text) == "ok"
    assert [entry.offset for entry in bench.stream("a")] == [0, 3, 3, 5]
    assert bench.text("a") == "".join(parts)
    assert bench.records.get("a").visible == len("".join(parts)) == 7


def test_log_probabilities_stand_in_the_entry_of_their_tokens(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    first, prompt = pack_logprobs(known(1, 2)), pack_logprobs(known(7, 8, 9))
    assert worker.commit("a", 1, 0, [1, 2], "x", logprobs=first, prompt_logprobs=prompt) == "ok"
    assert worker.commit("a", 1, 2, [3], "y", logprobs=pack_logprobs(known(3))) == "ok"
    assert worker.commit("a", 1, 3, [4], "z") == "ok"
    entries = bench.stream("a")
    assert [entry.logprobs for entry in entries] == [known(1, 2), known(3), []]
    assert [entry.prompt_logprobs for entry in entries] == [[None, *known(7, 8, 9)], [], []]
    assert [set(fields) for fields in raw_fields(bench, "a")] == [
        {b"p", b"t", b"o", b"x", b"l", b"m"},
        {b"p", b"t", b"o", b"x", b"l"},
        {b"p", b"t", b"o", b"x"},
    ]
    assert (bench.tokens("a"), bench.text("a")) == ([1, 2, 3, 4], "xyz")


def test_a_commit_with_log_probabilities_is_appended_once(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    details = {"logprobs": pack_logprobs(known(1)), "prompt_logprobs": pack_logprobs(known(7))}
    assert worker.commit("a", 1, 0, [1], "x", **details) == "ok"
    before = bench.dump()
    assert worker.commit("a", 1, 0, [1], "x", **details) == "already"
    # computed again, the last digits may differ; the tokens decide
    details = {
        "logprobs": pack_logprobs(known(1, logprob=-0.5000001)),
        "prompt_logprobs": pack_logprobs(known(7, logprob=-0.4999999)),
    }
    assert worker.commit("a", 1, 0, [1], "x", **details) == "already"
    assert worker.commit("a", 1, 0, [2], "x", **details) == "fenced"
    assert bench.dump() == before


def test_the_prompts_log_probabilities_may_come_before_any_token(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    some = pack_logprobs(known(7, 8))
    assert worker.commit("a", 1, 0, [], prompt_logprobs=some) == "ok"
    before = bench.dump()
    assert worker.commit("a", 1, 0, [], prompt_logprobs=some) == "already"
    assert worker.commit("a", 1, 1, [], prompt_logprobs=some) == "fenced"
    assert bench.dump() == before
    assert worker.commit("a", 1, 0, [1], "x") == "ok"
    assert [entry.prompt_logprobs for entry in bench.stream("a")] == [[None, *known(7, 8)], []]
    assert bench.records.get("a").rounds == 1


def test_what_adds_no_token_is_known_by_all_that_it_adds(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    some, other = pack_logprobs(known(7)), pack_logprobs(known(8))
    assert worker.commit("a", 1, 0, [], prompt_logprobs=some) == "ok"
    assert worker.commit("a", 1, 0, [], prompt_logprobs=other) == "ok"
    assert worker.commit("a", 1, 0, [], "x", prompt_logprobs=other) == "ok"
    assert worker.commit("a", 1, 0, [], "x", prompt_logprobs=other) == "already"
    assert worker.commit("a", 1, 0, [], "x") == "ok"
    assert len(bench.stream("a")) == 4


def test_frames_find_their_inboxes_past_log_probabilities(bench: Bench) -> None:
    """Every job has the same number of arguments, whatever it commits."""
    bench.submit("a", "b", "c")
    worker = bench.worker("w")
    for job in "abc":
        worker.own.claim(job)
    commits = [
        Commit(
            Tail("a", 1, 0, [1], "x", logprobs=pack_logprobs(known(1))),
            verdict(1),
            "pf:inbox:d1",
        ),
        Commit(Tail("b", 1, 0, [2], "y", prompt_logprobs=pack_logprobs(known(7)))),
        Commit(
            Tail("c", 1, 0, [3], "z", 4, 1, 0, pack_logprobs(known(3)), pack_logprobs(known(8))),
            verdict(3),
            "pf:inbox:d2",
        ),
    ]
    assert worker.own.commit(commits) == ["ok", "ok", "ok"]
    (a,), (b,), (c,) = (bench.stream(job) for job in "abc")
    assert (a.tokens, a.text, a.logprobs, a.prompt_logprobs) == ([1], "x", known(1), [])
    assert (b.tokens, b.text, b.logprobs, b.prompt_logprobs) == ([2], "y", [], [None, *known(7)])
    assert (c.tokens, c.text, c.logprobs) == ([3], "z", known(3))
    assert c.prompt_logprobs == [None, *known(8)]
    assert bench.records.get("c").drafted == 4
    for inbox, session in (("d1", 1), ("d2", 3)):
        (entry,) = bench.client.lrange(f"pf:inbox:{inbox}", 0, -1)
        assert decode_all(entry) == [verdict(session)]


def test_finish_carries_log_probabilities(bench: Bench) -> None:
    bench.submit("a", group="g")
    worker = bench.worker("w")
    worker.own.claim("a")
    details = {"logprobs": pack_logprobs(known(1)), "prompt_logprobs": pack_logprobs(known(7))}
    assert worker.finish("a", 1, 0, [1], "x", group="g", **details) == "finished"
    before = bench.dump()
    assert worker.finish("a", 1, 0, [1], "x", group="g", **details) == "already"
    assert bench.dump() == before
    last, end = bench.stream("a")
    assert (last.tokens, last.text) == ([1], "x")
    assert (last.logprobs, last.prompt_logprobs) == (known(1), [None, *known(7)])
    assert (end.end, end.logprobs) == (Status.SUCCEEDED, [])
    record = bench.records.get("a")
    assert (record.finish_reason, record.error) == ("stop", "")
    assert 0 < bench.client.pttl(bench.keys.tokens("a")) <= TTL_SECONDS * 1000


def test_a_cancelled_job_commits_and_says_so(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    assert bench.records.cancel("a") == "flagged"
    assert worker.commit("a", 1, 0, [1], frame=verdict(1), inbox="pf:inbox:d") == "cancel"
    assert worker.commit("a", 1, 0, [1], frame=verdict(1), inbox="pf:inbox:d") == "cancel"
    assert bench.tokens("a") == [1]
    assert bench.client.llen("pf:inbox:d") == 1


def test_a_batch_pushes_the_frames_of_those_that_succeeded_in_one_entry_an_inbox(
    bench: Bench,
) -> None:
    jobs = [f"j{number}" for number in range(500)]
    bench.submit(*jobs)
    worker = bench.worker("w", slots=500)
    for job in jobs:
        worker.own.claim(job)
    for job in jobs[::3]:
        bench.client.hset(bench.keys.job(job), "epoch", 2)
    commits = [
        Commit(Tail(job, 1, 0, [number]), verdict(number), f"pf:inbox:d{number % 2}")
        for number, job in enumerate(jobs)
    ]
    outcomes = worker.own.commit(commits)
    assert outcomes == ["ok" if number % 3 else "fenced" for number in range(500)]
    for inbox in (0, 1):
        (entry,) = bench.client.lrange(f"pf:inbox:d{inbox}", 0, -1)
        expected = [verdict(n) for n in range(500) if n % 3 and n % 2 == inbox]
        assert decode_all(entry) == expected
    before = bench.dump()
    assert set(worker.own.commit(commits)) == {"already", "fenced"}
    assert bench.dump() == before
    assert all(bench.tokens(job) == [n] * bool(n % 3) for n, job in enumerate(jobs))


def test_commits_without_frames_touch_no_inbox(bench: Bench) -> None:
    bench.submit("a", "b")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.own.claim("b")
    mixed = [
        Commit(Tail("a", 1, 0, [1]), None, ""),
        Commit(Tail("b", 1, 0, [2]), verdict(2), "pf:inbox:d"),
    ]
    assert worker.own.commit(mixed) == ["ok", "ok"]
    assert worker.own.commit([]) == []
    assert decode_all(bench.client.lindex("pf:inbox:d", 0)) == [verdict(2)]
    assert bench.client.keys("pf:inbox*") == [b"pf:inbox:d"]


def test_an_inbox_is_bounded_keeps_the_newest_and_expires(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    for position in range(10):
        worker.commit("a", 1, position, [1], frame=verdict(position), inbox="pf:inbox:d")
    entries = bench.client.lrange("pf:inbox:d", 0, -1)
    assert [decode_all(entry)[0].session for entry in entries] == [6, 7, 8, 9]  # type: ignore[union-attr]
    assert 0 < bench.client.pttl("pf:inbox:d") <= INBOX_TTL_MS


def test_finish_commits_the_last_tokens_and_ends_the_job_once(bench: Bench) -> None:
    bench.submit("a", group="g")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1], "x")
    assert worker.finish("a", 1, 1, [2, 3], "yz", group="g") == "finished"
    before = bench.dump()
    assert worker.finish("a", 1, 1, [2, 3], "yz", group="g") == "already"
    assert worker.finish("a", 1, 3, [4], group="g", status=Status.FAILED) == "already"
    assert worker.commit("a", 1, 3, [4]) == "fenced"
    assert bench.dump() == before
    record = bench.records.get("a")
    assert (record.status, record.finish_reason) == (Status.SUCCEEDED, "stop")
    assert (record.committed, record.visible, record.rounds) == (3, 3, 2)
    assert record.finished_ms >= record.started_ms
    assert bench.tokens("a") == [1, 2, 3]
    assert [entry.end for entry in bench.stream("a")] == [None, None, Status.SUCCEEDED]
    assert bench.running() == bench.ids(bench.keys.worker_jobs("w")) == set()
    done = bench.client.xrange(bench.keys.done("g"))
    assert [fields for _, fields in done] == [{b"job": b"a", b"status": b"succeeded"}]


def test_finish_after_the_same_tokens_were_committed_adds_nothing(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1, 2], "xy")
    assert worker.finish("a", 1, 0, [1, 2], "xy") == "finished"
    assert (bench.tokens("a"), bench.text("a")) == ([1, 2], "xy")


def test_finish_at_another_length_epoch_or_owner_is_fenced(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1])
    before = bench.dump()
    assert worker.finish("a", 1, 0, [2]) == "fenced"
    assert worker.finish("a", 1, 0, []) == "fenced"
    assert worker.finish("a", 2, 1, [2]) == "fenced"
    assert worker.finish("nobody", 1, 0, []) == "fenced"
    assert bench.dump() == before
    assert bench.worker("w2").finish("a", 1, 1, [2]) == "fenced"
    assert bench.records.get("a").status == Status.RUNNING


def test_a_job_without_a_group_reports_its_end_to_nobody(bench: Bench) -> None:
    bench.submit("a")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.finish("a", 1, 0, [])
    assert bench.client.keys("pf:done*") == []


def test_a_released_job_keeps_its_tokens_and_its_place(bench: Bench) -> None:
    bench.submit(*"abc")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1, 2], "xy")
    assert worker.own.release("a", 1)
    before = bench.dump()
    assert not worker.own.release("a", 1)
    assert bench.dump() == before
    record = bench.records.get("a")
    assert (record.status, record.worker, record.attempts) == (Status.QUEUED, "", 0)
    assert bench.client.zrange(bench.keys.pending("m"), 0, -1) == [b"a", b"b", b"c"]
    assert worker.commit("a", 1, 2, [3]) == "fenced"
    assert worker.own.claim("a") == ("claimed", 2)
    assert worker.commit("a", 2, 2, [3], "z") == "ok"
    assert (bench.tokens("a"), bench.text("a")) == ([1, 2, 3], "xyz")


def test_a_job_to_be_cancelled_ends_when_its_owner_gives_it_back(bench: Bench) -> None:
    bench.submit("a", group="g")
    worker = bench.worker("w")
    worker.own.claim("a")
    worker.commit("a", 1, 0, [1])
    bench.records.cancel("a")
    assert worker.own.release("a", 1)
    assert bench.records.get("a").status == Status.CANCELLED
    assert (bench.pending(), bench.running()) == (set(), set())
    assert bench.client.xlen(bench.keys.done("g")) == 1
    assert worker.finish("a", 1, 1, []) == "fenced"


def test_a_verdict_that_cannot_be_delivered_does_not_undo_the_commit(bench: Bench) -> None:
    worker = bench.worker("w")
    bench.submit("a")
    worker.own.claim("a")
    bench.client.set("pf:inbox:odd", "no list")
    frame = Verdict(1, 0, 1, 6, 4)
    commit = Commit(Tail("a", 1, 0, [5, 6]), frame, "pf:inbox:odd")
    assert worker.own.commit([commit]) == ["ok"]
    assert bench.client.hget(bench.keys.job("a"), "committed") == b"2"
    assert bench.client.get("pf:inbox:odd") == b"no list"


def test_another_model_may_only_start_a_job_from_its_beginning(bench: Bench) -> None:
    worker = bench.worker("w")
    bench.submit("a")
    worker.own.claim("a")
    assert worker.own.admit("a", 1, [5], "first") == "ok"
    assert worker.own.admit("a", 1, [6], "second") == "ok"
    worker.own.commit([Commit(Tail("a", 1, 0, [9]))])
    assert worker.own.admit("a", 1, [5], "first") == "other_model"
    assert worker.own.admit("a", 1, [6], "second") == "ok"
