"""Log-probabilities by the model's own logits, before any chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish_workers.speculative.accept import TokenLogprobs

ROWS_AT_ONCE = 64  # a long prompt's rows, in float32, need not be in memory together


@dataclass(frozen=True, slots=True)
class Scored:
    """A token to give the log-probability of.

    Attributes:
        row: of the logits after which the token stands.
        num_top: how many of the most likely tokens to list.
    """

    row: int
    token: int
    num_top: int


def token_logprobs(logits: torch.Tensor, wanted: Sequence[Scored]) -> list[TokenLogprobs]:
    """Log-probabilities in float32 or better.

    Args:
        logits: `[M, V]`, any float type; tokens lie in 0 … V − 1.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        found += _some(logits, wanted[start : start + ROWS_AT_ONCE])
    return found


def _some(logits: torch.Tensor, wanted: Sequence[Scored]) -> list[TokenLogprobs]:
    device = logits.device
    rows = torch.tensor([one.row for one in wanted], device=device)
    tokens = torch.tensor([[one.token] for one in wanted], device=device)
    part = logits.index_select(0, rows)
    part = part if part.dtype == torch.float64 else part.float()
    whole = part.logsumexp(-1, keepdim=True)
    own: list[float] = (part.gather(1, tokens) - whole).squeeze(1).tolist()
    most = min(max(one.num_top for one in wanted), logits.shape[1])
    if most == 0:
        return [TokenLogprobs(value, []) for value in own]
    best, ids = part.topk(most, dim=-1)
    values = (best - whole).tolist()
    return [
        TokenLogprobs(value, _likeliest(top_ids, top, one.num_top))
        for value, top_ids, top, one in zip(own, ids.tolist(), values, wanted, strict=True)
    ]


def _likeliest(ids: list[int], logprobs: list[float], count: int) -> list[tuple[int, float]]:
    """The first `count`, by id where they are equally likely."""
    pairs = zip(ids[:count], logprobs[:count], strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
