"""Drafts by a small model, for many sessions in each step, over a paged cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.draft.source import Draft, Drafted
from pilotfish_workers.model.interface import Model, Rows
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Draw, Drawn, Sampler


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
    sampler: Sampler
    k: int
    drafted: list[int] = field(default_factory=list)
    laws: list[SparseLaw | None] = field(default_factory=list)
    is_behind: bool = False

    def draw(self) -> Draw:
        """Asks for the next token."""
        return Draw(self.sampler, tuple(self.drafted))

    def take(self, drawn: Drawn) -> None:
        """Note the next token; where there is none the proposal ends."""
        if drawn.token < 0:
            self.k = len(self.drafted)
        else:
            self.drafted.append(drawn.token)
            self.laws.append(drawn.law)

    def answer(self) -> Drafted:
        """What was drafted; laws only where one of the tokens has one."""
        if all(law is None for law in self.laws):
            return Drafted(self.drafted)
        pairs = zip(self.drafted, self.laws, strict=True)
        return Drafted(self.drafted, [law or SparseLaw.certain(token) for token, law in pairs])


class ModelSource:
    """Drafting by a model, each token drawn as the draft's sampler says, or the argmax.

    A token is run only after it was drawn, and a proposal ends early only where nothing can be
    drawn: how long it gets depends on the tokens in it alone.

    Args:
        model: the draft model; its pool belongs to this source.
        prefill_tokens: tokens that one call works off before it answers None.
    """

    def __init__(self, model: Model, prefill_tokens: int) -> None:
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._live: dict[int, tuple[Draft, _Memory]] = {}
        self._clock = 0
        self._argmax = Sampler(SamplingParams(), Coins(0), tokens=[], num_prompt=0)

    def propose(self, drafts: Sequence[Draft], ks: Sequence[int]) -> list[Drafted | None]:
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
        return [None if step.is_behind else step.answer() for step in steps]

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
        return _Step(draft, memory, draft.sampler or self._argmax, k)

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
        rows = [row for _, row in batch]
        draws = [step.draw() if row.num_logits else None for step, row in batch]
        for (step, row), drawn in zip(batch, self._model.draw(rows, draws), strict=True):
            step.memory.num_computed = row.start + len(row.tokens)
            if drawn is not None:
                step.take(drawn)

    def _make_room(self, memory: _Memory, num_tokens: int) -> bool:
        """Grow a block table, at the cost of drafts that were not used for longest."""
        pool = self._model.pool
        need = pool.num_blocks_for(num_tokens) - len(memory.blocks)
        if need <= 0:
            return True
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
