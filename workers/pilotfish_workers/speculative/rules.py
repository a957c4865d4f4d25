"""Which drafted tokens stand where output is sampled, and what law the next token has.

p is the target's law after the whole chain, q the law that a drafted token was really drawn from.
Both rules leave the output's law at p whatever q is; all numbers are float64. (`coupled` has no
test of its own: the target draws, and a drafted token stands if it is what was drawn. See
`gumbel.py`.)

How many tokens are judged may depend on those before them, never on one that is left out: to leave
a token out for what it is would change the law. A token that p does not have is judged like any
other, and rejected. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Coin = Callable[[int], float]
"""The coin, in (0, 1), for the test of the i-th drafted token."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decides.

    Attributes:
        num_accepted: leading drafted tokens that stand.
        scale: the next token has the law norm(max(0, scale · p − q)) of its row; None where all
            drafted tokens stand and the next one has the law p.
    """

    num_accepted: int
    scale: float | None


def rejection(p: Sequence[float], q: Sequence[float], coin: Coin) -> Verdict:
    """Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1: each token by itself.

    Args:
        p: K probabilities, p of each drafted token.
        q: K probabilities, q of the same tokens; above 0, since they were drawn.
    """
    for index, (ours, theirs) in enumerate(zip(p, q, strict=True)):
        if coin(index) * theirs >= ours:  # with probability 1 − min(1, p / q)
            return Verdict(index, 1.0)
    return Verdict(len(p), None)


def block(
    p: Sequence[float],
    q: Sequence[float],
    p_support: Sequence[NDArray[np.float64]],
    q_support: Sequence[NDArray[np.float64]],
    coin: Coin,
) -> Verdict:
    """Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444,
    algorithm 2: the longest prefix that passes its test, whatever shorter ones did.

    With wᵢ = min(1, wᵢ₋₁ · p / q) of the i-th token and w₀ = 1, a prefix of i tokens passes with
    probability Rᵢ / (Rᵢ + 1 − wᵢ), where Rᵢ is the sum over the vocabulary of max(0, wᵢ · p − q)
    after it; the prefix of all K passes with probability w_K. So the longest has at least i tokens
    with probability wᵢ, given the first i. After i < K tokens the next one has the law
    norm(max(0, wᵢ · p − q)).

    Args:
        p: K probabilities, p of each drafted token.
        q: K probabilities, q of the same tokens; above 0, since they were drawn.
        p_support: for each drafted token `[m]`, p of every token that q has there.
        q_support: the same of q.
    """
    length, scale, weight = 0, 1.0, 1.0
    for index, (ours, theirs) in enumerate(zip(p, q, strict=True)):
        weight = 1.0 if weight * ours >= theirs else weight * ours / theirs
        if weight == 0:
            break  # no longer prefix can pass; the rows behind may hold nothing of meaning
        if index + 1 == len(p):
            passes = coin(index) < weight
        else:
            spare = _spare(weight, p_support[index + 1], q_support[index + 1])
            # where both are 0 a longer prefix passes for certain, and this one need not
            passes = coin(index) * (spare + 1 - weight) < spare
        if passes:
            length, scale = index + 1, weight
    return Verdict(length, None if length == len(p) else scale)


def _spare(weight: float, p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """The sum over the vocabulary of max(0, weight · p − q)."""
    outside = max(0.0, 1.0 - float(p.sum()))  # where q is 0
    return weight * outside + float(np.maximum(0.0, weight * p - q).sum())
