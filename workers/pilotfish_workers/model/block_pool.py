"""The book-keeper of the paged KV pool: which blocks are free, and how often each is held.

It knows nothing of tensors. A block table lives with its sequence, reference counts live here,
and nothing is kept in both places. Ask `can_allocate` before `allocate`: a full pool is an
ordinary answer, an exception is a bug.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from pilotfish_workers.model.errors import BlockPoolError

__all__ = ["BlockPool"]


class BlockPool:
    """Reference-counted allocator over block ids 0 … num_blocks - 1. One owner, not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise BlockPoolError(
                f"a pool needs at least one block of one token, got {num_blocks} of {block_size}"
            )
        self._block_size = block_size
        self._counts = [0] * num_blocks
        # a stack: the block released last is reused first, while it is still in the cache
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or held."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a table needs to hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed now."""
        return 0 <= num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one reference. `BlockPoolError` unless `can_allocate`."""
        if not self.can_allocate(num_blocks):
            raise BlockPoolError(f"asked for {num_blocks} blocks, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; all must be held already. All or nothing."""
        wanted = list(blocks)
        for block in wanted:
            self._require_held(block, 1)
        for block in wanted:
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference of each block; those that nobody holds become free, and are returned.
        All or nothing."""
        wanted = list(blocks)
        for block, times in Counter(wanted).items():
            self._require_held(block, times)
        freed = []
        for block in wanted:
            self._counts[block] -= 1
            if self._counts[block] == 0:
                freed.append(block)
        self._free += freed
        return freed

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `BlockPoolError` unless the counts are exactly what `tables` hold.

        `tables` are all live block tables. Run it when the engine is idle and after each test.
        """
        held: Counter[int] = Counter()
        for table in tables:
            held.update(table)
        for block in held:
            if not 0 <= block < len(self._counts):
                raise BlockPoolError(f"a table holds block {block}, which does not exist")
        for block, count in enumerate(self._counts):
            if count != held[block]:
                raise BlockPoolError(
                    f"block {block} is counted {count} times but tables hold it {held[block]} times"
                )
        free = {block for block, count in enumerate(self._counts) if count == 0}
        if len(self._free) != len(free) or set(self._free) != free:
            raise BlockPoolError("the free list is not the set of blocks without references")

    def _require_held(self, block: int, times: int) -> None:
        if not 0 <= block < len(self._counts) or self._counts[block] < times:
            raise BlockPoolError(f"block {block} is not held {times} times")
