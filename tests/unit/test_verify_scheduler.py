"""Who takes part in a pass: order, shared prefill, preemption, and books that balance."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.verify.scheduler import Scheduler, Work
from pilotfish_workers.verify.sequence import Sequence
from tests.worker_kit import active


def names(work: list[Work]) -> list[str]:
    return [item.sequence.job for item in work]


def settle(scheduler: Scheduler, work: list[Work], accepted: int = 0) -> None:
    """What the engine does with a pass in which `accepted` drafts of each sequence stand."""
    for item in work:
        sequence = item.sequence
        sequence.num_computed += item.num_tokens
        scheduler.computed(sequence)
        if item.is_decoding:
            kept = [*item.drafted[:accepted], 7]
            sequence.tokens.extend(kept[: sequence.remaining])
            sequence.num_computed = len(sequence.tokens) - 1
            sequence.drafted = []
            scheduler.trim(sequence)


def check(scheduler: Scheduler, pool: BlockPool) -> None:
    """Blocks belong to running sequences only, each table covers what is computed."""
    pool.check_integrity(sequence.blocks for sequence in scheduler.running)
    for sequence in scheduler.waiting:
        assert sequence.blocks == []
        assert sequence.num_computed == 0
    assert not set(map(id, scheduler.running)) & set(map(id, scheduler.waiting))


def started(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Bring sequences to where they decode."""
    for sequence in sequences:
        scheduler.add(sequence)
    while any(sequence.committed == 0 for sequence in sequences):
        settle(scheduler, scheduler.schedule(0.0))


def test_the_order_is_priority_then_age() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 64)
    for job, priority in [("a", 0), ("b", 5), ("c", 0), ("d", -3), ("e", 5)]:
        scheduler.add(active(job=job, priority=priority))
    assert names(scheduler.schedule(0.0)) == ["b", "e", "a", "c", "d"]


def test_prompts_share_the_budget_and_decoding_goes_on_between_their_chunks() -> None:
    scheduler = Scheduler(BlockPool(64, 4), prefill_tokens=10)
    decoding = active(job="decoding", limit=50)
    started(scheduler, decoding)
    long, short = active(range(1, 26), job="long"), active([1] * 4, job="short")
    scheduler.add(long)
    scheduler.add(short)
    passes: list[list[tuple[str, int, bool]]] = []
    while not (long.committed and short.committed):
        work = scheduler.schedule(0.0)
        passes.append([(w.sequence.job, w.num_tokens, w.is_decoding) for w in work])
        settle(scheduler, work)
    assert passes == [
        [("decoding", 1, True), ("long", 10, False)],
        [("decoding", 1, True), ("long", 10, False)],
        [("decoding", 1, True), ("long", 5, True), ("short", 4, True)],
    ]


def test_drafts_wait_until_the_whole_prefix_is_computed() -> None:
    scheduler = Scheduler(BlockPool(64, 4), prefill_tokens=4)
    sequence = active([1] * 6)
    sequence.drafted = [5, 6]
    scheduler.add(sequence)
    first = scheduler.schedule(0.0)
    assert [(w.drafted, w.is_decoding) for w in first] == [([], False)]
    settle(scheduler, first)
    assert [(w.drafted, w.is_decoding) for w in scheduler.schedule(0.0)] == [([5, 6], True)]


def test_a_sequence_that_awaits_its_proposal_is_left_out_until_it_comes_or_is_late() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 64)
    waiting, other = active(job="waiting"), active(job="other")
    started(scheduler, waiting, other)
    waiting.await_until = 5.0
    assert names(scheduler.schedule(4.9)) == ["other"]
    assert names(scheduler.schedule(5.0)) == ["waiting", "other"]
    waiting.drafted = [3]
    assert names(scheduler.schedule(1.0)) == ["waiting", "other"]


def test_no_more_drafts_than_can_matter_are_run() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 64)
    sequence = active(limit=4)
    started(scheduler, sequence)
    sequence.drafted = [1, 2, 3, 4, 5]
    assert scheduler.schedule(0.0)[0].drafted == [1, 2]


@pytest.mark.parametrize("num_free", range(4))
def test_whether_a_draft_is_judged_in_a_full_pool_does_not_depend_on_those_behind_it(
    num_free: int,
) -> None:
    """A proposal ends early at a token that the target lacks, or where a grammar leads nowhere; if
    a short one were judged where a long one is dropped, that would change the output's law."""
    judged = {}
    for size in range(1, 13):
        pool = BlockPool(8, 4)
        scheduler = Scheduler(pool, 64)
        sequence = active(limit=24)
        started(scheduler, sequence)
        pool.allocate(pool.num_free - num_free)
        sequence.drafted = list(range(size))
        (work,) = scheduler.schedule(0.0)
        judged[size] = work.drafted
    room = 4 * (1 + num_free) - 4  # four tokens are there, of which one is to be computed
    for size, drafted in judged.items():
        assert drafted == list(range(min(size, room)))


def test_blocks_that_only_rejected_drafts_needed_come_back() -> None:
    pool = BlockPool(16, 4)
    scheduler = Scheduler(pool, 64)
    sequence = active(limit=40)
    started(scheduler, sequence)
    sequence.drafted = list(range(12))
    work = scheduler.schedule(0.0)
    assert pool.num_free == 16 - 4
    settle(scheduler, work, accepted=1)
    assert pool.num_free == 16 - pool.num_blocks_for(len(sequence.tokens))
    check(scheduler, pool)


def test_the_last_in_order_is_preempted_and_comes_back() -> None:
    pool = BlockPool(6, 4)
    scheduler = Scheduler(pool, 64)
    first, urgent = (
        active([1] * 8, job="first", limit=12),
        active([1] * 8, job="urgent", limit=12, priority=9),
    )
    started(scheduler, first, urgent)
    while not scheduler.waiting:
        settle(scheduler, scheduler.schedule(0.0))
        check(scheduler, pool)
    assert scheduler.waiting == [first], "the less urgent one gives way although it is older"
    while urgent.remaining:
        settle(scheduler, scheduler.schedule(0.0))
    scheduler.remove(urgent)
    while first.remaining:
        work = scheduler.schedule(0.0)
        assert names(work) == ["first"]
        settle(scheduler, work)
    scheduler.remove(first)
    assert pool.num_free == 6


def test_a_preempted_sequence_waits_until_all_its_tokens_fit() -> None:
    pool = BlockPool(8, 4)
    scheduler = Scheduler(pool, prefill_tokens=4)
    first, second = active([1] * 15, job="1", limit=17), active([1] * 15, job="2", limit=17)
    scheduler.add(first)
    scheduler.add(second)
    computed = 0
    while first.remaining:
        work = scheduler.schedule(0.0)
        computed += sum(item.num_tokens for item in work if item.sequence is second)
        settle(scheduler, work)
    assert computed <= 15 + 17, "computed again and again, only to be preempted again"


def test_a_long_prompt_alone_is_let_in_however_full_it_makes_the_pool() -> None:
    scheduler = Scheduler(BlockPool(4, 4), prefill_tokens=3)
    sequence = active([1] * 15, limit=1)
    assert scheduler.can_ever_fit(16)
    assert not scheduler.can_ever_fit(17)
    started(scheduler, sequence)
    assert sequence.committed == 1


def test_removing_someone_twice_is_harmless() -> None:
    pool = BlockPool(8, 4)
    scheduler = Scheduler(pool, 64)
    sequence = active()
    started(scheduler, sequence)
    scheduler.remove(sequence)
    scheduler.remove(sequence)
    assert pool.num_free == 8
    assert scheduler.schedule(0.0) == []


def test_the_scheduler_fits_one_screen() -> None:
    import inspect

    from pilotfish_workers.verify import scheduler

    assert len(inspect.getsource(scheduler).splitlines()) <= 130


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs come, draft, wait, are cut and go in any order over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, 4)
        self.scheduler = Scheduler(self.pool, 6)
        self.active: list[Sequence] = []
        self.now = 0.0

    @rule(
        size=st.integers(1, 20),
        limit=st.integers(1, 20),
        priority=st.integers(-1, 1),
        committed=st.integers(0, 3),
    )
    def add(self, size: int, limit: int, priority: int, committed: int) -> None:
        output = [7] * min(committed, limit - 1)
        sequence = active([1] * size, limit=limit, priority=priority, output=output)
        assert self.scheduler.can_ever_fit(size + limit)
        self.scheduler.add(sequence)
        self.active.append(sequence)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), drafted=st.lists(st.integers(0, 9), max_size=16))
    def propose(self, data: st.DataObject, drafted: list[int]) -> None:
        data.draw(st.sampled_from(self.active)).drafted = drafted

    @precondition(lambda self: self.active)
    @rule(data=st.data(), seconds=st.floats(0, 2))
    def ask(self, data: st.DataObject, seconds: float) -> None:
        data.draw(st.sampled_from(self.active)).await_until = self.now + seconds

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.active))
        self.active.remove(sequence)
        self.scheduler.remove(sequence)
        assert sequence.blocks == []

    @rule(accepted=st.integers(0, 16))
    def run_a_pass(self, accepted: int) -> None:
        self.now += 0.5
        work = self.scheduler.schedule(self.now)
        ready = [s for s in self.scheduler.running if s.is_ready(self.now)]
        assert bool(work) == bool(ready), "somebody is ready, and nobody runs"
        jobs = [id(item.sequence) for item in work]
        assert len(set(jobs)) == len(jobs), "twice in one pass"
        assert sum(w.num_tokens for w in work if w.num_tokens > 1) <= 6
        for item in work:
            end = item.sequence.num_computed + item.num_tokens + len(item.drafted)
            assert len(item.sequence.blocks) * 4 >= end
        settle(self.scheduler, work, accepted)
        for item in work:
            if item.sequence.remaining == 0:
                self.scheduler.remove(item.sequence)
                self.active.remove(item.sequence)

    @invariant()
    def books_balance(self) -> None:
        check(self.scheduler, self.pool)
        assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.active)

    def teardown(self) -> None:
        """Whatever happened, all that is left finishes."""
        for _ in range(2000):
            if not self.active:
                return
            self.run_a_pass(0)
            self.books_balance()
        raise AssertionError(f"{len(self.active)} sequences never finish")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
