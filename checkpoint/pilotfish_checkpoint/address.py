"""Under which name a block of KV is stored: what was computed, from what, for which tokens.

A **block** is the keys and values of a fixed number of committed tokens. They depend on the
model, on how they are laid out, and on every token up to the last of the block, so the address is
a chain of SHA-256: each block's digest covers its parent's digest and its own token ids, and the
chain begins with model, layout and format version. Equal addresses mean equal content in every
process and on every machine. (Python's own ``hash`` differs from process to process.)

No I/O and no tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgpack

FORMAT_VERSION = 1
DIGEST_BYTES = 32
MAX_TOKEN = (1 << 31) - 1
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# what is hashed begins with different words, so no block can pass for the root of a chain
_ROOT = b"pilotfish-kv-root\0"
_BLOCK = b"pilotfish-kv-block\0"


@dataclass(frozen=True, slots=True)
class Layout:
    """What the payload of a block holds: for each layer its keys, then its values.

    Keys are ``[block_size, num_heads, key_dim]``, values ``[block_size, num_heads, value_dim]``,
    in row-major order and little-endian; the layers follow each other without a gap.

    Attributes:
        dtype: of every number, one of `ITEM_BYTES`.
        block_size: tokens a block.
        layers: (num_heads, key_dim, value_dim) of each layer.

    Raises:
        ValueError: an unknown dtype, or a size below one.
    """

    dtype: str
    block_size: int
    layers: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        sizes = [self.block_size, *(size for layer in self.layers for size in layer)]
        if not self.layers or min(sizes) < 1:
            raise ValueError("a layout needs a layer, and sizes of at least one")

    @property
    def payload_bytes(self) -> int:
        """Length of a block's payload."""
        values = sum(heads * (key + value) for heads, key, value in self.layers)
        return self.block_size * values * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BlockId:
    """All that says which block it is.

    Attributes:
        fingerprint: of the model, weights and dtype included; equal ones compute equal KV.
        layout: of the payload.
        parent: digest of the block before it, or `root_digest` for the first one.
        tokens: ids of the block, `layout.block_size` of them.
        address: the block's own digest, under which it is stored.

    Raises:
        ValueError: another number of tokens, a parent that is no digest, or a token id that is
            negative or too large.
    """

    fingerprint: str
    layout: Layout
    parent: bytes
    tokens: tuple[int, ...]
    address: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != self.layout.block_size:
            raise ValueError(f"{len(self.tokens)} tokens in a block of {self.layout.block_size}")
        if len(self.parent) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(self.parent)}")
        object.__setattr__(self, "address", block_digest(self.parent, self.tokens))


def root_digest(fingerprint: str, layout: Layout) -> bytes:
    """Where every chain of this model and layout begins."""
    parts = [FORMAT_VERSION, fingerprint, layout.dtype, layout.block_size, layout.layers]
    return hashlib.sha256(_ROOT + msgpack.packb(parts)).digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the block with these token ids behind the one with digest `parent`.

    Raises:
        ValueError: a token id is negative or too large.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN):
        raise ValueError(f"token ids lie between 0 and {MAX_TOKEN}")
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.sha256(_BLOCK + parent + packed).digest()


def blocks_of(fingerprint: str, layout: Layout, tokens: Sequence[int]) -> list[BlockId]:
    """The full blocks of a token prefix, first to last; what is left over has none."""
    return list(_blocks(fingerprint, layout, tokens))


def digests_of(fingerprint: str, layout: Layout, tokens: Sequence[int]) -> list[bytes]:
    """The addresses of the full blocks of a token prefix, first to last."""
    return [block.address for block in _blocks(fingerprint, layout, tokens)]


def _blocks(fingerprint: str, layout: Layout, tokens: Sequence[int]) -> Iterator[BlockId]:
    size = layout.block_size
    parent = root_digest(fingerprint, layout)
    for begin in range(0, len(tokens) - size + 1, size):
        # plain integers, also where a model's own were given: msgpack writes no others
        ids = tuple(map(int, tokens[begin : begin + size]))
        block = BlockId(fingerprint, layout, parent, ids)
        yield block
        parent = block.address
