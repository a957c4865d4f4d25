"""The longest beginning of a prefix that a store can give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_checkpoint.address import BlockId
from pilotfish_checkpoint.block import Block, Reason, decode
from pilotfish_checkpoint.store import BlockStore

CALL_BYTES = 8 << 20  # read in one call, so that little is read beyond a gap

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Leading blocks, and why there are no more of them.

    Attributes:
        blocks: first to last, without a gap.
        reason: what is wrong with the next one; None if these are all that were wanted. A store
            that did not answer has none.
    """

    blocks: list[Block]
    reason: Reason | None


def stored_prefix(store: BlockStore, wanted: Sequence[BlockId]) -> int:
    """How many leading blocks have a value, asked in one call and without reading them."""
    found = store.contains_many([block.address for block in wanted])
    return found.index(False) if False in found else len(found)


def load_prefix(store: BlockStore, wanted: Sequence[BlockId]) -> Prefix:
    """The longest stored beginning of `wanted`, which are of one layout.

    A value that is there and cannot be used is deleted, so that a good one can take its place.
    """
    blocks: list[Block] = []
    step = max(1, CALL_BYTES // wanted[0].layout.payload_bytes) if wanted else 1
    for begin in range(0, len(wanted), step):
        part = wanted[begin : begin + step]
        values = store.get_many([block.address for block in part])
        for block, value in zip(part, values, strict=True):
            found = decode(value, block)
            if isinstance(found, Block):
                blocks.append(found)
                continue
            if found.reason is not Reason.ABSENT:
                log.warning("deleted a stored KV block: %s", found.reason)
                store.delete([block.address])
            return Prefix(blocks, found.reason)
    return Prefix(blocks, None)
