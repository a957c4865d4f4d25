"""Makes the sampler that a draft model draws by. Imports no torch."""

from __future__ import annotations

import logging
from dataclasses import replace

from pilotfish_broker.spec import JobSpec
from pilotfish_workers.model.interface import ModelInfo
from pilotfish_workers.sampling import Words, build_sampler
from pilotfish_workers.speculative.sampler import Sampler

log = logging.getLogger(__name__)


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

    Whatever is drafted, the target judges it. So where the job's grammar or words cannot be
    followed here, it is drafted for without them: the law stays, fewer tokens are accepted.

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
        return build(words)
    except Exception as error:  # a library compiles the grammar, and may raise anything
        log.warning("job %s is drafted for without its constraints: %s", job, error)
        return build(None)
