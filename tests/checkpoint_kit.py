"""What tests of KV checkpoints share: small blocks with known payloads, and a clock to turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pilotfish_checkpoint.address import BlockId, Layout, blocks_of
from pilotfish_checkpoint.block import Block, encode

MODEL = "a" * 64
LAYOUT = Layout("float32", 4, ((2, 3, 3), (1, 4, 2)))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def payload_of(block: BlockId) -> bytes:
    """Bytes that belong to this block and no other, of the right length."""
    length = block.layout.payload_bytes
    return hashlib.shake_128(block.address).digest(length)


def make_blocks(
    number: int, *, first: int = 0, layout: Layout = LAYOUT, model: str = MODEL
) -> list[Block]:
    """The blocks of one prefix of `number` full blocks; another `first` shares none of them."""
    tokens = range(first, first + number * layout.block_size)
    return [Block(id, payload_of(id)) for id in blocks_of(model, layout, tokens)]


def layout_of_bytes(size: int) -> Layout:
    """A layout whose payload has `size` bytes, an even number."""
    return Layout("float16", 1, ((1, size // 4, size // 2 - size // 4),))


def ids_of(blocks: Sequence[Block]) -> list[BlockId]:
    return [block.id for block in blocks]


def addresses_of(blocks: Sequence[Block]) -> list[bytes]:
    return [block.id.address for block in blocks]


def items_of(blocks: Sequence[Block]) -> list[tuple[bytes, bytes]]:
    """What is stored for these blocks."""
    return [(block.id.address, encode(block)) for block in blocks]
