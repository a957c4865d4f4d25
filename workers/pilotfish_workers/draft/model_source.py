"""Drafts by a small model, for many sessions in each step, over a paged cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish_workers.draft.source import Draft
from pilotfish_workers.model.interface import BAD_LOGITS, Model, Rows


@dataclass(slots=True, eq=False)
class _Memory:
    """Block table of one draft; the first `num_computed` tokens' KV is in it.

    Tokens that were drafted count too until `learn` says what stands, so that an accepted draft
    is never computed twice.
    """

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    last_used: int = 0


@dataclass(slots=True)
class _Step:
    """One draft within one call of `propose`."""

    draft: Draft
    memory: _Memory
    k: int
    drafted: list[int] = field(default_factory=list)
    is_behind: bool = False


class ModelSource:
    """Greedy drafting by a model.

    Args:
        model: the draft model; its pool belongs to this source.
        prefill_tokens: tokens that one call works off before it answers None.
    """

    def __init__(self, model: Model, prefill_tokens: int) -> None:
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._live: dict[int, tuple[Draft, _Memory]] = {}
        self._clock = 0

    def propose(self, drafts: Sequence[Draft], ks: Sequence[int]) -> list[list[int] | None]:
        """See `DraftSource.propose`."""
        self._clock += 1
        budget = self._prefill_tokens
        steps = [self._step(draft, k) for draft, k in zip(drafts, ks, strict=True)]
        first: list[tuple[_Step, Rows]] = []
        # a long prompt must not keep those waiting who lack a token or two
        for step in sorted(steps, key=lambda s: len(s.draft.tokens) - s.memory.num_computed):
            rows = self._catch_up(step, budget)
            if rows is not None:
                budget -= len(rows.tokens)
                first.append((step, rows))
        self._run(first)
        while longer := [s for s in steps if s.drafted and len(s.drafted) < s.k]:
            self._run([(step, self._next(step)) for step in longer])
        return [None if step.is_behind else step.drafted for step in steps]

    def learn(self, draft: Draft, num_valid: int | None) -> None:
        """See `DraftSource.learn`."""
        entry = self._live.get(id(draft))
        if entry is None:
            return
        memory = entry[1]
        if num_valid is None:
            self._evict(draft, memory)
            return
        memory.num_computed = min(memory.num_computed, num_valid)
        keep = self._model.pool.num_blocks_for(memory.num_computed)
        self._model.pool.release(memory.blocks[keep:])
        del memory.blocks[keep:]

    def check_integrity(self) -> None:
        """Raise `BlockPoolError` unless the pool holds exactly the live drafts' blocks."""
        self._model.pool.check_integrity(memory.blocks for _, memory in self._live.values())

    def _step(self, draft: Draft, k: int) -> _Step:
        entry = self._live.get(id(draft))
        memory = entry[1] if entry else _Memory()
        memory.last_used = self._clock
        self._live[id(draft)] = (draft, memory)
        length = len(draft.tokens)
        # the last drafted token is never run, so k tokens need k - 1 further positions
        k = max(0, min(k, self._model.info.context_length - length + 1))
        if k and not self._make_room(memory, length + k - 1):
            k = 0
        return _Step(draft, memory, k)

    def _catch_up(self, step: _Step, budget: int) -> Rows | None:
        """The tokens that are not computed yet; they fit into `budget`, or the step is behind."""
        memory, tokens = step.memory, step.draft.tokens
        if step.k:
            memory.num_computed = min(memory.num_computed, len(tokens) - 1)  # its logits are needed
        pending = max(0, len(tokens) - memory.num_computed)
        count = min(pending, max(budget, 1 if step.k and pending == 1 else 0))
        step.is_behind = count < pending
        if count == 0 or not self._can_run(step, memory.num_computed + count):
            return None
        start = memory.num_computed
        return Rows(
            tokens=tokens[start : start + count],
            start=start,
            blocks=memory.blocks,
            num_logits=1 if step.k and not step.is_behind else 0,
        )

    def _can_run(self, step: _Step, num_tokens: int) -> bool:
        limit = self._model.info.context_length
        vocab_size = self._model.info.vocab_size
        tokens = step.draft.tokens[step.memory.num_computed : num_tokens]
        # the target may have tokens that this model has not
        fits = num_tokens <= limit and max(tokens) < vocab_size
        if fits and self._make_room(step.memory, num_tokens):
            return True
        step.is_behind, step.k = False, 0  # nothing to wait for: this draft gets no tokens
        return False

    def _next(self, step: _Step) -> Rows:
        start = step.memory.num_computed
        return Rows(tokens=[step.drafted[-1]], start=start, blocks=step.memory.blocks, num_logits=1)

    def _run(self, batch: list[tuple[_Step, Rows]]) -> None:
        if not batch:
            return
        answers = self._model.greedy([rows for _, rows in batch])
        for (step, rows), answer in zip(batch, answers, strict=True):
            step.memory.num_computed = rows.start + len(rows.tokens)
            if answer and answer[0] == BAD_LOGITS:
                step.k = len(step.drafted)
            elif answer:
                step.drafted.append(answer[0])

    def _make_room(self, memory: _Memory, num_tokens: int) -> bool:
        """Grow a block table, at the cost of drafts that were not used for longest."""
        pool = self._model.pool
        need = max(0, pool.num_blocks_for(num_tokens) - len(memory.blocks))
        idle = sorted(
            (entry for entry in self._live.values() if entry[1].last_used < self._clock),
            key=lambda entry: entry[1].last_used,
        )
        if need > pool.num_free + sum(len(entry[1].blocks) for entry in idle):
            return False  # in vain
        while not pool.can_allocate(need):
            self._evict(*idle.pop(0))
        memory.blocks += pool.allocate(need)
        return True

    def _evict(self, draft: Draft, memory: _Memory) -> None:
        self._model.pool.release(memory.blocks)
        memory.blocks.clear()
        memory.num_computed = 0
        self._live.pop(id(draft), None)
