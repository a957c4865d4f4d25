"""Everything that one packed pass needs to know, built once and used by every layer.

A pass runs the tokens of many sequences as one row of N tokens, so that the linear layers see
no padding. Only attention is ragged: its sequences are put into a few groups of similar shape,
each padded to the largest in the group, so that the number of kernel calls a layer depends on
how different the shapes are and not on how many sequences there are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pilotfish_workers.model.interface import Rows

__all__ = ["Group", "PassPlan", "build_plan"]

_MIN_QUERY_CLASS = 8  # decoding with and without drafted tokens shares a group
_MIN_KV_CLASS = 256
_KV_ALIGN = 16  # fused kernels want the mask's rows aligned
_MAX_GROUP_SLOTS = 1 << 18  # bounds the memory that one gather takes
_MAX_FOLDED_QUERIES = 64


@dataclass(slots=True)
class Group:
    """Sequences of similar shape: G of them, padded to Q query tokens and L keys."""

    num_rows: int
    query_len: int
    kv_len: int
    query_index: torch.Tensor | None
    """int64 `[G * Q]` into the packed tokens; None if the group is the whole pass in order.
    A short row repeats its last token, so that no padded query has everything masked."""
    kv_slots: torch.Tensor
    """int64 `[G * L]`; what lies beyond a sequence's end points at the zero slot."""
    positions: torch.Tensor
    """int64 `[G, Q]`, position of each query token in its sequence."""
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    @property
    def is_folded(self) -> bool:
        """Whether the query heads that share a key head are laid side by side as more queries,
        which spares a copy of keys and values for each of them."""
        return self.query_len <= _MAX_FOLDED_QUERIES

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[G, 1, repeats * Q, L]`: 0 where a query sees a key, else -inf.

        Query at position p sees keys at positions up to p, with a window W only those above
        p - W. Built on first use and kept, as most layers ask for the same one.
        """
        cached = self.masks.get((window, repeats))
        if cached is None:
            keys = torch.arange(self.kv_len, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            cached = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            cached = cached.masked_fill_(~seen, -torch.inf).repeat(1, repeats, 1).unsqueeze(1)
            self.masks[(window, repeats)] = cached
        return cached


@dataclass(slots=True)
class PassPlan:
    """One packed pass over N tokens."""

    token_ids: torch.Tensor
    """int64 `[1, N]`"""
    positions: torch.Tensor
    """int64 `[1, N]`"""
    write_slots: torch.Tensor
    """int64 `[N]`, where each token's keys and values go."""
    groups: list[Group]
    output_index: torch.Tensor | None
    """int64 `[N]` into the groups' padded outputs laid end to end; None if that is the order."""
    logit_index: torch.Tensor
    """int64 `[M]`, the tokens whose logits are wanted."""


def build_plan(
    rows: Sequence[Rows], block_size: int, zero_slot: int, device: torch.device
) -> PassPlan:
    """Lay out one pass over `rows`; the caller has checked them."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    offsets: list[int] = []
    for row in rows:
        offsets.append(len(tokens))
        tokens += row.tokens
        span = range(row.start, row.start + len(row.tokens))
        positions += span
        slots += [row.blocks[p // block_size] * block_size + p % block_size for p in span]
        wanted += range(len(tokens) - row.num_logits, len(tokens))
    layout = _Layout(rows, offsets, block_size, zero_slot, device)
    groups, output_index = layout.groups(len(tokens))
    return PassPlan(
        token_ids=torch.tensor([tokens], device=device),
        positions=torch.tensor([positions], device=device),
        write_slots=torch.tensor(slots, device=device),
        groups=groups,
        output_index=output_index,
        logit_index=torch.tensor(wanted, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    rows: Sequence[Rows]
    offsets: list[int]
    block_size: int
    zero_slot: int
    device: torch.device

    def groups(self, num_tokens: int) -> tuple[list[Group], torch.Tensor | None]:
        output_index = [0] * num_tokens
        groups: list[Group] = []
        base = 0
        for members in self._members():
            group, query_index = self._group(members)
            for place, member in enumerate(members):
                offset, length = self.offsets[member], len(self.rows[member].tokens)
                first = base + place * group.query_len
                output_index[offset : offset + length] = range(first, first + length)
            base += len(query_index)
            if query_index == list(range(num_tokens)):
                group.query_index = None
            groups.append(group)
        if output_index == list(range(base)):
            return groups, None
        return groups, torch.tensor(output_index, device=self.device)

    def _members(self) -> list[list[int]]:
        """Row numbers of each group: by class of query length and of key length."""
        classes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, row in enumerate(self.rows):
            length = len(row.tokens)
            key = (
                _class_of(length, _MIN_QUERY_CLASS),
                _class_of(row.start + length, _MIN_KV_CLASS),
            )
            classes[key].append(number)
        groups = []
        for (_, kv_class), members in sorted(classes.items()):
            size = max(1, _MAX_GROUP_SLOTS // kv_class)
            groups += [members[i : i + size] for i in range(0, len(members), size)]
        return groups

    def _group(self, members: list[int]) -> tuple[Group, list[int]]:
        rows = [self.rows[member] for member in members]
        query_len = max(len(row.tokens) for row in rows)
        ends = [row.start + len(row.tokens) for row in rows]
        kv_len = -(-max(ends) // _KV_ALIGN) * _KV_ALIGN
        query_index: list[int] = []
        positions: list[list[int]] = []
        for member, row in zip(members, rows, strict=True):
            padding = query_len - len(row.tokens)
            offset, last = self.offsets[member], len(row.tokens) - 1
            query_index += [*range(offset, offset + last + 1), *[offset + last] * padding]
            start, end = row.start, row.start + last
            positions.append([*range(start, end + 1), *[end] * padding])
        group = Group(
            num_rows=len(rows),
            query_len=query_len,
            kv_len=kv_len,
            query_index=torch.tensor(query_index, device=self.device),
            kv_slots=self._kv_slots(rows, ends, kv_len),
            positions=torch.tensor(positions, device=self.device),
        )
        return group, query_index

    def _kv_slots(self, rows: list[Rows], ends: list[int], kv_len: int) -> torch.Tensor:
        width = -(-kv_len // self.block_size)
        tables = [(row.blocks[:width] + [0] * width)[:width] for row in rows]
        block = torch.tensor(tables, device=self.device).unsqueeze(-1) * self.block_size
        within = torch.arange(self.block_size, device=self.device)
        slots = (block + within).view(len(rows), -1)[:, :kv_len]
        end = torch.tensor(ends, device=self.device).unsqueeze(-1)
        is_beyond = torch.arange(kv_len, device=self.device) >= end
        return slots.masked_fill(is_beyond, self.zero_slot).reshape(-1)


def _class_of(length: int, smallest: int) -> int:
    """The power of two, at least `smallest`, that holds `length`."""
    return max(smallest, 1 << (length - 1).bit_length())
