"""One block of KV as one value, and back: whole, sound and the right one, or a miss.

| bytes       | what                                                           |
|-------------|----------------------------------------------------------------|
| 4           | ``PFKV``                                                       |
| 4           | format version                                                 |
| 4           | length of the header                                           |
| 8           | length of the payload                                          |
| 32          | SHA-256 of all other bytes, in this order                      |
| header      | msgpack: [fingerprint, dtype, block size, layers, parent, ids] |
| payload     | keys and values, see :class:`~pilotfish_checkpoint.address.Layout` |

Lengths are unsigned and little-endian. The checksum is SHA-256 since a block that is damaged and
passes would change what a model says: a checksum of 32 bits lets one of some four billion damaged
blocks through, and processors with instructions for SHA-256 run it at a gigabyte a second, faster
than BLAKE2. It guards against damage; whoever may write to a store can forge what it holds.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from pilotfish_checkpoint.address import DIGEST_BYTES, FORMAT_VERSION, BlockId

MAGIC = b"PFKV"
_HEAD = struct.Struct("<4sIIQ")
_BODY = _HEAD.size + DIGEST_BYTES  # where the header begins


class Reason(StrEnum):
    """Why a value is not the block that was asked for."""

    ABSENT = "there is none"
    TRUNCATED = "it is too short or too long"
    FOREIGN = "it is no block"
    VERSION = "it has another format version"
    DAMAGED = "its checksum does not fit"
    HEADER = "its header cannot be read"
    MODEL = "it is of another model"
    DTYPE = "it has another dtype"
    LAYOUT = "it has another layout"
    PREFIX = "it stands behind other tokens"
    TOKENS = "it has other tokens"


@dataclass(frozen=True, slots=True)
class Miss:
    """There is no such block, or what is there cannot be used."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Block:
    """A block with its keys and values.

    Attributes:
        id: which one it is.
        payload: `id.layout.payload_bytes` bytes. It is not copied, so it must not change.

    Raises:
        ValueError: a payload of another length, or one that does not lie in one piece.
    """

    id: BlockId
    payload: bytes | memoryview

    def __post_init__(self) -> None:
        view, wanted = memoryview(self.payload), self.id.layout.payload_bytes
        if view.nbytes != wanted or not view.c_contiguous:
            raise ValueError(f"a payload must be {wanted} bytes in a row, not {view.nbytes}")


def encode(block: Block) -> bytes:
    """The block as one value."""
    header = _header(block.id)
    payload = memoryview(block.payload).cast("B")
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, len(header), len(payload))
    return b"".join([head, _checksum(head, header, payload), header, payload])


def decode(raw: bytes | None, wanted: BlockId) -> Block | Miss:
    """The block `wanted`, if `raw` is exactly that and undamaged; never an exception.

    The block's payload is a view of `raw`.
    """
    if raw is None:
        return Miss(Reason.ABSENT)
    if len(raw) < _BODY:
        return Miss(Reason.TRUNCATED)
    magic, version, header_bytes, payload_bytes = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        return Miss(Reason.FOREIGN)
    if version != FORMAT_VERSION:
        return Miss(Reason.VERSION)
    if len(raw) != _BODY + header_bytes + payload_bytes:
        return Miss(Reason.TRUNCATED)
    view = memoryview(raw)
    if _checksum(view[: _HEAD.size], view[_BODY:]) != view[_HEAD.size : _BODY]:
        return Miss(Reason.DAMAGED)
    header, payload = bytes(view[_BODY : _BODY + header_bytes]), view[_BODY + header_bytes :]
    # compared as bytes: what would decode to the same but is written otherwise is not ours
    if header != _header(wanted):
        return Miss(_difference(header, wanted))
    if payload_bytes != wanted.layout.payload_bytes:
        return Miss(Reason.LAYOUT)
    return Block(wanted, payload)


def _header(block: BlockId) -> bytes:
    layout = block.layout
    parts = [block.fingerprint, layout.dtype, layout.block_size, layout.layers]
    packed: bytes = msgpack.packb([*parts, block.parent, block.tokens])
    return packed


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _difference(header: bytes, wanted: BlockId) -> Reason:
    """The first thing in which a sound header differs from the wanted block."""
    try:
        found: Any = msgpack.unpackb(header, use_list=False)
        fingerprint, dtype, block_size, layers, parent, tokens = found
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return Reason.HEADER
    layout = wanted.layout
    differs = {
        Reason.MODEL: fingerprint != wanted.fingerprint,
        Reason.DTYPE: dtype != layout.dtype,
        Reason.LAYOUT: (block_size, layers) != (layout.block_size, layout.layers),
        Reason.PREFIX: parent != wanted.parent,
        Reason.TOKENS: tokens != wanted.tokens,
    }
    return next((reason for reason, is_so in differs.items() if is_so), Reason.HEADER)
