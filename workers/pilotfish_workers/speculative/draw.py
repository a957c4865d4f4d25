"""What a drafter's pass draws: one token a sequence, by its job's own parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pilotfish_workers.speculative.accept import BAD_LOGITS
from pilotfish_workers.speculative.best import best_tokens, why_none
from pilotfish_workers.speculative.chain import ChainRow, apply_chain
from pilotfish_workers.speculative.gumbel import gumbel_argmax
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Draw, Drawn
from pilotfish_workers.speculative.target_laws import take_rows

__all__ = ["NUM_ENTRIES", "draw_tokens"]

NUM_ENTRIES = 64
"""Most tokens that a law travels with."""


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw a token for each row.

    Under `rejection` and `block` the law is cut down to its likeliest tokens first, and the token
    is drawn from what is left: it must be the law that the token was really drawn from. Under
    `coupled` the noise is the target's own.

    Args:
        logits: `[M, V]`, any float type; they stay as they are.
        draws: M of them.

    Raises:
        ValueError: rows and draws do not fit together.
    """
    if len(draws) != logits.shape[0]:
        raise ValueError(f"{len(draws)} draws on {logits.shape[0]} rows")
    best = best_tokens(logits)
    rows = [row for row, one in enumerate(draws) if best[row] != BAD_LOGITS and _needs_chain(one)]
    drawn = [Drawn(token) for token in best]
    if rows:
        for row, one in zip(rows, _draw_chained(logits, rows, draws), strict=True):
            drawn[row] = one
    return drawn


def _needs_chain(one: Draw) -> bool:
    params = one.sampler.params
    return params.temperature > 0 or params.changes_logits


def _draw_chained(logits: torch.Tensor, rows: list[int], draws: Sequence[Draw]) -> list[Drawn]:
    mine = [draws[row] for row in rows]
    chained = apply_chain(take_rows(logits, rows), [_chain_row(one) for one in mine])
    best = best_tokens(chained)
    drawn = []
    by_law = []
    for place, (one, token) in enumerate(zip(mine, best, strict=True)):
        sampler, position = one.sampler, one.sampler.position + len(one.drafted)
        if token == BAD_LOGITS:
            token = why_none(chained[place])
        elif sampler.rule == "coupled":
            token, _ = gumbel_argmax(chained[place], sampler.coins, position)
        elif sampler.rule != "greedy":
            by_law.append(place)
        drawn.append(Drawn(token))
    if by_law:
        for place, law in zip(by_law, _likeliest(take_rows(chained, by_law)), strict=True):
            drawn[place] = _draw_from(law, mine[place])
    return drawn


def _chain_row(one: Draw) -> ChainRow:
    masks = one.sampler.masks(one.drafted)
    return ChainRow(one.sampler, tuple(one.drafted), None if masks is None else masks[-1])


def _likeliest(chained: torch.Tensor) -> list[SparseLaw]:
    """softmax of each row, of its likeliest tokens alone."""
    logits, ids = chained.topk(min(NUM_ENTRIES, chained.shape[1]), dim=-1)
    weights = torch.exp((logits - logits[:, :1]).float()).cpu().numpy()
    names = ids.cpu().numpy().astype(np.int64)
    # what cannot come, and what is too unlikely for float32, has no place in a law
    return [
        SparseLaw(row[weight > 0], weight[weight > 0])
        for row, weight in zip(names, weights, strict=True)
    ]


def _draw_from(law: SparseLaw, one: Draw) -> Drawn:
    sampler = one.sampler
    base = sampler.position
    return Drawn(law.draw(sampler.coins.draft(base + len(one.drafted), base)), law)
