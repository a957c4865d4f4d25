"""Makes a sampler from what a job asks for, on either side: target or drafter. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pilotfish_broker.errors import UnsupportedParameter
from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.sampler import Constraint, Sampler


class Words(Protocol):
    """What a sampler needs of a tokenizer."""

    def word_ids(self, word: str) -> list[tuple[int, ...]]: ...
    def constraint(
        self, params: SamplingParams, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> Constraint | None: ...


def stop_ids_of(params: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that end a job's output, in ascending order."""
    own = () if params.ignore_eos else eos_ids
    return tuple(sorted({*own, *params.stop_token_ids}))


def build_sampler(
    params: SamplingParams,
    *,
    job: str,
    sample: int,
    tokens: list[int],
    num_prompt: int,
    eos_ids: Sequence[int],
    vocab_size: int,
    words: Words | None,
) -> Sampler:
    """The sampler of one job.

    Args:
        tokens: prompt and committed output; the sampler keeps this very list.
        eos_ids: token ids that end an output by the target's configuration.
        vocab_size: rows of the output layer.
        words: the tokenizer; a drafter without one draws without grammar and bad texts, and the
            target rejects what they forbid.

    Raises:
        PilotfishError: the structured output cannot be compiled, or a bad word has no tokens.
    """
    bad: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            bad[tuple(word)] = None
        elif words is not None:
            bad.update(dict.fromkeys(words.word_ids(word)))
    constraint = None
    if words is not None and params.is_structured:
        constraint = words.constraint(params, vocab_size=vocab_size, eos_ids=eos_ids)
    return Sampler(
        params=params,
        coins=Coins.of_job(job, params.seed, sample),
        tokens=tokens,
        num_prompt=num_prompt,
        stop_ids=stop_ids_of(params, eos_ids),
        bad_words=tuple(bad),
        constraint=constraint,
    )


def refuse_sampling(params: SamplingParams) -> None:
    """Refuse what a simulated model cannot do.

    Raises:
        UnsupportedParameter: something else than plain greedy decoding is asked for.
    """
    asked = params.temperature != 0 or params.changes_logits
    if asked or params.logprobs is not None or params.prompt_logprobs is not None:
        raise UnsupportedParameter(
            "a simulated model only decodes greedily: leave temperature, penalties, constraints "
            "and logprobs out",
            field="params",
        )
