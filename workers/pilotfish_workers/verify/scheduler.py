"""Who takes part in the next pass. No I/O and no tensors: sequences and blocks only."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.verify.block_tables import BlockTables
from pilotfish_workers.verify.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a pass: `num_tokens` of its pending tokens, then its drafts.

    `is_decoding` says that the pass reaches the sequence's last token and so yields the next one;
    `drafted` is empty otherwise.
    """

    sequence: Sequence
    num_tokens: int
    drafted: list[int]
    is_decoding: bool


class Scheduler:
    """Holds the active sequences and chooses the next pass.

    Decoding sequences that are ready all take part; prompts share `prefill_tokens` a pass, so
    that a long prompt never holds the others up. When blocks run out, the last sequence in order
    (lowest priority, then youngest) loses its blocks and waits to be computed again. What
    sequences have in common at their beginning is computed once.
    """

    def __init__(self, pool: BlockPool, prefill_tokens: int) -> None:
        self.tables = BlockTables(pool)
        self._prefill_tokens = prefill_tokens
        self._arrivals = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preempted = 0
        self._now = 0.0
        self._is_prefix_awaited = False

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it is alone."""
        return self.tables.can_ever_fit(num_tokens)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in; it waits for blocks first."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, with its blocks."""
        self.tables.clear(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def schedule(self, now: float) -> list[Work]:
        """The next pass, in order; empty when nobody is ready."""
        work: list[Work] = []
        budget = self._prefill_tokens
        self._now = now
        self._admit()
        for sequence in sorted(self.running, key=lambda item: item.order):
            if sequence not in self.running or not sequence.is_ready(now):
                continue  # preempted meanwhile, or waiting for its proposal
            pending = sequence.num_pending
            tokens = pending if pending == 1 else min(pending, budget)
            if tokens == 0:
                continue
            drafted = sequence.drafted[: sequence.most_drafts] if tokens == pending else []
            # worth nobody's blocks; cut by place alone: how many there are depends on what they are
            drafted = drafted[: max(0, self.tables.room(sequence) - tokens)]
            if not self._grow(sequence, tokens + len(drafted)):
                continue
            budget -= tokens if pending > 1 else 0
            work.append(Work(sequence, tokens, drafted, tokens == pending))
        return work

    def computed(self, sequence: Sequence) -> None:
        """Note that a pass has computed `num_computed` tokens. Call it before drafts count among
        them, and before the sequence ends: those that waited for its prompt take it over here."""
        if self.tables.computed(sequence) and self._is_prefix_awaited:
            self._admit()

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks that only rejected tokens needed."""
        self.tables.trim(sequence)

    def _admit(self) -> None:
        """Let in whoever fits beside the running ones; with less than that, a prompt would be
        computed again and again, each time preempted before it is done. Who begins like a prompt
        that is computed ahead of it waits for that, and what it will need is kept for it."""
        free = self.tables.num_free - sum(map(self.tables.missing, self.running))
        self._is_prefix_awaited = False
        for sequence in list(self.waiting):
            shared, num_coming = self.tables.beginning(sequence, self.running, self._now)
            need = self.tables.missing(sequence) - max(num_coming, len(shared))
            if self.running and need > free:
                return
            free -= need
            if num_coming > len(shared):
                self._is_prefix_awaited = True
                continue
            self.tables.begin(sequence, shared)
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` more, preempting others if need be."""
        while not self.tables.has_room(sequence, num_tokens):
            victim = max(self.running, key=lambda item: item.order)
            self.num_preempted += 1
            self.tables.clear(victim)
            self.running.remove(victim)
            self._wait(victim)
            if victim is sequence:
                return False
        self.tables.grow(sequence, num_tokens)
        return True

    def _wait(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda item: item.order)
