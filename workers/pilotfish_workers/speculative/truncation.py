"""The steps that keep only some tokens by their probability: top-k, top-p, min-p, typical-p.

Each equals transformers' processor of that name, ties included. None sorts a vocabulary to find its
cut: it looks at the few hundred entries that come first, at more for those rows alone that need
more, and then compares every entry with the one at the cut. Sums over many entries are in float64,
so that a row's cut does not depend on the rows beside it.

All work in place on contiguous float32 or float64 logits `[R, V]`, with one parameter a row, and
put −inf where a token is not kept. A row that holds NaN, or nothing finite, may become anything of
that kind; it harms no other row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_WIDTHS = (512, 8192)
"""How many entries are looked at before all are."""
_STRETCHES = 64


def on_rows(
    logits: torch.Tensor, rows: Sequence[int], step: Callable[[torch.Tensor], None]
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


def _lie_together(rows: Sequence[int]) -> bool:
    return rows[-1] - rows[0] + 1 == len(rows)


def forbid(logits: torch.Tensor, forbidden: torch.Tensor) -> None:
    """Put −inf where a bool mask of the same shape is set."""
    if _is_on_processor(logits):
        np.copyto(logits.numpy(), -np.inf, where=forbidden.numpy())
    else:
        logits.masked_fill_(forbidden, -math.inf)


def keep_most_likely(logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> None:
    """Top-k, and top-p among what that keeps.

    All that tie with the k-th stay. Of those that tie where top-p cuts, as many stay as top-p asks
    for, the highest ids first: so does a stable ascending sort, from which tokens are taken away
    from the front. (transformers' own sort leaves open which of them go.)

    Args:
        top_k: 1 … V − 1, or 0 for none.
        top_p: above 0 and below 1, or 1 for none.
    """
    num_rows, size = logits.shape
    floors = logits.new_empty(num_rows, 1)
    split: dict[int, int] = {}
    totals = _totals(logits, [r for r in range(num_rows) if not top_k[r] and top_p[r] < 1])
    pending = list(range(num_rows))
    for width in _widths(size):
        rows = [row for row in pending if top_k[row] < width or width == size]
        if not rows:
            continue
        cut = _cut(
            _largest(select_rows(logits, rows), width),
            [top_k[row] for row in rows],
            [top_p[row] for row in rows],
            select_rows(totals, rows),
            is_all=width == size,
        )
        floors[rows] = cut.floors
        split |= {row: kept for row, kept in zip(rows, cut.kept_ties, strict=True) if kept}
        settled = {row for row, is_settled in zip(rows, cut.is_settled, strict=True) if is_settled}
        pending = [row for row in pending if row not in settled]
    _keep_from(logits, logits, floors)
    if split:
        _drop_ties(logits, floors, split)


def keep_relative(logits: torch.Tensor, min_p: Sequence[float]) -> None:
    """Min-p: those at least so likely, relative to the most likely one.

    Args:
        min_p: above 0, at most 1.
    """
    # p(t) / p(best) is exp of the logits' difference: no softmax is needed
    below = torch.tensor([[math.log(share)] for share in min_p], dtype=logits.dtype)
    _keep_from(logits, logits, logits.amax(-1, keepdim=True) + below.to(logits.device))


def keep_typical(logits: torch.Tensor, typical_p: Sequence[float]) -> None:
    """Typical-p (Meister et al., arXiv 2202.00666): those whose information is nearest to the
    entropy, until their probabilities reach it together, and all that are as near as the last.

    Args:
        typical_p: above 0 and below 1.
    """
    num_rows, size = logits.shape
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    # −inf · 0 of a token that is not there counts for nothing
    entropy = -_sum(torch.mul(logprobs, probs).nan_to_num_(nan=0.0)).to(logits.dtype)
    nearness = logprobs.add_(entropy).abs_().neg_()
    floors = logits.new_empty(num_rows, 1)
    pending = list(range(num_rows))
    for width in _widths(size):
        if not pending:
            break
        values, ids = _largest_with_ids(select_rows(nearness, pending), width)
        reached = select_rows(probs, pending).gather(1, ids).cumsum(-1, dtype=torch.float64)
        wanted = _column([typical_p[row] for row in pending], reached)
        last = (reached < wanted).sum(-1, keepdim=True)
        floors[pending] = values.gather(1, last.clamp(max=width - 1))
        if width == size:
            break
        is_open = (last == width).squeeze(1).tolist()
        pending = [row for row, more in zip(pending, is_open, strict=True) if more]
    _keep_from(logits, nearness, floors)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the rows of a stage are cut.

    Attributes:
        floors: `[n, 1]`, the least logit that stays.
        kept_ties: how many of those at the floor stay; 0 where all do.
        is_settled: whether enough entries were looked at to know.
    """

    floors: torch.Tensor
    kept_ties: list[int]
    is_settled: list[bool]


def _cut(
    values: torch.Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    totals: torch.Tensor,
    is_all: bool,
) -> _Cut:
    """Cut rows by their largest values `[n, width]`, which descend; `totals` is of `_totals`."""
    num_rows, width = values.shape
    ks = torch.tensor([[k] for k in top_k], device=values.device)
    kth = values.gather(1, (ks - 1).clamp(min=0))
    if min(top_p) == 1:
        return _Cut(kth, [0] * num_rows, [True] * num_rows)
    kth = torch.where(ks > 0, kth, -math.inf)
    is_likely = values >= kth
    weights = torch.where(is_likely, (values - values[:, :1]).exp(), 0).double()
    reached = weights.cumsum(-1)
    totals = torch.where(ks > 0, reached[:, -1:], totals)
    shares = _column([share if share < 1 else math.inf for share in top_p], reached)
    is_kept = is_likely & (reached - weights < shares * totals)
    count = is_kept.sum(-1, keepdim=True).clamp(min=1)
    floors = values.gather(1, count - 1)
    following = values.gather(1, count.clamp(max=width - 1))
    is_split = (count < width) & (following == floors) & floors.isfinite()
    kept_ties = torch.where(is_split, count - (values > floors).sum(-1, keepdim=True), 0)
    # top-p needs all that top-k keeps, ties too, to know what they weigh together
    is_settled = torch.where(ks > 0, values[:, -1:] < kth, count < width) | shares.isinf()
    answers = torch.cat([kept_ties, is_settled.long()], 1).tolist()
    return _Cut(floors, [kept for kept, _ in answers], [is_all or bool(it) for _, it in answers])


def _totals(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """float64 `[R, 1]`: for these rows the sum of exp(logit − the row's largest), else 0."""
    totals = torch.zeros(logits.shape[0], 1, dtype=torch.float64, device=logits.device)
    if rows:
        part = select_rows(logits, rows)
        totals[rows] = _sum(torch.sub(part, part.amax(-1, keepdim=True)).exp_())
    return totals


def _drop_ties(logits: torch.Tensor, floors: torch.Tensor, split: dict[int, int]) -> None:
    """Of the tokens at a row's floor keep `split[row]`, those with the highest ids."""
    rows = sorted(split)
    size = logits.shape[1]
    part, level = select_rows(logits, rows), select_rows(floors, rows)
    if _is_on_processor(logits):
        places = np.flatnonzero(np.equal(part.numpy(), level.numpy()))
    else:
        places = torch.eq(part, level).flatten().nonzero().squeeze(1).cpu().numpy()
    owner, ids = np.divmod(places, size)
    num_ties = np.bincount(owner, minlength=len(rows))
    rank = np.arange(len(places)) - (np.cumsum(num_ties) - num_ties)[owner]
    is_dropped = rank < (num_ties - [split[row] for row in rows])[owner]
    dropped = np.array(rows)[owner[is_dropped]] * size + ids[is_dropped]
    logits.view(-1).index_fill_(0, torch.from_numpy(dropped).to(logits.device), -math.inf)


def _keep_from(logits: torch.Tensor, values: torch.Tensor, floors: torch.Tensor) -> None:
    """Put −inf where a value `[R, V]` is below its row's floor `[R, 1]`."""
    if _is_on_processor(logits):
        below = np.less(values.numpy(), floors.numpy())  # a tenth of the time of torch's
        np.copyto(logits.numpy(), -np.inf, where=below)
    else:
        logits.masked_fill_(values < floors, -math.inf)


def _largest(values: torch.Tensor, width: int) -> torch.Tensor:
    """The largest `width` entries of each row, in descending order; NaN counts as the largest."""
    if not _is_on_processor(values):
        return values.topk(width).values
    # torch selects and sorts here without the processor's wide instructions, numpy with them
    first = values.shape[1] - width
    chosen = np.partition(values.numpy(), first)[:, first:] if first else values.numpy()
    return torch.from_numpy(np.sort(chosen)[:, ::-1].copy())


def _largest_with_ids(values: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the places where they stand."""
    if not _is_on_processor(values):
        found = values.topk(width)
        return found.values, found.indices
    entries = values.numpy()
    first = entries.shape[1] - width
    if first:
        ids = np.argpartition(entries, first)[:, first:]
        chosen = np.take_along_axis(entries, ids, 1)
        order = np.argsort(chosen)[:, ::-1]
        ids, chosen = (np.take_along_axis(of, order, 1) for of in (ids, chosen))
    else:
        ids = np.argsort(entries)[:, ::-1].copy()
        chosen = np.take_along_axis(entries, ids, 1)
    return torch.from_numpy(chosen), torch.from_numpy(ids)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """float64 `[R, 1]`: the sum of each row.

    Short stretches are summed in the values' own precision, which is faster; they are the same
    whatever the number of rows, whereas one long sum may be split between threads.
    """
    num_rows, size = values.shape
    stretch = size // _STRETCHES
    stretches = values[:, : stretch * _STRETCHES].view(num_rows, _STRETCHES, stretch).sum(-1)
    rest = values[:, stretch * _STRETCHES :].sum(-1, keepdim=True, dtype=torch.float64)
    return rest + stretches.sum(-1, keepdim=True, dtype=torch.float64)


def _column(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[number] for number in numbers], dtype=like.dtype, device=like.device)


def _widths(size: int) -> list[int]:
    return [width for width in _WIDTHS if width < size] + [size]


def _is_on_processor(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"
