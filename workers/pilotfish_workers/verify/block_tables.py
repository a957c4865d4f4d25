"""The block tables of the verify engine's sequences: how they grow, shrink, and share blocks.

No I/O and no tensors. Only full blocks are shared, of which every token is committed and has its
KV in the pool. Their holders write behind them only, so a shared block never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.verify.prefixes import PrefixIndex
from pilotfish_workers.verify.sequence import Sequence


class BlockTables:
    """Moves blocks between a pool and `Sequence.blocks`.

    Attributes:
        num_shared_tokens: tokens that were not computed, since blocks of another sequence held
            them already.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._index = PrefixIndex(pool.block_size)
        self.num_shared_tokens = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it is alone."""
        return self._pool.num_blocks_for(num_tokens) <= self._pool.num_blocks

    def missing(self, sequence: Sequence) -> int:
        """Blocks that a sequence still needs for its tokens and the next one."""
        need = self._pool.num_blocks_for(len(sequence.tokens) + 1)
        return max(0, need - len(sequence.blocks))

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether its table can cover `num_tokens` more than are computed."""
        return self._pool.can_allocate(self._need(sequence, num_tokens))

    def room(self, sequence: Sequence) -> int:
        """How many tokens more than are computed its table can cover, with what is free."""
        blocks = len(sequence.blocks) + self._pool.num_free
        return blocks * self._pool.block_size - sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make its table cover `num_tokens` more than are computed; only where there is room."""
        sequence.blocks += self._pool.allocate(self._need(sequence, num_tokens))

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks that only rejected tokens needed."""
        keep = self._pool.num_blocks_for(len(sequence.tokens))
        self._release(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def clear(self, sequence: Sequence) -> None:
        """Give back all blocks; nothing of the sequence is computed any more."""
        self._release(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed = 0

    # --- sharing -------------------------------------------------------------------------------

    def computed(self, sequence: Sequence) -> bool:
        """Offer others what is computed: `num_computed` tokens, all committed, none drafted.

        Returns:
            whether that is more than was offered before.
        """
        full = sequence.num_computed // self._pool.block_size
        if not full or sequence.blocks[full - 1] in self._index:
            return False
        self._index.add(sequence.tokens[: sequence.num_computed], sequence.blocks)
        return True

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that a sequence without any can begin with: never those of all its tokens, since
        the last one's logits are wanted, and none where every token's are."""
        if sequence.wants_prompt_logprobs:
            return []
        return self._index.find(sequence.tokens[:-1])

    def beginning(
        self, sequence: Sequence, running: Collection[Sequence], now: float
    ) -> tuple[list[int], int]:
        """What `find` gives, and `num_coming`. While a sequence goes on waiting for another, not a
        token is looked at: many samples may wait for one long prompt, pass after pass."""
        if sequence.awaited is not None:
            other, count = sequence.awaited
            is_coming = other.num_computed < count * self._pool.block_size
            if is_coming and other in running and self._is_computing(other, now):
                return [], count
            sequence.awaited = None
        shared = self.find(sequence)
        return shared, self.num_coming(sequence, len(shared), running, now)

    def num_coming(
        self, sequence: Sequence, num_shared: int, running: Iterable[Sequence], now: float
    ) -> int:
        """How many blocks it could begin with once those of `running` whose prompt is computed at
        this time, before its own would be, are done; 0 where that is not more than `num_shared`."""
        most = num_shared
        if not sequence.wants_prompt_logprobs:
            wanted = sequence.tokens[:-1]
            for other in running:
                if other.order < sequence.order and self._is_computing(other, now):
                    count = self._num_common(wanted, other.tokens, most)
                    if count > most:
                        most, sequence.awaited = count, (other, count)
        return most if most > num_shared else 0

    def begin(self, sequence: Sequence, blocks: list[int]) -> None:
        """Let a sequence without blocks begin with shared ones, as `find` gave them."""
        self._pool.share(blocks)
        sequence.blocks = list(blocks)
        sequence.num_computed = len(blocks) * self._pool.block_size
        self.num_shared_tokens += sequence.num_computed

    def _is_computing(self, sequence: Sequence, now: float) -> bool:
        """Whether a running sequence's prompt is computed at this time."""
        return sequence.num_pending > 1 and sequence.is_ready(now)

    def _need(self, sequence: Sequence, num_tokens: int) -> int:
        blocks = self._pool.num_blocks_for(sequence.num_computed + num_tokens)
        return max(0, blocks - len(sequence.blocks))

    def _release(self, blocks: list[int]) -> None:
        self._index.forget(self._pool.release(blocks))

    def _num_common(self, tokens: list[int], others: list[int], least: int) -> int:
        """Full blocks of tokens with which both begin; 0 where they are not more than `least`."""
        size, count = self._pool.block_size, 0
        most = min(len(tokens), len(others)) // size
        if most <= least or _block(tokens, least, size) != _block(others, least, size):
            return 0
        while count < most and _block(tokens, count, size) == _block(others, count, size):
            count += 1
        return count


def _block(tokens: list[int], number: int, size: int) -> list[int]:
    return tokens[number * size : (number + 1) * size]
