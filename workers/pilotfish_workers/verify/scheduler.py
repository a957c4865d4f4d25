"""Who takes part in the next pass. No I/O and no tensors: sequences and blocks only."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish_workers.model.block_pool import BlockPool
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
    (lowest priority, then youngest) loses its blocks and waits to be computed again.
    """

    def __init__(self, pool: BlockPool, prefill_tokens: int) -> None:
        self._pool = pool
        self._prefill_tokens = prefill_tokens
        self._arrivals = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preempted = 0

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it is alone."""
        return self._pool.num_blocks_for(num_tokens) <= self._pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in; it waits for blocks first."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda item: item.order)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, with its blocks."""
        self._release(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def schedule(self, now: float) -> list[Work]:
        """The next pass, in order; empty when nobody is ready."""
        work: list[Work] = []
        budget = self._prefill_tokens
        self._admit()
        for sequence in sorted(self.running, key=lambda item: item.order):
            if sequence not in self.running or not sequence.is_ready(now):
                continue  # preempted meanwhile, or waiting for its proposal
            pending = sequence.num_pending
            tokens = pending if pending == 1 else min(pending, budget)
            if tokens == 0:
                continue
            drafted = sequence.drafted[: sequence.most_drafts] if tokens == pending else []
            if not self._has_room(sequence, tokens + len(drafted)):
                drafted = []  # they are worth nobody's blocks
            if not self._grow(sequence, tokens + len(drafted)):
                continue
            budget -= tokens if pending > 1 else 0
            work.append(Work(sequence, tokens, drafted, tokens == pending))
        return work

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks that only rejected tokens needed."""
        keep = self._pool.num_blocks_for(len(sequence.tokens))
        self._pool.release(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def _admit(self) -> None:
        """Let in whoever fits beside the running ones; with less than that, a prompt would be
        computed again and again, each time preempted before it is done."""
        free = self._pool.num_free - sum(self._missing(item) for item in self.running)
        while self.waiting:
            need = self._missing(self.waiting[0])
            if self.running and need > free:
                return
            free -= need
            self.running.append(self.waiting.pop(0))

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that it still needs for its tokens and the next one."""
        need = self._pool.num_blocks_for(len(sequence.tokens) + 1)
        return max(0, need - len(sequence.blocks))

    def _need(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a table lacks to cover `num_tokens` more."""
        blocks = self._pool.num_blocks_for(sequence.num_computed + num_tokens)
        return max(0, blocks - len(sequence.blocks))

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._pool.can_allocate(self._need(sequence, num_tokens))

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` more, preempting others if need be."""
        while not self._has_room(sequence, num_tokens):
            victim = max(self.running, key=lambda item: item.order)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.allocate(self._need(sequence, num_tokens))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda item: item.order)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed = 0
