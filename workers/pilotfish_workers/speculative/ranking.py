"""Keeping what comes first in each row of logits, by looking at no more of it than it takes.

Where a row is cut depends on its first entries only, so a vocabulary is not sorted to find out: the
few hundred first entries are looked at, then, for those rows alone that they do not decide, some
thousand, and then all. Whatever has to be known of a row's first entries is worked out in numpy.

On a processor all the work is numpy's: it compares, selects and sorts with the wide instructions
that torch leaves unused there. On another device torch selects, and a few numbers a row travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

_FEW = 512
_WIDTHS = (_FEW, 8192)
"""How many entries are looked at before all are."""
_GROUP = 16
"""Of so many entries only the largest is looked at to find where the few begin."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a row ends.

    Attributes:
        floor: the least rank that is kept.
        num_ties: how many entries of that rank are kept, those with the highest ids; None for all.
    """

    floor: float
    num_ties: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """A row's first entries, at least one.

    Attributes:
        ranks: `[n]`, descending.
        probs: `[n]`, beside them; empty where the order has none.
        is_all: whether every entry that follows is −inf.
    """

    ranks: Floats
    probs: Floats
    is_all: bool


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Which entries come first, and where to cut.

    Attributes:
        ranks: `[R, V]`, contiguous, of the logits' type; the first entry has the largest. −inf for
            one that is not there.
        cut: where row number r is to be cut, by its first entries; None where it takes more.
        probs: `[R, V]`, what `cut` is to see beside the ranks.
    """

    ranks: torch.Tensor
    cut: Callable[[int, Entries], Cut | None]
    probs: torch.Tensor | None = None


def keep_first(logits: torch.Tensor, order: Order) -> None:
    """Put −inf, in place, where an entry of `[R, V]` is beyond its row's cut."""
    rows = [*range(logits.shape[0])]
    if is_on_processor(logits):
        rows = _keep_among_few(logits.numpy(), order)
    if rows:
        ranks = select_rows(order.ranks, rows)
        on_rows(logits, rows, lambda part: _keep_among_more(part, ranks, order, rows))


def keep_from(logits: torch.Tensor, ranks: torch.Tensor, floors: torch.Tensor) -> None:
    """Put −inf, in place, where a rank `[R, V]` is below its row's floor `[R, 1]`."""
    if not is_on_processor(logits):
        logits.masked_fill_(ranks < floors, -math.inf)
        return
    is_kept = np.greater_equal(ranks.numpy(), floors.numpy())
    entries = logits.numpy()
    if np.count_nonzero(is_kept) < is_kept.size // 16:
        _keep_places(entries, slice(None), np.flatnonzero(is_kept))
        return
    with np.errstate(divide="ignore"):  # log 0 = −inf; a choice by a mask takes ten times as long
        entries += np.log(is_kept, dtype=entries.dtype)


def on_rows(
    logits: torch.Tensor, rows: Sequence[int], step: Callable[[torch.Tensor], object]
) -> None:
    """Let `step` change these rows in place; they ascend. The others are not touched."""
    if _lie_together(rows):
        step(logits[rows[0] : rows[-1] + 1])
        return
    index = torch.tensor(rows, device=logits.device)
    part = logits.index_select(0, index)
    step(part)
    logits.index_copy_(0, index, part)


def select_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows in ascending order, to read: a view where they lie side by side, else a copy."""
    if _lie_together(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def is_on_processor(values: torch.Tensor) -> bool:
    """Whether numpy can work on it."""
    return values.device.type == "cpu"


def _lie_together(rows: Sequence[int]) -> bool:
    return rows[-1] - rows[0] + 1 == len(rows)


def _keep_among_few(logits: Floats, order: Order) -> list[int]:
    """Cut the rows for which a few entries decide; on a processor.

    Returns:
        the other rows.
    """
    ranks = order.ranks.numpy().reshape(-1)
    probs = None if order.probs is None else order.probs.numpy().reshape(-1)
    places, starts, is_all = _few(order.ranks)
    done: list[int] = []
    others: list[int] = []
    kept: list[NDArray[np.int64]] = []
    for row in range(len(logits)):
        mine = places[starts[row] : starts[row + 1]]
        if not len(mine):
            continue  # it holds nothing finite, or NaN
        values = ranks[mine]
        cut = order.cut(row, _entries(values, None if probs is None else probs[mine], is_all[row]))
        if cut is None:
            others.append(row)
            continue
        done.append(row)
        if cut.num_ties is None:
            kept.append(mine[values >= cut.floor])
        else:
            kept.append(mine[values > cut.floor])
            kept.append(mine[values == cut.floor][-cut.num_ties :])
    if done:
        _keep_places(logits, done, np.concatenate(kept))
    return others


def _entries(values: Floats, probs: Floats | None, is_all: bool) -> Entries:
    if probs is None:
        return Entries(np.sort(values)[::-1], values[:0], is_all)
    order = np.argsort(values)[::-1]
    return Entries(values[order], probs[order], is_all)


def _keep_places(logits: Floats, rows: slice | list[int], places: NDArray[np.int64]) -> None:
    """Of these rows keep what stands at these places of the flat logits."""
    flat = logits.reshape(-1)
    kept = flat[places]
    logits[rows] = -np.inf
    flat[places] = kept


def _few(ranks: torch.Tensor) -> tuple[NDArray[np.int64], list[int], list[bool]]:
    """The first entries of each row, and all that tie with the last of them.

    As many groups as entries are wanted have a largest entry at least as large as the least of
    these; so that is a bound that at least so many entries reach.

    Returns:
        their places in the flat ranks, ascending; where each row's begin among them, and their
        number; for each row whether these are all that are finite.
    """
    num_rows, size = ranks.shape
    entries = ranks.numpy()
    lowest = np.finfo(entries.dtype).min
    group = min(_GROUP, size // (2 * _FEW))
    bounds = np.full(num_rows, lowest)
    if group > 1:
        grouped = size // group * group
        largest = ranks[:, :grouped].view(num_rows, group, -1).amax(1).numpy()
        bounds = np.maximum(bounds, np.partition(largest, -_FEW)[:, -_FEW])
    places = np.flatnonzero(entries >= bounds[:, None])
    starts = np.searchsorted(places, np.arange(num_rows + 1) * size)
    return places, starts.tolist(), (bounds <= lowest).tolist()


def _keep_among_more(
    logits: torch.Tensor, ranks: torch.Tensor, order: Order, rows: Sequence[int]
) -> None:
    """Cut rows, number `rows` of the order, by more and more of their entries."""
    size = logits.shape[1]
    floors = torch.full((len(rows), 1), -math.inf, dtype=logits.dtype)
    ties: dict[int, int] = {}
    pending = [*rows]
    places = {row: place for place, row in enumerate(rows)}
    for width in [*_widths(logits), size]:
        others: list[int] = []
        for row, entries in zip(pending, _first(order, pending, width), strict=True):
            cut = order.cut(row, entries)
            if cut is None:
                others.append(row)
                continue
            floors[places[row]] = float(cut.floor)
            if cut.num_ties is not None:
                ties[places[row]] = cut.num_ties
        pending = others
        if not pending:
            break
    floors = floors.to(logits.device)
    if ties:
        _drop_ties(logits, ranks, floors, ties)
    keep_from(logits, ranks, floors)


def _widths(logits: torch.Tensor) -> list[int]:
    """How many entries to look at before all; a processor has seen a few before."""
    least = _FEW + is_on_processor(logits)
    return [width for width in _WIDTHS if least <= width < logits.shape[1]]


def _first(order: Order, rows: Sequence[int], width: int) -> list[Entries]:
    """The `width` first entries of each of these rows."""
    ranks = select_rows(order.ranks, rows)
    probs = None if order.probs is None else select_rows(order.probs, rows)
    first = ranks.shape[1] - width
    beside: Floats = np.empty((len(rows), 0))
    if not is_on_processor(ranks):
        chosen = ranks.topk(width)
        values = chosen.values.cpu().numpy()
        if probs is not None:
            beside = probs.gather(1, chosen.indices).cpu().numpy()
    elif probs is None:
        values = np.sort(np.partition(ranks.numpy(), first)[:, first:])[:, ::-1]
    else:
        ids = np.argpartition(ranks.numpy(), first)[:, first:]
        values = np.take_along_axis(ranks.numpy(), ids, 1)
        descending = np.argsort(values)[:, ::-1]
        values = np.take_along_axis(values, descending, 1)
        beside = np.take_along_axis(probs.numpy(), np.take_along_axis(ids, descending, 1), 1)
    return [Entries(*both, is_all=not first) for both in zip(values, beside, strict=True)]


def _drop_ties(
    logits: torch.Tensor, ranks: torch.Tensor, floors: torch.Tensor, ties: dict[int, int]
) -> None:
    """Of the entries at a row's floor keep only `ties[row]`, those with the highest ids."""
    rows = sorted(ties)
    ranks, floors = select_rows(ranks, rows), select_rows(floors, rows)
    if is_on_processor(ranks):
        found = np.flatnonzero(np.equal(ranks.numpy(), floors.numpy()))
    else:
        found = torch.eq(ranks, floors).flatten().nonzero().squeeze(1).cpu().numpy()
    owner, ids = np.divmod(found, ranks.shape[1])
    num_found = np.bincount(owner, minlength=len(rows))
    number = np.arange(len(found)) - (np.cumsum(num_found) - num_found)[owner]
    is_dropped = number < (num_found - [ties[row] for row in rows])[owner]
    dropped = np.array(rows)[owner[is_dropped]] * ranks.shape[1] + ids[is_dropped]
    logits.view(-1).index_fill_(0, torch.from_numpy(dropped).to(logits.device), -math.inf)
