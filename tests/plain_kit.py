"""What jobs must get, by definition: the target's plain forward pass over the whole text, one token
at a time, then transformers' processors, then the argmax, or a draw with the documented numbers.

Nothing here is shared with the workers. Those draw with the same numbers from logits that differ in
their last bits, so every choice is made twice, the second time from logits that are a little off:
an output that hangs on less than that would prove nothing, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pilotfish import SamplingParams
from tests.reference_kit import Line

OFF = 1e-4
"""Standard deviation of what is added to logits; float32 errors are a tenth of that at most."""

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Language:
    """The texts that a structured output may be.

    Attributes:
        begins: whether a text begins one of them.
        is_whole: whether it is one.
    """

    begins: Callable[[str], bool]
    is_whole: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Ask:
    """A sample of a job.

    Attributes:
        prompt: token ids.
        language: what the parameters' `regex`, `grammar` or `json_schema` stands for.
    """

    prompt: list[int]
    params: SamplingParams
    sample: int = 0
    language: Language | None = None


class PlainDecoding:
    """Outputs of a model folder, of as many tokens as the parameters allow.

    Args:
        asks: by name; all prompts are of one length, so that they run side by side unpadded.
    """

    def __init__(self, folder: Path, asks: dict[str, Ask]) -> None:
        self.folder = folder
        self._asks = asks
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._model: Any = model.eval()
        self._eos: int = model.config.eos_token_id
        self.vocab_size: int = model.config.vocab_size
        self._texts = [self._tokenizer.decode([token]) for token in range(self.vocab_size)]
        for token in self._tokenizer.all_special_ids:
            self._texts[token] = ""
        self.outputs: dict[str, list[int]] = {name: [] for name in asks}
        self._decode()

    def line(self, name: str, limit: int | None = None) -> Line:
        """The answer to a job; with a smaller limit too, which nobody knows in advance."""
        ask = self._asks[name]
        max_tokens = limit or ask.params.max_tokens
        tokens = self.outputs[name][:max_tokens]
        has_ended = tokens[-1] in self._ends(ask.params)
        assert has_ended or len(tokens) == max_tokens, "the reference is shorter"
        shown = tokens[:-1] if has_ended else tokens
        return Line(
            custom_id=name,
            source=ask.prompt,
            prompt=ask.prompt,
            max_tokens=max_tokens,
            tokens=tokens,
            text=self._tokenizer.decode(
                shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            reason="stop" if has_ended else "length",
            ignore_eos=ask.params.ignore_eos,
        )

    def logits(self, tokens: list[list[int]]) -> torch.Tensor:
        """float64 `[n, T, V]` after each token of n texts of one length."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor(tokens), use_cache=False).logits
        return logits

    def _ends(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *(() if params.ignore_eos else (self._eos,))}

    def explains(self, ask: Ask, output: list[int]) -> bool:
        """Whether each token is the one that comes after those before it."""
        rows = self.logits([ask.prompt + output])[0, len(ask.prompt) - 1 : -1]
        chain = self._chain(ask)
        return all(
            self._choose(ask, chain, output[:position], row) == output[position]
            for position, row in enumerate(rows)
        )

    def _decode(self) -> None:
        chains = {name: self._chain(ask) for name, ask in self._asks.items()}
        going = list(self._asks)
        while going:
            rows = self.logits([self._asks[name].prompt + self.outputs[name] for name in going])
            for name, row in zip(going, rows[:, -1], strict=True):
                output = self.outputs[name]
                output.append(self._choose(self._asks[name], chains[name], output, row))
            going = [name for name in going if not self._has_ended(name)]

    def _has_ended(self, name: str) -> bool:
        params, output = self._asks[name].params, self.outputs[name]
        return output[-1] in self._ends(params) or len(output) == params.max_tokens

    def _choose(self, ask: Ask, chain: list[Step], output: list[int], row: torch.Tensor) -> int:
        """The token after an output, from the model's logits `[V]` there."""
        assert not row.isnan().any()
        text = torch.tensor([ask.prompt + output])
        off = np.random.default_rng(len(output)).normal(scale=OFF, size=self.vocab_size)
        found = set()
        for logits in (row, row + torch.from_numpy(off)):
            scores = logits[None].clone()
            for step in chain:
                scores = step(text, scores)
            if ask.params.temperature > 0:
                assert ask.params.seed is not None
                u = uniforms(ask.params.seed, ask.sample, len(output), self.vocab_size)
                scores = scores - torch.from_numpy(np.log(-np.log(u)))
            found.add(int(scores[0].argmax()))
        assert len(found) == 1, f"it hangs on a hair at {len(output)}: take another seed"
        return found.pop()

    def _chain(self, ask: Ask) -> list[Step]:
        """The documented steps in their order; only those that are asked for."""
        params, ends = ask.params, sorted(self._ends(ask.params))
        start = len(ask.prompt)
        chain: list[Step] = []
        if params.logit_bias:
            chain.append(SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias}))
        if params.repetition_penalty != 1:
            chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            chain.append(counted(params, start))
        if params.bad_words:
            words = [list(word) for word in params.bad_words if not isinstance(word, str)]
            chain.append(NoBadWordsLogitsProcessor(words, ends))
        if params.min_tokens and ends:
            chain.append(MinNewTokensLengthLogitsProcessor(start, params.min_tokens, ends))
        if params.allowed_token_ids is not None:
            allowed = list(params.allowed_token_ids)
            chain.append(lambda ids, scores: only(allowed, scores))
        if (language := ask.language) is not None:
            chain.append(lambda ids, scores: only(self._next(language, ids[0, start:]), scores))
        return chain + (warpers(params) if params.temperature > 0 else [])

    def _next(self, language: Language, output: torch.Tensor) -> list[int]:
        """The tokens with which a text of the language may go on, or end."""
        text = "".join(self._texts[token] for token in output.tolist())
        pieces = enumerate(self._texts)
        going_on = (token for token, piece in pieces if piece and language.begins(text + piece))
        return [*going_on, *([self._eos] if language.is_whole(text) else [])]


def warpers(params: SamplingParams) -> list[Step]:
    """What shapes the law at last."""
    chain: list[Step] = [TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        chain.append(TypicalLogitsWarper(params.typical_p))
    return chain


def uniforms(seed: int, sample: int, position: int, size: int) -> NDArray[np.float64]:
    """float64 `[size]` in (0, 1): the random numbers for the token at an output position, one for
    each of the vocabulary."""
    key = np.array([seed % 2**64, sample], np.uint64)
    block, base, purpose = 0, 0, 0  # that of an emitted token, which no round has a part in
    counter = np.array([block, position, base, purpose], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def counted(params: SamplingParams, start: int) -> Step:
    """Frequency and presence penalties over the tokens from `start` on."""

    def step(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, start:], minlength=scores.shape[1])[None]
        less = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return scores - less

    return step


def only(allowed: list[int], scores: torch.Tensor) -> torch.Tensor:
    """Minus infinity everywhere else."""
    kept = torch.full_like(scores, -math.inf)
    kept[:, allowed] = scores[:, allowed]
    return kept
