"""Makes the sampler that a draft model draws by. Imports no torch.

Whatever is drafted, the target judges it. So where a job's grammar or words cannot be followed
here, it is drafted for without them: the output's law stays, fewer tokens are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pilotfish_broker.spec import JobSpec
from pilotfish_workers.model.interface import ModelInfo
from pilotfish_workers.sampling import Words, build_sampler
from pilotfish_workers.speculative.sampler import Constraint, Sampler

log = logging.getLogger(__name__)


class Lenient:
    """A constraint that allows everything where the output does not follow it.

    The target's end-of-sequence tokens may be others than the draft model's, so what the target
    allowed may make no sense here.

    Args:
        job: for the log.
        vocab_size: rows of the draft model's output layer.
    """

    def __init__(self, inner: Constraint, job: str, vocab_size: int) -> None:
        self._inner = inner
        self._job = job
        self._num_words = -(-vocab_size // 32)
        self._is_lost = False

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> NDArray[np.int32]:
        """See `Constraint.masks`."""
        if not self._is_lost:
            try:
                return self._inner.masks(output, drafted)
            except Exception as error:  # one job's grammar must not end all sessions
                self._lose(error)
        return np.full((len(drafted) + 1, self._num_words), -1, dtype=np.int32)

    def rewind(self) -> None:
        """See `Constraint.rewind`."""
        try:
            self._inner.rewind()
            self._is_lost = False
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._is_lost = True
        log.warning("job %s is drafted for without its grammar: %s", self._job, error)


def draft_sampler(
    spec: JobSpec,
    *,
    job: str,
    tokens: list[int],
    num_prompt: int,
    info: ModelInfo,
    words: Words | None,
) -> Sampler:
    """The sampler of one job on a draft worker, with the target's coins.

    Args:
        tokens: prompt and committed output; the sampler keeps this very list.
        info: the draft model.
        words: the draft model's tokenizer, which has the target's vocabulary.
    """
    # how likely tokens are is for the target to say
    params = replace(spec.params, logprobs=None, prompt_logprobs=None)

    def build(words: Words | None) -> Sampler:
        return build_sampler(
            params,
            job=job,
            sample=spec.sample,
            tokens=tokens,
            num_prompt=num_prompt,
            eos_ids=info.eos_ids,
            vocab_size=info.vocab_size,
            words=words,
        )

    try:
        sampler = build(words)
    except Exception as error:  # a library compiles the grammar, and may raise anything
        log.warning("job %s is drafted for without its grammar and words: %s", job, error)
        sampler = build(None)
    if sampler.constraint is not None:
        sampler.constraint = Lenient(sampler.constraint, job, info.vocab_size)
    return sampler
