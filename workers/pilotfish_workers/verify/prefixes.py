"""Which blocks of the KV pool hold which tokens, so that sequences that begin alike share them.

No I/O and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Ids = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """One block's tokens behind those of its parents, and the blocks that hold their KV."""

    parent: _Node | None
    tokens: Ids
    blocks: list[int] = field(default_factory=list)
    children: dict[Ids, _Node] = field(default_factory=dict)


class PrefixIndex:
    """Finds blocks by the tokens that they hold and all tokens before them.

    A tree with a block's token ids on each edge. The ids themselves are compared, so no collision
    of a digest can ever give a sequence foreign KV.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._root = _Node(None, ())
        self._node_of: dict[int, _Node] = {}  # by block

    def __contains__(self, block: int) -> bool:
        """Whether the block may be shared."""
        return block in self._node_of

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest prefix of `tokens` there is."""
        found: list[int] = []
        node: _Node | None = self._root
        for begin in range(0, len(tokens) - self._size + 1, self._size):
            node = node.children.get(tuple(tokens[begin : begin + self._size])) if node else None
            if node is None:
                break
            found.append(node.blocks[0])
        return found

    def add(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Take in the full blocks of a sequence.

        Args:
            tokens: those whose KV the table holds; all committed.
            blocks: its block table. Where a beginning of it is known already, that holds the same
                tokens as before.
        """
        end = len(tokens) // self._size
        begin = end
        while begin and blocks[begin - 1] not in self._node_of:
            begin -= 1
        node = self._node_of[blocks[begin - 1]] if begin else self._root
        for number in range(begin, end):
            ids = tuple(tokens[number * self._size : (number + 1) * self._size])
            node = node.children.setdefault(ids, _Node(node, ids))
            node.blocks.append(blocks[number])
            self._node_of[blocks[number]] = node

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks that nobody holds any more.

        Whoever holds a block holds one with the same tokens for each of its parents, so a node
        that loses its last block has lost its children's, or does so in this very call.
        """
        for block in blocks:
            node = self._node_of.pop(block, None)
            if node is None:
                continue
            node.blocks.remove(block)
            if not node.blocks and node.parent is not None:
                del node.parent.children[node.tokens]
