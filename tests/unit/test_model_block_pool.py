"""The block pool's books balance whatever is done with it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.model.errors import BlockPoolError


class PoolMachine(RuleBasedStateMachine):
    """Sequences grow, shrink, fork and end; tables are the model of the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def start(self, count: int) -> None:
        if self.pool.can_allocate(count):
            before = self.pool.num_free
            table = self.pool.allocate(count)
            assert len(set(table)) == count
            assert self.pool.num_free == before - count
            assert not set(table) & {block for other in self.tables for block in other}
            self.tables.append(table)
        else:
            with pytest.raises(BlockPoolError):
                self.pool.allocate(count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(prefix)
        self.tables.append(prefix)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        keep = data.draw(st.integers(0, len(table)))
        self.pool.release(table[keep:])
        del table[keep:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_free == self.pool.num_blocks - len(held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


@given(num_tokens=st.integers(0, 1000), block_size=st.integers(1, 64))
def test_the_blocks_for_some_tokens_just_hold_them(num_tokens: int, block_size: int) -> None:
    blocks = BlockPool(1, block_size).num_blocks_for(num_tokens)
    assert (
        blocks - 1
    ) * block_size < num_tokens <= blocks * block_size or num_tokens == blocks == 0


def test_a_block_that_nobody_holds_is_not_released_or_shared() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(2)
    for wrong in ([held[0], held[0]], [held[0], 3], [held[0], 99], [-1]):
        with pytest.raises(BlockPoolError):
            pool.release(wrong)
        pool.check_integrity([held])  # nothing was done by halves
    with pytest.raises(BlockPoolError):
        pool.share([held[0], 3])
    pool.check_integrity([held])


def test_the_integrity_check_notices_leaked_doubled_and_unknown_blocks() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(2)
    for wrong in ([], [held, held], [held[:1]], [[*held, 3]], [[*held, 77]]):
        with pytest.raises(BlockPoolError):
            pool.check_integrity(wrong)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(BlockPoolError):
        BlockPool(0, 16)
