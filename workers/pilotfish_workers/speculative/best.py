"""The most likely token of each row of logits, and why there is none."""

from __future__ import annotations

import torch

from pilotfish_workers.speculative.accept import BAD_LOGITS, NOTHING_ALLOWED


def best_tokens(logits: torch.Tensor) -> list[int]:
    """The argmax of each row of `[M, V]`: the lowest id on a tie, `BAD_LOGITS` where the row holds
    NaN or +inf, or nothing finite."""
    if logits.shape[0] == 0:
        return []
    # argmax ranks NaN highest, then +inf: if the best one is finite, all logits are usable
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised, which torch's is not: in half precision a copy included, it
        # takes a tenth of the time
        wide = logits if logits.dtype == torch.float64 else logits.float()
        ids = torch.from_numpy(wide.numpy().argmax(-1, keepdims=True))
    else:
        ids = logits.argmax(-1, keepdim=True)
    is_usable = logits.gather(1, ids).isfinite()
    found: list[int] = torch.where(is_usable, ids, BAD_LOGITS).squeeze(1).tolist()
    return found


def why_none(chained: torch.Tensor) -> int:
    """What stands for the token of a row `[V]` that has no best one after the chain:
    `NOTHING_ALLOWED` where the chain has left nothing, else `BAD_LOGITS`."""
    return NOTHING_ALLOWED if bool(chained.amax() == -torch.inf) else BAD_LOGITS
