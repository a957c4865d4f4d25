"""The rules that look at q: the draw behind accepted tokens, and tokens that came without q."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Case, Sampler
from tests.law_kit import ALPHA, PROMPT, Engine, Samples, Toy, expected, p_value

VOCAB = 12
NUM_SAMPLES = 1000
NUM_TOKENS = 3
TARGET, DRAFTER = Toy(1, 7), Toy(2, 7)
BY_LAW = pytest.mark.parametrize("rule", ["rejection", "block"])


def reference(
    p: np.ndarray, q: np.ndarray, drafted: Sequence[int], coins: Coins, base: int, rule: str
) -> tuple[int, int]:
    """A round by the papers' definitions, with whole laws: how many stand, and what follows.

    Args:
        p, q: float64 `[K + 1, V]` and `[K, V]`, the laws of target and drafter.
    """
    k = len(drafted)
    weights = [1.0]
    for index, token in enumerate(drafted):
        ratio = p[index, token] / q[index, token]
        weights.append(min(1.0, weights[-1] * ratio if rule == "block" else ratio))
    passes = []
    for index in range(1, k + 1):
        chance = weights[index]
        if rule == "block" and index < k:
            spare = np.maximum(0, chance * p[index] - q[index]).sum()
            chance = spare / (spare + 1 - chance) if spare else 0.0
        passes.append(coins.accept(base + index - 1, base) < chance)
    if rule == "block":
        kept = max((index for index, it_does in enumerate(passes, 1) if it_does), default=0)
    else:
        kept = [*passes, False].index(False)
    left = p[kept]
    if kept < k:
        scale = weights[kept] if rule == "block" else 1.0
        left = np.maximum(0, scale * p[kept] - q[kept])
    reached = left.cumsum()
    return kept, int(np.searchsorted(reached, coins.token(base + kept) * reached[-1], "right"))


@BY_LAW
def test_a_round_is_decided_as_its_definition_says(rule: str) -> None:
    """Many random rounds share passes; laws have few tokens or all, also such as p does not have,
    and one token that the drafter alone has."""
    random = np.random.default_rng(0)
    seen: Counter[tuple[int, int]] = Counter()
    params = SamplingParams.from_mapping(
        {"temperature": 1.0, "rule": rule, "allowed_token_ids": tuple(range(VOCAB - 2))}
    )
    for number in range(100):
        cases, wanted, rows = [], [], []
        for part in range(5):
            k, base = int(random.integers(0, 5)), int(random.integers(0, 4))
            logits = random.normal(0, 1.5, (k + 1, VOCAB)).astype(np.float32)
            p = np.exp(logits.astype(np.float64)) * (np.arange(VOCAB) < VOCAB - 2)
            p = np.append(p / p.sum(-1, keepdims=True), np.zeros((k + 1, 1)), 1)
            laws, q, drafted = [], np.zeros((k, VOCAB + 1)), []
            for index in range(k):
                near = p[index] + 0.02 + 0.05 * random.random(VOCAB + 1)
                ids = random.permutation(VOCAB + (index == k - 1))[: random.integers(3, 13)]
                law = SparseLaw(ids, near[ids].astype(np.float32))
                q[index, ids] = law.probabilities
                drafted.append(law.draw(random.random()))
                laws.append(law)
            coins = Coins(number, part)
            own = Sampler(params, coins, [*PROMPT, *[5] * base], len(PROMPT))
            cases.append(Case(own, drafted, laws))
            wanted.append(reference(p, q, drafted, coins, base, rule))
            rows.append(logits)
        logits = torch.from_numpy(np.concatenate(rows))
        counts = [len(case.drafted) + 1 for case in cases]
        outcomes = judge(logits, best_tokens(logits), cases, counts)
        found = [(one.num_accepted, one.token) for one in outcomes if one is not None]
        assert found == wanted
        seen.update((len(case.drafted), kept) for case, (kept, _) in zip(cases, found, strict=True))
    assert min(seen[k, kept] for k in range(5) for kept in range(k + 1)) > 3, seen


@BY_LAW
def test_the_token_behind_accepted_drafts_belongs_to_its_position(rule: str) -> None:
    """Not to the round: so a job that resumes in another round's middle goes on with it."""
    params = SamplingParams.from_mapping({"temperature": 1.0, "rule": rule})
    found = set()
    for seed in range(40):
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
        p = torch.softmax(logits.double(), -1).numpy()
        coins = Coins(seed)
        own = Sampler(params, coins, [*PROMPT, 5, 5], len(PROMPT))
        laws = [SparseLaw(np.arange(VOCAB), row.astype(np.float32)) for row in p[:3]]
        outcome = judge(logits, best_tokens(logits), [Case(own, (3, 4, 5), laws)], [4])[0]
        assert outcome is not None
        assert outcome.num_accepted == 3
        assert outcome.token == np.searchsorted(p[3].cumsum(), coins.token(2 + 3))
        found.add(outcome.token)
    assert len(found) > 5


class Bare(Engine):
    """Hands drafts in without their laws, as n-grams and greedy drafters do."""

    def report(self, case: Case) -> Case:
        return replace(case, laws=None)


class EvenOdds(Engine):
    """Says that each drafted token might as well have been its neighbour."""

    def report(self, case: Case) -> Case:
        laws = [
            SparseLaw(np.array([token, (token + 1) % 7]), np.ones(2, np.float32))
            for token in case.drafted
        ]
        return replace(case, laws=laws)


@BY_LAW
def test_tokens_without_laws_are_judged_as_certain(rule: str) -> None:
    """Chi-square over NUM_SAMPLES outputs, whose drafts are the drafter's argmax."""
    params = SamplingParams.from_mapping({"temperature": 1.0, "rule": rule})
    laws = expected(TARGET, params, NUM_TOKENS)

    def samples(kind: type[Engine]) -> Samples:
        return kind(TARGET, DRAFTER, params, SamplingParams()).sample(NUM_SAMPLES, NUM_TOKENS)

    certain = samples(Bare)
    assert certain.num_accepted > NUM_SAMPLES / 10
    assert p_value(certain.outputs, laws) > ALPHA
    assert p_value(samples(EvenOdds).outputs, laws) < ALPHA
