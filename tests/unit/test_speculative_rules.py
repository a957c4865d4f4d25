"""Both rules leave the output's law at the target's, exactly: all drafts and coins are summed up.

For toy models of three tokens each drafted sequence is taken with its probability and each coin
with that of either side, so that a round's law comes out as a number and not as a sample.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pilotfish_workers.speculative.rules import Verdict, block, rejection

NUM_TOKENS = 3
SEEDS = range(6)
KS = range(4)
EXACT = 1e-12
WRONG = 1e-3
"""A fault that moves no probability by more than this in any of the toys was not planted well."""


@dataclass(frozen=True)
class Toys:
    """A target of NUM_TOKENS tokens and a drafter that may have one more."""

    seed: int
    num_drafter: int = NUM_TOKENS
    is_same: bool = False

    def p(self, prefix: Sequence[int]) -> np.ndarray:
        return _law((self.seed, 1, *prefix), NUM_TOKENS)

    def q(self, prefix: Sequence[int]) -> np.ndarray:
        return self.p(prefix) if self.is_same else _law((self.seed, 2, *prefix), self.num_drafter)

    def p_of(self, prefix: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        """p of some tokens; 0 for one that the target does not have."""
        return np.append(self.p(prefix), 0.0)[list(ids)]

    def drafts(self, k: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Each sequence that may be drafted with its probability. It has k tokens, but that it
        ends with a token which the target does not have, and sometimes after two equal ones."""
        growing: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        while growing:
            tokens, probability = growing.pop()
            ends = tokens[-1:] == (NUM_TOKENS,) or (self.seed % 2 and len({*tokens[-2:]}) == 1 < k)
            if len(tokens) == k or (tokens and ends):
                yield tokens, probability
                continue
            for token in np.flatnonzero(self.q(tokens)):
                growing.append(((*tokens, int(token)), probability * self.q(tokens)[token]))


@functools.cache
def _law(key: tuple[int, ...], size: int) -> np.ndarray:
    random = np.random.default_rng(key)
    weights = random.exponential(size=size) ** 2
    weights[random.random(size) < 0.2] = 0  # what top_p and the like leave out
    weights[random.integers(size)] += 0.1
    law: np.ndarray = weights / weights.sum()
    return law


class Script:
    """Coins that fall as they are told, and how probable it is that they do."""

    def __init__(self, sides: Sequence[bool]) -> None:
        self.sides = sides
        self.asked: dict[int, float] = {}

    def coin(self, index: int) -> Any:
        return _Side(self, index)

    @property
    def probability(self) -> float:
        shares = [p if self.sides[index] else 1 - p for index, p in self.asked.items()]
        # of the scripts that differ only where nobody looks, one stands for all
        is_first = all(self.sides[i] for i in range(len(self.sides)) if i not in self.asked)
        return float(np.prod(shares)) if is_first else 0.0


@dataclass(frozen=True)
class _Side:
    """A coin in a comparison: `coin * factor < bound`."""

    script: Script
    index: int
    factor: float = 1.0

    def __mul__(self, factor: float) -> _Side:
        return replace(self, factor=self.factor * factor)

    def __lt__(self, bound: float) -> bool:
        share = bound / self.factor if bound < self.factor else 1.0 if self.factor else 0.0
        self.script.asked[self.index] = share
        return self.script.sides[self.index]

    def __ge__(self, bound: float) -> bool:
        return not self < bound


Judge = Callable[[Toys, Sequence[int], Callable[[int], Any]], Verdict]
After = Callable[[Toys, Sequence[int], Verdict], np.ndarray]


def by_rejection(toys: Toys, drafted: Sequence[int], coin: Callable[[int], Any]) -> Verdict:
    return rejection(*_of_tokens(toys, drafted), coin)


def by_block(toys: Toys, drafted: Sequence[int], coin: Callable[[int], Any]) -> Verdict:
    laws = [toys.q(drafted[:index]) for index in range(len(drafted))]
    supports = [np.flatnonzero(law) for law in laws]
    return block(
        *_of_tokens(toys, drafted),
        [toys.p_of(drafted[:index], ids.tolist()) for index, ids in enumerate(supports)],
        [law[ids] for law, ids in zip(laws, supports, strict=True)],
        coin,
    )


def _of_tokens(toys: Toys, drafted: Sequence[int]) -> tuple[list[float], list[float]]:
    """p and q of each drafted token."""
    places = [(drafted[:index], token) for index, token in enumerate(drafted)]
    return (
        [float(toys.p_of(prefix, [token])[0]) for prefix, token in places],
        [float(toys.q(prefix)[token]) for prefix, token in places],
    )


def law_after(toys: Toys, drafted: Sequence[int], verdict: Verdict) -> np.ndarray:
    """The law of the token after the accepted ones, as `Verdict` defines it."""
    prefix = drafted[: verdict.num_accepted]
    if verdict.scale is None:
        return toys.p(prefix)
    left = np.maximum(0, verdict.scale * toys.p(prefix) - toys.q(prefix)[:NUM_TOKENS])
    law: np.ndarray = left / left.sum() if left.sum() > 0 else toys.p(prefix)
    return law


def verdicts(judge: Judge, toys: Toys, k: int) -> Iterator[tuple[tuple[int, ...], Verdict, float]]:
    """All that can happen in a round: drafted tokens, verdict, probability."""
    for drafted, probability in toys.drafts(k):
        for sides in itertools.product((True, False), repeat=len(drafted)):
            script = Script(sides)
            verdict = judge(toys, drafted, script.coin)
            if script.probability > 0:
                yield drafted, verdict, probability * script.probability


def error(judge: Judge, toys: Toys, k: int, after: After = law_after) -> float:
    """How far the first k + 1 tokens' joint law is from the target's; what the round leaves open
    the target draws by itself."""
    found: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for drafted, verdict, probability in verdicts(judge, toys, k):
        kept = drafted[: verdict.num_accepted]
        for token, share in enumerate(after(toys, drafted, verdict)):
            found[*kept, token] += probability * share
    for length in range(1, k + 1):
        for output in [output for output in found if len(output) == length]:
            probability = found.pop(output)
            for token, share in enumerate(toys.p(output)):
                found[*output, token] += probability * share
    wanted = {(): 1.0}
    for _ in range(k + 1):
        wanted = {
            (*output, token): probability * share
            for output, probability in wanted.items()
            for token, share in enumerate(toys.p(output))
        }
    return max(abs(found[output] - wanted.get(output, 0.0)) for output in {*found, *wanted})


def toys_of(seed: int) -> list[Toys]:
    return [Toys(seed), Toys(seed, NUM_TOKENS + 1), Toys(seed, is_same=True)]


@pytest.mark.parametrize("judge", [by_rejection, by_block])
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_law_of_a_round_is_the_targets(judge: Judge, k: int, seed: int) -> None:
    for toys in toys_of(seed):
        assert sum(share for *_, share in verdicts(judge, toys, k)) == pytest.approx(1)
        assert error(judge, toys, k) < EXACT


@pytest.mark.parametrize("judge", [by_rejection, by_block])
@pytest.mark.parametrize("k", KS)
def test_equal_laws_reject_nothing(judge: Judge, k: int) -> None:
    for seed in SEEDS:
        for drafted, verdict, share in verdicts(judge, Toys(seed, is_same=True), k):
            assert verdict == Verdict(len(drafted), None) or share < EXACT


def accepted(judge: Judge, toys: Toys, k: int) -> float:
    return sum(verdict.num_accepted * share for _, verdict, share in verdicts(judge, toys, k))


def test_block_accepts_at_least_as_many_and_more_of_long_drafts() -> None:
    for toys in [toys for seed in SEEDS for toys in toys_of(seed)]:
        for k in KS:
            assert accepted(by_block, toys, k) >= accepted(by_rejection, toys, k) - EXACT
    gains = [accepted(by_block, Toys(s), 3) / accepted(by_rejection, Toys(s), 3) for s in SEEDS]
    assert max(gains) > 1.02
    assert accepted(by_block, Toys(0), 1) == pytest.approx(accepted(by_rejection, Toys(0), 1))


def _never_recovers(toys: Toys, drafted: Sequence[int], verdict: Verdict) -> np.ndarray:
    return toys.p(drafted[: verdict.num_accepted])


def _recovers_unscaled(toys: Toys, drafted: Sequence[int], verdict: Verdict) -> np.ndarray:
    return law_after(toys, drafted, replace(verdict, scale=verdict.scale and 1.0))


def _recovers_by_the_wrong_q(toys: Toys, drafted: Sequence[int], verdict: Verdict) -> np.ndarray:
    index = verdict.num_accepted
    if verdict.scale is None or index == 0:
        return law_after(toys, drafted, verdict)
    left = np.maximum(0, verdict.scale * toys.p(drafted[:index]) - toys.q(drafted[: index - 1]))
    law: np.ndarray = left / left.sum() if left.sum() > 0 else toys.p(drafted[:index])
    return law


def _bonus_of_the_row_before(toys: Toys, drafted: Sequence[int], verdict: Verdict) -> np.ndarray:
    if verdict.scale is None and drafted:
        return toys.p(drafted[:-1])
    return law_after(toys, drafted, verdict)


def _takes_what_is_likelier(
    toys: Toys, drafted: Sequence[int], coin: Callable[[int], Any]
) -> Verdict:
    for index, (p, q) in enumerate(zip(*_of_tokens(toys, drafted), strict=True)):
        if p < q:
            return Verdict(index, 1.0)
    return Verdict(len(drafted), None)


def _ratio_upside_down(toys: Toys, drafted: Sequence[int], coin: Callable[[int], Any]) -> Verdict:
    p, q = _of_tokens(toys, drafted)
    return rejection(q, [max(one, EXACT) for one in p], coin)


def _block_by_weights_alone(
    toys: Toys, drafted: Sequence[int], coin: Callable[[int], Any]
) -> Verdict:
    length, scale, weight = 0, 1.0, 1.0
    for index, (p, q) in enumerate(zip(*_of_tokens(toys, drafted), strict=True)):
        weight = min(1.0, weight * p / q)
        if coin(index) < weight:
            length, scale = index + 1, weight
    return Verdict(length, None if length == len(drafted) else scale)


def _cuts_what_the_target_lacks(judge: Judge) -> Judge:
    def cutting(toys: Toys, drafted: Sequence[int], coin: Callable[[int], Any]) -> Verdict:
        return judge(toys, [token for token in drafted if token < NUM_TOKENS], coin)

    return cutting


FAULTS: dict[str, tuple[Judge, After]] = {
    "rejection without a residual": (by_rejection, _never_recovers),
    "block without a residual": (by_block, _never_recovers),
    "rejection with q of the row before": (by_rejection, _recovers_by_the_wrong_q),
    "block with q of the row before": (by_block, _recovers_by_the_wrong_q),
    "block without the scale": (by_block, _recovers_unscaled),
    "rejection with the bonus of the row before": (by_rejection, _bonus_of_the_row_before),
    "block with the bonus of the row before": (by_block, _bonus_of_the_row_before),
    "no coin": (_takes_what_is_likelier, law_after),
    "q / p": (_ratio_upside_down, law_after),
    "block by its weights alone": (_block_by_weights_alone, law_after),
    "rejection of all but foreign tokens": (_cuts_what_the_target_lacks(by_rejection), law_after),
    "block of all but foreign tokens": (_cuts_what_the_target_lacks(by_block), law_after),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_sum_sees_a_planted_fault(fault: str) -> None:
    judge, after = FAULTS[fault]
    toys = Toys(4, NUM_TOKENS + ("foreign" in fault))
    assert error(judge, toys, 3, after) > WRONG


def test_a_certain_draft_is_taken_with_the_targets_probability() -> None:
    """A greedy drafter's q is one-hot, and what is rejected cannot come back."""
    assert rejection([0.3], [1.0], lambda _: 0.2999) == Verdict(1, None)
    assert rejection([0.3], [1.0], lambda _: 0.3) == Verdict(0, 1.0)
    one = np.ones(1)
    coins = iter([0.9, 0.2])
    # two certain tokens, together as probable as 0.5 · 0.6
    verdict = block(
        [0.5, 0.6], [1.0, 1.0], [0.5 * one, 0.6 * one], [one, one], lambda _: next(coins)
    )
    assert verdict == Verdict(2, None)


def test_nothing_behind_a_token_that_cannot_come_is_looked_at() -> None:
    """The rows behind it may hold anything."""
    nan = float("nan")
    odd = np.array([nan])

    def coin(index: int) -> float:
        assert index == 0
        return 1e-16

    assert rejection([0.0, nan], [0.5, nan], coin) == Verdict(0, 1.0)
    assert block([0.0, nan], [0.5, nan], [odd, odd], [odd, odd], coin) == Verdict(0, 1.0)
