"""Many laws over the whole vocabulary at once, of which only few numbers are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish_workers.speculative.law import SparseLaw


@dataclass(frozen=True, slots=True)
class Wanted:
    """A token to draw from the law norm(max(0, scale · p − q)).

    Attributes:
        row: which p.
        uniform: the point of (0, 1) at which to draw.
        scale: of p.
        less: q; None to draw from p.
    """

    row: int
    uniform: float
    scale: float = 1.0
    less: SparseLaw | None = None


class TargetLaws:
    """softmax of each row, by float32 weights that everything is computed from in float64.

    Args:
        logits: float32 or float64 `[R, V]` after the chain, −inf where a token cannot come. A row
            without any finite entry may be there but not be asked for.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        if logits.device.type == "cpu":
            # torch's exp takes ten times as long where much is −inf
            with np.errstate(invalid="ignore"):  # −inf − −inf, in a row without any token
                weights = np.subtract(logits.numpy(), logits.numpy().max(-1, keepdims=True))
                np.exp(weights, out=weights)
            totals = weights.sum(-1, dtype=np.float64)
            self._weights, self._totals = torch.from_numpy(weights), torch.from_numpy(totals)
        else:
            self._weights = torch.sub(logits, logits.amax(-1, keepdim=True)).exp_()
            self._totals = self._weights.sum(-1, dtype=torch.float64)

    def at(self, rows: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 `[n]`: the probability of each token in its row; 0 for one that is not in the
        vocabulary."""
        vocab_size = self._weights.shape[1]
        is_known = (ids >= 0) & (ids < vocab_size)
        device = self._weights.device
        where = torch.from_numpy(rows).to(device)
        which = torch.from_numpy(np.where(is_known, ids, 0)).to(device)
        values = self._weights[where, which].double() / self._totals[where]
        return np.asarray(np.where(is_known, values.cpu().numpy(), 0.0), dtype=np.float64)

    def draw(self, wanted: Sequence[Wanted]) -> list[int]:
        """A token each, by the inverse of the cumulated probabilities in the order of ids.

        Where nothing is left of p (p and q are equal, and rounding alone has rejected) the token
        is drawn from p.
        """
        if not wanted:
            return []
        device = self._weights.device
        rows = torch.tensor([one.row for one in wanted], device=device)
        mass = self._weights[rows].double()
        self._subtract(mass, rows, wanted)
        reached = mass.cumsum(-1)
        total = reached[:, -1:]
        points = torch.tensor([[one.uniform] for one in wanted], dtype=torch.float64, device=device)
        ids = torch.searchsorted(reached, points * total, right=True)
        ids.clamp_(max=mass.shape[1] - 1)  # a row in which nothing is left
        tokens: list[int] = ids.squeeze(1).tolist()
        # a sum in parallel may fall a hair where it should stay: never take what cannot come
        for place, found in enumerate(mass.gather(1, ids).squeeze(1).tolist()):
            if found <= 0:
                tokens[place] = self._draw_otherwise(mass[place], wanted[place])
        return tokens

    def _subtract(self, mass: torch.Tensor, rows: torch.Tensor, wanted: Sequence[Wanted]) -> None:
        """Turn weights `[B, V]` into max(0, scale · p − q), in place, where there is a q."""
        places: list[NDArray[np.int64]] = []
        ids: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float64]] = []
        for place, one in enumerate(wanted):
            if one.less is not None:
                is_known = one.less.ids < mass.shape[1]
                ids.append(one.less.ids[is_known])
                # in the unit of the row's weights, p's total stands for 1
                values.append(one.less.probabilities[is_known] / one.scale)
                places.append(np.full(ids[-1].shape, place))
        if not places:
            return
        where = torch.from_numpy(np.concatenate(places)).to(mass.device)
        which = torch.from_numpy(np.concatenate(ids)).to(mass.device)
        less = torch.from_numpy(np.concatenate(values)).to(mass.device)
        left = mass[where, which] - less * self._totals[rows[where]]
        mass[where, which] = left.clamp_(min=0)

    def _draw_otherwise(self, mass: torch.Tensor, wanted: Wanted) -> int:
        if mass.amax() > 0:
            return int(mass.argmax())
        return self.draw([Wanted(wanted.row, wanted.uniform)])[0]


def take_rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows, in ascending order; without a copy where that is all of them."""
    if len(rows) == values.shape[0]:
        return values
    return values.index_select(0, torch.tensor(rows, dtype=torch.int64, device=values.device))
