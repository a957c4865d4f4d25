"""Sequences that begin alike share blocks: each computes what is new, and reads only its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.model.errors import BlockPoolError
from pilotfish_workers.verify.block_tables import BlockTables
from pilotfish_workers.verify.prefixes import PrefixIndex
from pilotfish_workers.verify.scheduler import Scheduler, Work
from pilotfish_workers.verify.sequence import Sequence
from tests.worker_kit import active, active_of, job_spec

SIZE = 4  # tokens a block


class Bench:
    """A scheduler over a KV store that remembers which prefix each slot's KV was computed from.

    The target is a function of the whole prefix, so equal prefixes have equal continuations.
    """

    tables = BlockTables

    def __init__(self, num_blocks: int = 64, prefill_tokens: int = 16) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.scheduler = Scheduler(self.pool, prefill_tokens)
        self.scheduler.tables = self.tables(self.pool)
        self.kv: dict[int, tuple[int, ...]] = {}  # slot → the prefix up to and with its token
        self.scored: dict[Sequence, int] = {}  # prompt tokens with log-probabilities so far
        self.num_computed = 0
        self.now = 0.0

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def run(self) -> list[Work]:
        """One pass, as the engine makes it; checks that every row reads and writes its own."""
        work = self.scheduler.schedule(self.now)
        for item in work:
            self.check_table(item.sequence)
            self.check_scores(item)
        holders = [set(sequence.blocks) for sequence in self.scheduler.running]
        for item in work:
            start = item.sequence.num_computed
            fed = item.sequence.tokens[start : start + item.num_tokens] + item.drafted
            prefix = tuple(item.sequence.tokens[:start])
            for position, token in enumerate(fed, start):
                block = item.sequence.blocks[position // SIZE]
                assert sum(block in held for held in holders) == 1, "a shared block is written"
                prefix = (*prefix, token)
                self.kv[self.slot(item.sequence, position)] = prefix
            self.num_computed += item.num_tokens
        for item in work:
            self.settle(item)
        return work

    def settle(self, item: Work) -> None:
        sequence = item.sequence
        sequence.num_computed += item.num_tokens
        self.scheduler.computed(sequence)
        if not item.is_decoding:
            return
        kept: list[int] = []
        while len(kept) <= len(item.drafted):
            kept.append(following([*sequence.tokens, *kept]))
            if item.drafted[len(kept) - 1 : len(kept)] != kept[-1:]:
                break
        sequence.tokens.extend(kept[: sequence.remaining])
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.drafted = []
        self.scheduler.trim(sequence)

    def check_table(self, sequence: Sequence) -> None:
        """The table holds the KV of exactly the sequence's own tokens."""
        for position in range(sequence.num_computed):
            held = self.kv[self.slot(sequence, position)]
            assert held == tuple(sequence.tokens[: position + 1]), "foreign KV"

    def check_scores(self, item: Work) -> None:
        """Nobody who wants its prompt's log-probabilities skips a part of it."""
        if item.sequence.wants_prompt_logprobs:
            start, scored = item.sequence.num_computed, self.scored.get(item.sequence, 0)
            assert start <= scored, "a part of the prompt has no log-probabilities"
            self.scored[item.sequence] = max(scored, start + item.num_tokens)

    def check(self) -> None:
        self.pool.check_integrity(sequence.blocks for sequence in self.scheduler.running)
        for sequence in self.scheduler.running:
            self.check_table(sequence)
        for sequence in self.scheduler.waiting:
            assert (sequence.blocks, sequence.num_computed) == ([], 0)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(100):
            if is_done():
                return
            self.run()
            self.check()
        raise AssertionError("it never happens")

    def finish(self, *sequences: Sequence) -> None:
        left = set(sequences)
        for _ in range(1000):
            for sequence in [item for item in left if item.remaining == 0]:
                self.scheduler.remove(sequence)
                left.remove(sequence)
            self.check()
            if not left:
                return
            self.run()
        raise AssertionError(f"{[item.job for item in left]} never finish")

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // SIZE] * SIZE + position % SIZE


def following(prefix: Tokens[int]) -> int:
    """What the target says next."""
    return (sum(prefix[-3:]) + len(prefix)) % 3


def names(work: list[Work]) -> list[str]:
    return [item.sequence.job for item in work]


def samples(count: int, prompt: Tokens[int], **options: Any) -> list[Sequence]:
    return [active(prompt, job=f"s{number}", **options) for number in range(count)]


PROMPT = list(range(10, 50))


# --- what is shared, and when --------------------------------------------------------------------


@pytest.mark.parametrize("length", [37, 40, 41])
def test_samples_of_one_prompt_compute_it_once(length: int) -> None:
    bench = Bench(prefill_tokens=16)
    several = samples(4, PROMPT[:length] + [9] * max(0, length - 40), limit=1)
    bench.add(*several)
    shared = (length - 1) // SIZE * SIZE  # the last token's logits are wanted from each
    bench.finish(*several)
    assert bench.num_computed == length + 3 * (length - shared)
    assert bench.scheduler.tables.num_shared_tokens == 3 * shared
    assert bench.pool.num_free == bench.pool.num_blocks


def test_a_first_sample_that_ends_with_its_prompt_leaves_it_to_those_that_waited() -> None:
    """Jobs of one token and one system prompt must not each compute it, one after another."""
    bench = Bench(prefill_tokens=64)
    several = samples(6, PROMPT, limit=1)
    bench.add(*several)
    assert names(bench.run()) == ["s0"]
    bench.scheduler.remove(several[0])
    assert names(bench.run()) == ["s1", "s2", "s3", "s4", "s5"]
    assert bench.num_computed == 40 + 5 * 4
    bench.finish(*several[1:])


def test_samples_that_end_alike_decode_like_unshared_ones() -> None:
    bench = Bench()
    several = samples(3, PROMPT, limit=20)
    bench.add(*several)
    bench.finish(*several)
    alone = Bench()
    [single] = samples(1, PROMPT, limit=20)
    alone.add(single)
    alone.finish(single)
    assert [sequence.tokens for sequence in several] == [single.tokens] * 3


def test_a_later_job_takes_what_a_running_one_has_computed_output_too() -> None:
    bench = Bench()
    first = active(PROMPT[:6], job="first", limit=30)
    bench.add(first)
    bench.run_until(lambda: first.committed >= 10)
    second = active(first.tokens[:14], job="second", limit=3)
    bench.add(second)
    [_, work] = bench.scheduler.schedule(0.0)
    assert (work.sequence, work.num_tokens) == (second, 2)
    assert second.blocks[:3] == first.blocks[:3]


def test_drafted_tokens_are_never_shared() -> None:
    """Case 26: verified and unverified tokens in one block."""
    bench = Bench()
    first = active([1] * 3, job="first", limit=30)
    bench.add(first)
    bench.run()  # four tokens are known, three computed
    wrong = [9, 9, 9, 9, 9]
    first.drafted = wrong
    held = first.tokens + wrong
    bench.run()
    assert bench.kv[bench.slot(first, 4)] == tuple(held[:5]), "the wrong draft's KV is there"
    thief = active(held, job="thief", limit=3)
    bench.add(thief)
    bench.scheduler.schedule(0.0)
    assert thief.num_computed == 4, "one full block of committed tokens, and no more"
    bench.finish(first, thief)


def test_accepted_tokens_are_shared_once_they_are_committed() -> None:
    bench = Bench()
    first = active([1] * 3, job="first", limit=30)
    bench.add(first)
    bench.run()
    tokens = list(first.tokens)
    while len(tokens) < 9:
        tokens.append(following(tokens))
    first.drafted = tokens[4:]
    bench.run()
    assert first.tokens[:9] == tokens, "all accepted"
    before, after = active(tokens, job="before"), active(tokens, job="after")
    bench.add(before)
    bench.scheduler.schedule(0.0)
    assert before.num_computed == 4, "the round is still on its way to Redis"
    bench.run()
    bench.add(after)
    bench.scheduler.schedule(0.0)
    assert after.num_computed == 8
    bench.finish(first, before, after)


def test_the_same_tokens_behind_other_ones_are_not_the_same() -> None:
    bench = Bench()
    first = active([1, 2, 3, 4, 5, 6, 7, 8, 9], job="first")
    other = active([4, 3, 2, 1, 5, 6, 7, 8, 9], job="other")
    bench.add(first)
    bench.run()
    bench.add(other)
    bench.scheduler.schedule(0.0)
    assert (other.num_computed, set(first.blocks) & set(other.blocks)) == (0, set())


def test_prompt_log_probabilities_need_the_whole_prompt() -> None:
    bench = Bench(prefill_tokens=100)
    plain, scored = active(PROMPT, job="plain"), scoring("scored")
    bench.add(plain)
    bench.run()
    bench.add(scored)
    assert [(item.sequence.job, item.num_tokens) for item in bench.run()][1] == ("scored", 40)
    resumed = scoring("resumed", output=[following(PROMPT)])
    bench.add(resumed)
    bench.scheduler.schedule(0.0)
    assert resumed.num_computed == 40, "they are committed with the first token"
    bench.finish(plain, scored, resumed)


def test_nobody_waits_for_a_prompt_of_which_it_would_take_nothing() -> None:
    bench = Bench(prefill_tokens=100)
    plain, scored = active(PROMPT, job="plain"), scoring("scored")
    bench.add(plain, scored)
    assert names(bench.run()) == ["plain", "scored"]
    bench.finish(plain, scored)


def scoring(job: str, *, prompt: Tokens[int] = PROMPT, output: Tokens[int] = ()) -> Sequence:
    spec = job_spec(prompt, prompt_logprobs=1, max_tokens=8)
    return active_of(spec, [*prompt, *output], len(prompt), job)


# --- who waits for whom --------------------------------------------------------------------------


def test_a_sample_waits_for_the_first_and_then_begins_behind_it() -> None:
    bench = Bench(prefill_tokens=16)
    bench.add(*samples(2, PROMPT))
    passes = [[(item.sequence.job, item.num_tokens) for item in bench.run()] for _ in range(4)]
    assert passes == [[("s0", 16)], [("s0", 16)], [("s0", 8)], [("s0", 1), ("s1", 4)]]


def test_one_that_has_only_its_beginning_in_common_waits_no_longer_than_for_that() -> None:
    bench = Bench(prefill_tokens=16)
    long, short = active(PROMPT, job="long"), active([*PROMPT[:14], 1, 1], job="short")
    bench.add(long, short)
    assert names(bench.run()) == ["long"]
    assert names(bench.run()) == ["long"], "the budget is its"
    assert short in bench.scheduler.running
    assert short.num_computed == 12
    bench.finish(long, short)


def test_what_waits_is_not_looked_at_again_before_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look costs as much as the prompt is long, and is due for each sample in each pass."""

    class Counting(BlockTables):
        num_looks = 0

        def find(self, sequence: Sequence) -> list[int]:
            Counting.num_looks += 1
            return super().find(sequence)

    monkeypatch.setattr(Bench, "tables", Counting)
    bench = Bench(prefill_tokens=SIZE)
    several = samples(5, PROMPT)
    bench.add(*several)
    while several[0].num_computed < len(PROMPT) - 2 * SIZE:
        assert names(bench.run()) == ["s0"]
        assert Counting.num_looks == 5
    bench.finish(*several)
    assert Counting.num_looks == 5 + 4


def test_an_urgent_one_does_not_wait_for_one_that_comes_behind_it() -> None:
    bench = Bench(prefill_tokens=16)
    late = active(PROMPT, job="late")
    bench.add(late)
    bench.run()
    urgent = active(PROMPT, job="urgent", priority=5)
    bench.add(urgent)
    assert names(bench.run())[0] == "urgent"
    assert urgent.num_computed == 32, "what was there already it took"
    bench.finish(late, urgent)


def test_whoever_waits_for_a_prefix_holds_nobody_else_up() -> None:
    bench = Bench(prefill_tokens=100)
    first, twin, other = *samples(2, PROMPT), active([1, 2, 3], job="other")
    bench.add(first, twin, other)
    assert names(bench.run()) == ["s0", "other"]
    bench.finish(first, twin, other)


def test_what_a_waiting_one_will_need_is_not_given_away() -> None:
    # the first takes 10 of 13 blocks, its twin will need 1 of its own, the other one needs 3
    bench = Bench(num_blocks=13, prefill_tokens=16)
    first, twin = samples(2, PROMPT[:39], limit=1)
    other = active([1] * 8, job="other", limit=4)
    bench.add(first, twin, other)
    for _ in range(3):
        assert names(bench.run()) == ["s0"]
    bench.scheduler.remove(first)
    assert names(bench.run()) == ["s1", "other"]
    bench.finish(twin, other)


@pytest.mark.parametrize("reason", ["removed", "asked"])
def test_nobody_waits_for_a_prompt_that_does_not_go_on(reason: str) -> None:
    bench = Bench(prefill_tokens=16)
    first, twin = samples(2, PROMPT)
    bench.add(first, twin)
    bench.run()
    if reason == "removed":
        bench.scheduler.remove(first)
    else:
        first.await_until = 100.0
    assert names(bench.run()) == ["s1"]
    assert twin.num_computed == (16 if reason == "removed" else 32)


def test_a_preempted_sample_finds_its_beginning_where_another_still_holds_it() -> None:
    bench = Bench(num_blocks=14, prefill_tokens=64)
    several = samples(2, PROMPT, limit=12)
    bench.add(*several)
    bench.run_until(lambda: bench.scheduler.num_preempted > 0)
    before = bench.num_computed
    several[0].limit = several[0].committed + 1
    bench.finish(several[0])
    bench.finish(several[1])
    assert bench.num_computed - before < len(PROMPT), "the prompt was computed again"
    assert bench.pool.num_free == 14


# --- the index -----------------------------------------------------------------------------------


@given(
    tables=st.lists(st.lists(st.integers(0, 1), max_size=10), min_size=1, max_size=8),
    gone=st.sets(st.integers(0, 7)),
    wanted=st.lists(st.integers(0, 1), max_size=10),
)
def test_the_longest_prefix_is_found_whoever_came_and_went(
    tables: list[list[int]], gone: set[int], wanted: list[int]
) -> None:
    index, owned = PrefixIndex(2), {}
    for number, tokens in enumerate(tables):
        owned[number] = [number * 10 + place for place in range(len(tokens) // 2)]
        index.add(tokens, owned[number])
    for number in gone & owned.keys():
        index.forget(owned.pop(number))
    kept = [(tables[number], blocks) for number, blocks in owned.items()]
    found = index.find(wanted)
    longest = 0
    while longest < len(wanted) // 2 and any(
        tokens[: longest * 2 + 2] == wanted[: longest * 2 + 2] for tokens, _ in kept
    ):
        longest += 1
    assert len(found) == longest
    for place, block in enumerate(found):
        assert any(
            blocks[place : place + 1] == [block]
            and tokens[: place * 2 + 2] == wanted[: place * 2 + 2]
            for tokens, blocks in kept
        )
    for block in range(100):
        assert (block in index) == any(block in blocks for _, blocks in kept)


# --- everything in any order ---------------------------------------------------------------------

BASES = [[1, 2, 0, 1, 2, 2, 1, 0] * 3, [1, 2, 0, 1, 0, 0, 1, 0] * 3]


class SharingMachine(RuleBasedStateMachine):
    """Jobs that begin alike come, draft, wait, are cut and go over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_blocks=12, prefill_tokens=6)
        self.active: list[Sequence] = []
        self.proposed: list[list[int]] = []  # prefixes with drafts, right ones or wrong

    @rule(
        base=st.sampled_from(BASES),
        size=st.integers(1, 22),
        tail=st.lists(st.integers(0, 2), max_size=3),
        limit=st.integers(1, 20),
        priority=st.integers(-1, 1),
        count=st.integers(1, 3),
        is_scored=st.booleans(),
    )
    def add(
        self,
        base: list[int],
        size: int,
        tail: list[int],
        limit: int,
        priority: int,
        count: int,
        is_scored: bool,
    ) -> None:
        self._add(base[:size] + tail, limit, priority, count, is_scored)

    @precondition(lambda self: self.proposed)
    @rule(data=st.data(), limit=st.integers(1, 8))
    def add_what_was_proposed(self, data: st.DataObject, limit: int) -> None:
        self._add(data.draw(st.sampled_from(self.proposed)), limit, 0, 1, False)

    def _add(
        self, prompt: list[int], limit: int, priority: int, count: int, is_scored: bool
    ) -> None:
        scores = {"prompt_logprobs": 1} if is_scored else {}
        spec = job_spec(prompt, priority=priority, max_tokens=limit, **scores)
        for _ in range(count):
            sequence = active_of(spec, list(prompt), len(prompt))
            assert self.bench.scheduler.can_ever_fit(len(prompt) + limit)
            self.bench.add(sequence)
            self.active.append(sequence)

    @precondition(lambda self: self.active)
    @rule(
        data=st.data(), num_right=st.integers(0, 8), wrong=st.lists(st.integers(0, 2), max_size=8)
    )
    def propose(self, data: st.DataObject, num_right: int, wrong: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.active))
        tokens = list(sequence.tokens)
        for _ in range(num_right):
            tokens.append(following(tokens))
        sequence.drafted = [*tokens[len(sequence.tokens) :], *wrong]
        self.proposed.append([*tokens, *wrong][:40])

    @precondition(lambda self: self.active)
    @rule(data=st.data(), seconds=st.floats(0, 2))
    def ask(self, data: st.DataObject, seconds: float) -> None:
        data.draw(st.sampled_from(self.active)).await_until = self.bench.now + seconds

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.active))
        self.active.remove(sequence)
        self.bench.scheduler.remove(sequence)
        assert sequence.blocks == []

    @rule()
    def run_a_pass(self) -> None:
        scheduler = self.bench.scheduler
        self.bench.now += 0.5
        work = self.bench.run()
        assert work or not any(s.is_ready(self.bench.now) for s in scheduler.running)
        for sequence in [s for s in self.active if s.remaining == 0]:
            scheduler.remove(sequence)
            self.active.remove(sequence)

    @invariant()
    def everyone_holds_its_own(self) -> None:
        self.bench.check()
        scheduler = self.bench.scheduler
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.active)

    def teardown(self) -> None:
        """Whatever happened, all that is left finishes, and nothing is left over."""
        for _ in range(2000):
            if not self.active:
                break
            self.run_a_pass()
            self.everyone_holds_its_own()
        assert not self.active, f"{len(self.active)} sequences never finish"
        assert self.bench.pool.num_free == self.bench.pool.num_blocks


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


# --- faults that these tests must find -----------------------------------------------------------


class SharesDrafts(BlockTables):
    """Offers what is in the table, drafts that may yet be rejected too."""

    def computed(self, sequence: Sequence) -> None:
        tokens = sequence.tokens[: sequence.num_computed] + sequence.drafted
        self._index.add(tokens[: len(sequence.blocks) * SIZE], sequence.blocks)


class SharesTooSoon(BlockTables):
    """Offers blocks as soon as they are taken."""

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        super().grow(sequence, num_tokens)
        self._index.add(sequence.tokens[: len(sequence.blocks) * SIZE], sequence.blocks)


class SharesTheLastBlock(BlockTables):
    """Shares blocks that are not full, or of which the last token's logits are still wanted."""

    def find(self, sequence: Sequence) -> list[int]:
        found = super().find(sequence)
        return found and [*found, *self._index.find(sequence.tokens)[len(found) :]]

    def begin(self, sequence: Sequence, blocks: list[int]) -> None:
        super().begin(sequence, blocks)
        sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - 1)


class SkipsScores(BlockTables):
    """Skips prompts whose log-probabilities are wanted."""

    def find(self, sequence: Sequence) -> list[int]:
        return self._index.find(sequence.tokens[:-1])


class RemembersTooLong(BlockTables):
    """Never forgets whose blocks they were."""

    def _release(self, blocks: list[int]) -> None:
        self._pool.release(blocks)


class WaitsForever(BlockTables):
    """Has sequences wait for one that does not run on."""

    def _is_computing(self, sequence: Sequence, now: float) -> bool:
        return super()._is_computing(sequence, float("inf"))


def anything_in_any_order() -> None:
    run_state_machine_as_test(
        SharingMachine,
        settings=settings(
            deadline=None,
            derandomize=True,
            database=None,
            max_examples=60,
            stateful_step_count=30,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (SharesTooSoon, anything_in_any_order),
        (SharesTheLastBlock, anything_in_any_order),
        (SkipsScores, anything_in_any_order),
        (RemembersTooLong, anything_in_any_order),
        (SharesDrafts, test_drafted_tokens_are_never_shared),
        (WaitsForever, lambda: test_nobody_waits_for_a_prompt_that_does_not_go_on("asked")),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: type[BlockTables], test: Callable[[], None]
) -> None:
    monkeypatch.setattr(Bench, "tables", fault)
    with pytest.raises((AssertionError, BlockPoolError, KeyError)):
        test()
