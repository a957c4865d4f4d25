"""The steps that keep only some tokens by their probability: top-k, top-p, min-p, typical-p.

Each equals transformers' processor of that name, ties included. All work in place on contiguous
float32 or float64 logits `[R, V]`, with one parameter a row, and put −inf where a token is not
kept. A row that holds NaN, or nothing finite, may become anything of that kind; it harms no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish_workers.speculative.ranking import (
    Cut,
    Entries,
    Order,
    keep_first,
    keep_from,
    select_rows,
)

_STRETCHES = 64


def keep_most_likely(logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> None:
    """Top-k, and top-p among what that keeps.

    All that tie with the k-th stay. Of those that tie where top-p cuts, as many stay as top-p asks
    for, the highest ids first: so does a stable ascending sort, from which tokens are taken away
    from the front. (transformers' own sort leaves open which of them go.)

    Args:
        top_k: 1 … V − 1, or 0 for none.
        top_p: above 0 and below 1, or 1 for none.
    """
    is_open = [not k and share < 1 for k, share in zip(top_k, top_p, strict=True)]
    totals = _totals(logits, [row for row, it_is in enumerate(is_open) if it_is])

    def cut(row: int, entries: Entries) -> Cut | None:
        return _likely_cut(entries, top_k[row], top_p[row], totals[row])

    keep_first(logits, Order(logits, cut))


def keep_relative(logits: torch.Tensor, min_p: Sequence[float]) -> None:
    """Min-p: those at least so likely, relative to the most likely one.

    Args:
        min_p: above 0, at most 1.
    """
    # p(t) / p(best) is exp of the logits' difference: no softmax is needed
    below = torch.tensor([[math.log(share)] for share in min_p], dtype=logits.dtype)
    keep_from(logits, logits, logits.amax(-1, keepdim=True) + below.to(logits.device))


def keep_typical(logits: torch.Tensor, typical_p: Sequence[float]) -> None:
    """Typical-p (Meister et al., arXiv 2202.00666): those whose information is nearest to the
    entropy, until their probabilities reach it together, and all that are as near as the last.

    Args:
        typical_p: above 0 and below 1.
    """
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    # −inf · 0 of a token that is not there counts for nothing
    entropy = -_sum(torch.mul(logprobs, probs).nan_to_num_(nan=0.0)).to(logits.dtype)
    nearness = logprobs.add_(entropy).abs_().neg_()

    def cut(row: int, entries: Entries) -> Cut | None:
        reached = np.cumsum(entries.probs, dtype=np.float64)
        last = int(np.searchsorted(reached, typical_p[row]))
        if last == len(reached) and not entries.is_all:
            return None
        return Cut(entries.ranks[min(last, len(reached) - 1)])

    keep_first(logits, Order(nearness, cut, probs))


def _likely_cut(entries: Entries, top_k: int, top_p: float, total: float) -> Cut | None:
    """Where a row of logits is cut; `total` is that of `_totals`, where there is no top-k."""
    values = entries.ranks
    size = likely = len(values)
    if top_k:
        if top_k > size and not entries.is_all:
            return None
        kth = values[min(top_k, size) - 1]
        if top_p == 1:
            return Cut(kth)
        likely = size - int(np.searchsorted(values[::-1], kth))
        if likely == size and not entries.is_all:
            return None  # more may tie with the k-th: what they weigh together is not known
    with np.errstate(invalid="ignore"):  # a row that holds +inf
        reached = np.cumsum(np.exp(values[:likely] - values[0]), dtype=np.float64)
    share = top_p * (reached[-1] if top_k else total)
    # one more is kept after each that does not reach the share
    count = min(int(np.searchsorted(reached, share)) + 1, likely)
    if count == size:
        return Cut(values[-1]) if entries.is_all else None
    floor = values[count - 1]
    if values[count] != floor:
        return Cut(floor)
    num_above = size - int(np.searchsorted(values[::-1], floor, side="right"))
    return Cut(floor, count - num_above)


def _totals(logits: torch.Tensor, rows: Sequence[int]) -> NDArray[np.float64]:
    """`[R]`: for these rows the sum of exp(logit − the row's largest), else 0."""
    totals = np.zeros(logits.shape[0])
    if rows:
        part = select_rows(logits, rows)
        sums = _sum(torch.sub(part, part.amax(-1, keepdim=True)).exp_())
        totals[rows] = sums.squeeze(1).cpu().numpy()
    return totals


def _sum(values: torch.Tensor) -> torch.Tensor:
    """float64 `[R, 1]`: the sum of each row, the same whatever rows stand beside it.

    Short stretches are summed in the values' own precision, which is faster; a single long sum
    might be split between threads, according to how many rows there are.
    """
    num_rows, size = values.shape
    stretch = size // _STRETCHES
    stretches = values[:, : stretch * _STRETCHES].view(num_rows, _STRETCHES, stretch).sum(-1)
    rest = values[:, stretch * _STRETCHES :].sum(-1, keepdim=True, dtype=torch.float64)
    return rest + stretches.sum(-1, keepdim=True, dtype=torch.float64)
