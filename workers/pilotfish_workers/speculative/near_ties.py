"""Which choices of the target rounding may have decided.

In half precision a row's logits depend, in their last bits, on the shape of the pass that computed
them. Where the two best candidates are that close, another run may choose the other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["NUM_STEPS", "is_rounded", "leads", "resolutions"]

NUM_STEPS = 2
"""Steps of the dtype, at the chosen logit, that count as near."""


def is_rounded(logits: torch.Tensor) -> bool:
    """Whether the logits are in half precision; in float32 runs agree in practice."""
    return logits.dtype in (torch.bfloat16, torch.float16)


def leads(scores: torch.Tensor) -> list[float]:
    """How far the best score of each row `[n, V]` is above the second."""
    if scores.shape[1] == 1:
        return [math.inf] * scores.shape[0]
    if scores.device.type != "cpu":
        best = scores.topk(2, dim=-1).values.double()
        found: list[float] = (best[:, 0] - best[:, 1]).tolist()
        return found
    # two vectorised searches for the largest cost a twentieth of torch's selection
    entries = scores.to(torch.float32, copy=True).numpy()
    rows = np.arange(entries.shape[0])
    first = entries.argmax(-1)
    largest = entries[rows, first]
    entries[rows, first] = -np.inf
    ahead: list[float] = (largest - entries[rows, entries.argmax(-1)]).tolist()
    return ahead


def resolutions(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """What `NUM_STEPS` of the dtype are at the logit `[M, V]` of each token in its row."""
    index = torch.tensor([[row, token] for row, token in zip(rows, tokens, strict=True)])
    index = index.reshape(-1, 2).to(logits.device)
    chosen = logits[index[:, 0], index[:, 1]].double().abs()
    found: list[float] = (chosen * NUM_STEPS * torch.finfo(logits.dtype).eps).tolist()
    return found
