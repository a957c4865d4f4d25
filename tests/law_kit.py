"""Whether sampled output has the law it should have: toy models, exact laws, a chi-square test.

A toy's logits depend on the last two tokens. `expected` multiplies probabilities that are computed
here from the definitions of the parameters, in float64 and token by token; `Engine` runs whole
rounds of drafting and judging.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.draw import draw_tokens
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Case, Draw, Sampler

ALPHA = 1e-6
FEWEST = 5
"""Expected samples in a cell of the chi-square test; what has fewer is merged."""
PROMPT = (1, 2)


class Toy:
    """A model: a float32 table of logits `[V, V, V]` by the last two tokens."""

    def __init__(self, seed: int, vocab_size: int, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, vocab_size, vocab_size)
        self.vocab_size = vocab_size
        self.table = torch.randn(shape, generator=generator) * spread

    def logits(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[n, V]`, after each of n contexts of at least two tokens."""
        last = torch.tensor([context[-2:] for context in contexts]).clamp(max=self.vocab_size - 1)
        return self.table[last[:, 0], last[:, 1]]


class Unlike:
    """A constraint: no token comes twice in a row, and none that is two less than the last one.

    Behind a token that is not allowed its masks allow nothing.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def allows(self, output: Sequence[int]) -> list[int]:
        last = output[-1] if output else 0
        return [t for t in range(self.vocab_size) if t not in (last, last - 2)]

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        rows = np.zeros((len(drafted) + 1, -(-self.vocab_size // 32)), dtype=np.int32)
        for index in range(len(drafted) + 1):
            for token in self.allows([*output, *drafted[:index]]):
                rows[index, token // 32] |= 1 << token % 32
            if index < len(drafted) and not rows[index, 0] >> drafted[index] & 1:
                break
        return rows

    def rewind(self) -> None: ...


STOP_IDS = (0, 3)
"""Tokens that may not come before `min_tokens`."""


def law(
    logits: torch.Tensor,
    params: SamplingParams,
    output: Sequence[int],
    constraint: Unlike | None = None,
) -> np.ndarray:
    """p by the definitions: float64 `[V]` from one row of logits."""
    x = _penalised(logits.double().numpy().copy(), params, output)
    x[_forbidden(len(x), params, output, constraint)] = -np.inf
    x = x / params.temperature
    if params.top_k:
        x[x < np.sort(x)[::-1][min(params.top_k, len(x)) - 1]] = -np.inf
    x = _keep(x, np.argsort(-x, kind="stable"), params.top_p)
    p = _softmax(x)
    x[p < params.min_p * p.max()] = -np.inf
    if params.typical_p < 1:
        p = _softmax(x)
        surprise = -np.log(np.where(p > 0, p, 1.0))
        distance = np.where(p > 0, np.abs(surprise - (p * surprise).sum()), np.inf)
        x = _keep(x, np.argsort(distance, kind="stable"), params.typical_p)
    return _softmax(x)


def _penalised(x: np.ndarray, params: SamplingParams, output: Sequence[int]) -> np.ndarray:
    for token, value in params.logit_bias:
        x[token] += value
    for token in {*PROMPT, *output}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def _forbidden(
    size: int, params: SamplingParams, output: Sequence[int], constraint: Unlike | None
) -> list[int]:
    text = (*PROMPT, *output)
    found = {
        int(word[-1]) for word in params.bad_words if text[len(text) - len(word) + 1 :] == word[:-1]
    }
    if len(output) < params.min_tokens:
        found |= {*STOP_IDS}
    if params.allowed_token_ids is not None:
        found |= {*range(size)} - {*params.allowed_token_ids}
    if constraint is not None:
        found |= {*range(size)} - {*constraint.allows(output)}
    return sorted(found)


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def _keep(x: np.ndarray, order: np.ndarray, share: float) -> np.ndarray:
    """The first tokens in an order whose probabilities reach a share."""
    if share >= 1:
        return x
    before = np.cumsum(_softmax(x)[order]) - _softmax(x)[order]
    x[order[before >= share]] = -np.inf
    return x


def expected(
    target: Toy, params: SamplingParams, length: int, constraint: Unlike | None = None
) -> dict[tuple[int, ...], float]:
    """The probability of every output of `length` tokens."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for output, probability in laws.items():
            if probability == 0:
                continue
            p = law(target.logits([(*PROMPT, *output)])[0], params, output, constraint)
            longer |= {(*output, token): probability * p[token] for token in range(len(p))}
        laws = longer
    return {output: probability for output, probability in laws.items() if probability > 0}


@dataclass
class Samples:
    """What was drawn."""

    outputs: list[list[int]]
    num_accepted: int = 0
    num_rounds: int = 0


@dataclass
class Engine:
    """Runs rounds of drafting and judging; a test overrides what it plants a fault in.

    Attributes:
        ks: how many tokens are drafted, by sequence and round.
    """

    target: Toy
    drafter: Toy
    params: SamplingParams
    draft_params: SamplingParams | None = None
    coins: Callable[[int], Coins] = Coins
    ks: Sequence[int] = (2, 0, 3, 1, 4)
    constraint: Unlike | None = None
    draft_constraint: Unlike | None = None

    def sample(self, count: int, length: int) -> Samples:
        """`count` outputs of at least `length` tokens; number i has the seed i."""
        samplers, drafters = [], []
        for seed in range(count):
            tokens, coins = list(PROMPT), self.coins(seed)
            draft_params = self.draft_params or self.params
            samplers.append(self.sampler(self.params, coins, tokens, self.constraint))
            drafters.append(self.sampler(draft_params, coins, tokens, self.draft_constraint))
        samples = Samples([])
        for number in itertools.count():
            active = [i for i in range(count) if samplers[i].position < length]
            if not active:
                break
            ks = [self.ks[(i + number) % len(self.ks)] for i in active]
            drafted, laws = self.draft([drafters[i] for i in active], ks)
            cases = [
                self.report(Case(samplers[i], *one))
                for i, one in zip(active, zip(drafted, laws, strict=True), strict=True)
            ]
            for case, outcome in zip(cases, self.judge(cases), strict=True):
                case.sampler.tokens.extend(outcome.tokens(case.drafted))
                samples.num_accepted += outcome.num_accepted
                samples.num_rounds += 1
        samples.outputs = [sampler.tokens[len(PROMPT) :] for sampler in samplers]
        return samples

    @staticmethod
    def sampler(
        params: SamplingParams, coins: Coins, tokens: list[int], constraint: Unlike | None = None
    ) -> Sampler:
        """Of one side of one sequence."""
        words = tuple(tuple(int(token) for token in word) for word in params.bad_words)
        return Sampler(params, coins, tokens, len(PROMPT), STOP_IDS, words, constraint)

    def draft(
        self, samplers: Sequence[Sampler], ks: Sequence[int]
    ) -> tuple[list[list[int]], list[list[SparseLaw]]]:
        """Draft for every sequence, one pass a token; a token that the target lacks is the last."""
        drafted: list[list[int]] = [[] for _ in samplers]
        laws: list[list[SparseLaw]] = [[] for _ in samplers]
        for step in range(max(ks)):
            active = [
                i
                for i, k in enumerate(ks)
                if step < k and (not drafted[i] or drafted[i][-1] < self.target.vocab_size)
            ]
            if not active:
                break
            draws = [Draw(samplers[i], tuple(drafted[i])) for i in active]
            logits = self.drafter.logits([samplers[i].tokens + drafted[i] for i in active])
            for i, drawn in zip(active, draw_tokens(logits, draws), strict=True):
                drafted[i].append(drawn.token)
                laws[i].append(drawn.law or SparseLaw.certain(drawn.token))
        return drafted, laws

    def report(self, case: Case) -> Case:
        """What reaches the target of a draft."""
        return case

    def judge(self, cases: Sequence[Case]) -> list[Outcome]:
        """One pass of the target."""
        contexts = [
            [*case.sampler.tokens, *case.drafted[:index]]
            for case in cases
            for index in range(len(case.drafted) + 1)
        ]
        logits = self.target.logits(contexts)
        counts = [len(case.drafted) + 1 for case in cases]
        outcomes = judge(logits, best_tokens(logits), cases, counts)
        return [outcome for outcome in outcomes if outcome is not None]


def p_value(outputs: Sequence[Sequence[int]], laws: dict[tuple[int, ...], float]) -> float:
    """That outputs of these laws look at least so odd: Pearson's chi-square, rare ones merged."""
    length = len(next(iter(laws)))
    seen = Counter(tuple(output[:length]) for output in outputs)
    if any(output not in laws for output in seen):
        return 0.0
    cells: list[tuple[float, int]] = []
    rare = (0.0, 0)
    for output, probability in laws.items():
        cell = (probability * len(outputs), seen[output])
        if cell[0] < FEWEST:
            rare = (rare[0] + cell[0], rare[1] + cell[1])
        else:
            cells.append(cell)
    if rare[0] >= FEWEST:
        cells.append(rare)
    elif rare[0]:
        cells[0] = (cells[0][0] + rare[0], cells[0][1] + rare[1])
    if len(cells) < 2:
        raise ValueError("one cell shows nothing")
    statistic = sum((found - wanted) ** 2 / wanted for wanted, found in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
