"""Whether sampled output of a whole system has the law it should have, token after token.

`Reference` computes the law of every token of an output by definition: transformers' plain forward
pass in float64 over the tokens before it, then transformers' own processors, or a few lines of
torch where it has none. `p_value` and `evidence` say how well outputs and laws go together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pilotfish_broker.sampling import SamplingParams
from tests.law_kit import p_value as chi_square

Laws = list[NDArray[np.float64]]
Structure = Callable[[Sequence[int]], Iterable[int]]


class Counts(Protocol):
    """What records and results of jobs say of their rounds."""

    rounds: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class Samples:
    """What jobs of one kind have put out.

    Attributes:
        outputs: token ids, job by job.
        rounds, drafted, accepted: of all of them together.
    """

    outputs: list[list[int]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, output: list[int], counts: Counts) -> None:
        """Take in one job's output and its record or result."""
        self.outputs.append(output)
        self.rounds += counts.rounds
        self.drafted += counts.drafted
        self.accepted += counts.accepted

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs together."""
        return sum(map(len, self.outputs))


class Reference:
    """A model folder's next-token laws, by definition.

    Args:
        prompt: token ids that every output came after.
        structure: the tokens that may follow an output, for jobs that follow a structure.
    """

    def __init__(
        self, folder: Path, prompt: Sequence[int], structure: Structure | None = None
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._model: Any = model.eval()
        self._prompt = list(prompt)
        self._structure = structure

    def read(self, outputs: Sequence[Sequence[int]]) -> Reading:
        """What the model says of the places of these outputs' tokens."""
        longest, start = max(map(len, outputs)), len(self._prompt) - 1
        # what is put behind a shorter one changes nothing before it
        padded = [[*self._prompt, *output, *[0] * (longest - len(output))] for output in outputs]
        with torch.no_grad():
            logits = self._model(torch.tensor(padded)).logits
        rows = [row[start:][: len(one)] for row, one in zip(logits, outputs, strict=True)]
        eos = self._model.config.eos_token_id
        return Reading(outputs, torch.cat(rows), self._prompt, eos, self._structure)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A model's logits `[sum of T, V]` at the places of tokens, one output behind the other."""

    outputs: Sequence[Sequence[int]]
    logits: torch.Tensor
    prompt: list[int]
    eos: int
    structure: Structure | None

    def laws(self, params: SamplingParams) -> Laws:
        """For each output float64 `[T, V]`: the law of each of its tokens after those before."""
        laws = torch.softmax(self._chain(params), -1).numpy()
        return np.split(laws, np.cumsum([len(output) for output in self.outputs])[:-1])

    def _chain(self, params: SamplingParams) -> torch.Tensor:
        """The chain, in its order."""
        ids, scores = self._before(), self.logits
        bias = {(token,): value for token, value in params.logit_bias}
        if bias:
            scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
        if params.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
        if params.frequency_penalty or params.presence_penalty:
            counts = self._counts()
            scores = scores - params.frequency_penalty * counts
            scores = scores - params.presence_penalty * (counts > 0)
        if params.bad_words:
            words = [list(word) for word in params.bad_words if not isinstance(word, str)]
            scores = NoBadWordsLogitsProcessor(words, self.eos)(ids, scores)
        allowed = torch.ones_like(scores, dtype=torch.bool)
        if params.min_tokens:
            positions = [position for output in self.outputs for position in range(len(output))]
            allowed[:, self.eos] = torch.tensor(positions) >= params.min_tokens
        if params.allowed_token_ids is not None:
            forbidden = {*range(scores.shape[1])} - {*params.allowed_token_ids}
            allowed[:, [*forbidden]] = False
        if params.is_structured:
            allowed &= self._allowed_by_structure()
        scores = scores.masked_fill(~allowed, -math.inf)
        for is_wanted, warper, value in (
            (True, TemperatureLogitsWarper, float(params.temperature)),
            (params.top_k > 0, TopKLogitsWarper, params.top_k),
            (params.top_p < 1, TopPLogitsWarper, params.top_p),
            (params.min_p > 0, MinPLogitsWarper, params.min_p),
            (params.typical_p < 1, TypicalLogitsWarper, params.typical_p),
        ):
            if is_wanted:
                scores = warper(value)(ids, scores)
        return scores

    def _before(self) -> torch.Tensor:
        """Prompt and output before each place, all rows of one length: what is missing in front
        is the prompt's first token again, which changes no step."""
        longest = max(map(len, self.outputs))
        size = longest + len(self.prompt)
        windows = []
        for output in self.outputs:
            row = np.array([*self.prompt[:1] * longest, *self.prompt, *output])
            windows.append(np.lib.stride_tricks.sliding_window_view(row, size)[: len(output)])
        return torch.from_numpy(np.concatenate(windows))

    def _counts(self) -> torch.Tensor:
        """How often each token stands before each place in its output."""
        size = self.logits.shape[1]
        parts = []
        for output in self.outputs:
            seen = np.zeros((len(output) + 1, size))
            seen[np.arange(1, len(output) + 1), list(output)] = 1
            parts.append(seen[:-1].cumsum(0))
        return torch.from_numpy(np.concatenate(parts))

    def _allowed_by_structure(self) -> torch.Tensor:
        assert self.structure is not None
        allowed = torch.zeros_like(self.logits, dtype=torch.bool)
        places = [output[:end] for output in self.outputs for end in range(len(output))]
        for row, before in zip(allowed, places, strict=True):
            row[list(self.structure(before))] = True
        return allowed


def greedy(laws: Laws) -> Laws:
    """All of the probability on the likeliest token."""
    return [(law == law.max(-1, keepdims=True)).astype(float) for law in laws]


def repeated(outputs: Sequence[Sequence[int]], laws: Laws) -> Laws:
    """All of the probability on the token before."""
    again = [np.zeros_like(law) for law in laws]
    for output, law in zip(outputs, again, strict=True):
        law[np.arange(1, len(output)), list(output[:-1])] = 1
    return again


def p_value(outputs: Sequence[Sequence[int]], laws: Laws, favours: Sequence[Laws]) -> float:
    """That outputs of these laws look at least so odd; 0 where one has what cannot come.

    Each token becomes a number that is uniform on (0, 1) and independent of all before it, if the
    token's law is what it should be after those before it: a random point of the token's own part
    when the laws' probabilities are laid out one behind the other (Rosenblatt, "Remarks on a
    multivariate transformation", 1952). So outputs of any length and any history are samples of
    one joint law. Pearson's chi-square tests it in equal cells: of single tokens and of three
    consecutive ones, for each of `favours`; the least of the p-values counts, times their number.

    Args:
        favours: laws of which an error would have a trace, such as the drafter's: those tokens lie
            first that these make likelier than the laws do. The order changes nothing where the
            laws are right, and shows most where they are wrong in that direction.
    """
    tokens = np.array([token for output in outputs for token in output])
    p = np.concatenate(laws)
    if (p[np.arange(len(tokens)), tokens] == 0).any():
        return 0.0
    found = []
    for favour in favours:
        points = _points(tokens, p, np.concatenate(favour))
        found += [_in_cells(points, 1, 8), _in_cells(points, 3, 2)]
    return min(1.0, len(found) * min(found))


def _points(
    tokens: NDArray[np.int64], p: NDArray[np.float64], favour: NDArray[np.float64]
) -> NDArray[np.float64]:
    rows = np.arange(len(tokens))
    ratio = np.divide(favour, p, out=np.zeros_like(p), where=p > 0)
    order = np.argsort(-ratio, -1, kind="stable")
    reached = np.take_along_axis(p, order, -1).cumsum(-1)
    ends = reached[rows, (order == tokens[:, None]).argmax(-1)]
    return ends - np.random.default_rng(0).random(len(rows)) * p[rows, tokens]


def _in_cells(points: NDArray[np.float64], depth: int, parts: int) -> float:
    place = np.clip(points * parts, 0, parts - 1).astype(int)
    groups = place[: len(place) // depth * depth].reshape(-1, depth)
    cells = dict.fromkeys(itertools.product(range(parts), repeat=depth), parts**-depth)
    return chi_square(groups.tolist(), cells)


def evidence(outputs: Sequence[Sequence[int]], laws: Laws, others: Laws) -> float:
    """How many times likelier `laws` make the outputs than `others` do.

    Were `others` right, this number would be e or more with a probability of 1 / e at most (it is
    the end of a martingale with mean 1; Ville, 1939). At most e**700, which stands for more.
    """
    tokens = np.array([token for output in outputs for token in output])
    rows = np.arange(len(tokens))
    ours = np.concatenate(laws)[rows, tokens]
    theirs = np.concatenate(others)[rows, tokens]
    if (ours == 0).any():
        return 0.0
    if (theirs == 0).any():
        return math.exp(700)
    return math.exp(min(700.0, float(np.log(ours / theirs).sum())))
