"""How `coupled` draws: the Gumbel-max trick, with noise that drafter and target share.

Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative
decoding", arXiv 2408.07978: argmax over tokens of log p + G, with G = −log(−log u) for a uniform u
of each token, has the law p. Where both sides take the same noise, they often draw the same token;
and what the target draws does not depend on the drafter at all.
"""

from __future__ import annotations

import math

import torch

from pilotfish_workers.speculative.coins import Coins


def gumbel_argmax(logits: torch.Tensor, coins: Coins, position: int) -> tuple[int, float]:
    """The token at an output position.

    Args:
        logits: `[V]`, any float type; −inf where a token cannot come, at least one is finite.

    Returns:
        the token, computed in float64, the lowest id on a tie; and how far it was ahead of the
        next best one.
    """
    noise = torch.from_numpy(coins.noise(position, logits.shape[0]))
    if logits.device.type == "cpu":
        # logarithms are most of the cost; after top_p few tokens are left to take them of
        left = logits.isfinite().nonzero().squeeze(1)
        if 2 * left.shape[0] < logits.shape[0]:
            place, lead = _best(logits[left], noise[left])
            return int(left[place]), lead
    return _best(logits, noise)


def _best(logits: torch.Tensor, noise: torch.Tensor) -> tuple[int, float]:
    waiting = noise.to(logits.device).log_().neg_().log_()  # −G
    score = torch.sub(logits.double(), waiting, out=waiting)
    place = _argmax(score)
    best = float(score[place])
    score[place] = -math.inf
    return place, best - float(score[_argmax(score)])


def _argmax(score: torch.Tensor) -> int:
    if score.device.type == "cpu":
        return int(score.numpy().argmax())  # vectorised, which torch's is not
    return int(score.argmax())
