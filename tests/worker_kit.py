"""What tests of the workers share: jobs, sessions, and a model whose output shows its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pilotfish_broker.digest import extend
from pilotfish_broker.spec import JobSpec, SamplingParams
from pilotfish_workers.draft.session import DraftSession
from pilotfish_workers.draft.source import Draft
from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.model.interface import ModelInfo, Rows
from pilotfish_workers.sampling import build_sampler
from pilotfish_workers.simulated import SimulatedDetokenizer
from pilotfish_workers.speculative.accept import Outcome, draw_plain, verify_plain
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn, Sampler
from pilotfish_workers.verify.draft_length import DraftLength
from pilotfish_workers.verify.output_text import OutputText
from pilotfish_workers.verify.sequence import Sequence as Active

MODEL = "m"


def job_spec(prompt: Sequence[int] = (1, 2, 3), *, priority: int = 0, **params: Any) -> JobSpec:
    """A job of token ids."""
    return JobSpec(
        model=MODEL, prompt=list(prompt), params=SamplingParams(**params), priority=priority
    )


def active(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    job: str = "job",
    epoch: int = 1,
    limit: int = 8,
    output: Sequence[int] = (),
    priority: int = 0,
    speculation: str | int = "auto",
    stop_ids: Sequence[int] = (),
) -> Active:
    """A job as the verify engine sees it."""
    spec = job_spec(
        prompt,
        priority=priority,
        max_tokens=limit,
        speculation=speculation if speculation != "off" else "auto",
    )
    return active_of(spec, [*prompt, *output], len(prompt), job, epoch, stop_ids, speculation)


def active_of(
    spec: JobSpec,
    tokens: list[int],
    num_prompt: int,
    job: str = "job",
    epoch: int = 1,
    stop_ids: Sequence[int] = (),
    speculation: str | int = "auto",
) -> Active:
    """The same of a given job; every token's text is a letter."""
    params = spec.params
    output = OutputText(
        SimulatedDetokenizer(),
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
    output.resume(tokens[num_prompt:])
    return Active(
        job=job,
        epoch=epoch,
        spec=spec,
        sampler=build_sampler(
            params,
            job=job,
            sample=spec.sample,
            tokens=tokens,
            num_prompt=num_prompt,
            eos_ids=stop_ids,
            vocab_size=100,
            words=None,
        ),
        output=output,
        token_bytes=lambda token: bytes([97 + token % 26]),
        limit=params.max_tokens,
        digest=extend(0, tokens),
        draft_length=DraftLength(speculation),
    )


def sampler_of(
    tokens: list[int], num_prompt: int, *, job: str = "job", sample: int = 0, **params: Any
) -> Sampler:
    """A sampler of a job over this very list, without a tokenizer."""
    return build_sampler(
        SamplingParams(**params),
        job=job,
        sample=sample,
        tokens=tokens,
        num_prompt=num_prompt,
        eos_ids=(),
        vocab_size=0,
        words=None,
    )


def draft_of(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    job: str = "job",
    **params: Any,
) -> Draft:
    """A draft of a job with these parameters; without any it has no sampler."""
    tokens = [*prompt, *output]
    sampler = sampler_of(tokens, len(prompt), job=job, **params) if params else None
    return Draft(tokens, sampler)


def drafting(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    job: str = "job",
    **params: Any,
) -> DraftSession:
    """A session as the draft engine sees it; it samples where parameters are given."""
    return DraftSession(
        job=job,
        epoch=1,
        verify_worker="v",
        verify_inbox="pf:inbox:v",
        num_prompt=len(prompt),
        draft=draft_of(prompt, output, job=job, **params),
    )


Following = Callable[[int, int, int], int]


class FunctionModel:
    """A model whose next token is a function of (digest of the prefix, position, last token).

    The digest is what the KV slots of the prefix hold, so that a hole, a stale slot or a block
    that was given away changes the output. -1 from the function stands for bad logits.
    """

    def __init__(
        self,
        following: Following | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 100,
        context: int = 256,
    ) -> None:
        self._following = following or (lambda digest, position, token: digest % vocab_size)
        self.pool = BlockPool(num_blocks, block_size)
        self.kv: dict[int, tuple[int, int, int]] = {}  # slot → position, token, prefix digest
        self.num_passes = 0
        self.info = ModelInfo(
            name="function",
            path="function",
            family="function",
            vocab_size=vocab_size,
            context_length=context,
            num_layers=1,
            dtype="none",
            device="cpu",
            fingerprint="0" * 64,
            eos_ids=(),
        )

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        """One pass; refuses rows that a real model could not run."""
        self.num_passes += 1
        return [self._run(row) for row in rows]

    def verify(self, rows: Sequence[Rows], cases: Sequence[Case | None]) -> list[Outcome | None]:
        """See `Model.verify`; plain greedy decoding alone."""
        return verify_plain(self.greedy(rows), rows, cases)

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        """See `Model.draw`; plain greedy decoding alone."""
        return draw_plain(self.greedy(rows), rows, draws)

    def held(self, blocks: list[int], num_tokens: int) -> list[int]:
        """The tokens whose KV the first positions of a block table hold."""
        return [self.kv[self._slot(blocks, position)][1] for position in range(num_tokens)]

    def _run(self, row: Rows) -> list[int]:
        end = row.start + len(row.tokens)
        if not row.tokens or end > self.info.context_length:
            raise ValueError(f"a row of {len(row.tokens)} tokens ends at {end}")
        if len(row.blocks) * self.pool.block_size < end:
            raise ValueError(f"{len(row.blocks)} blocks do not cover {end} tokens")
        if not all(0 <= token < self.info.vocab_size for token in row.tokens):
            raise ValueError("a token id is out of range")
        digest = 0
        for position in range(row.start):
            there, token, stored = self.kv[self._slot(row.blocks, position)]
            digest = extend(digest, (token,))
            if (there, stored) != (position, digest):
                raise ValueError(f"the cache does not hold the prefix at position {position}")
        answers = []
        for position, token in enumerate(row.tokens, row.start):
            digest = extend(digest, (token,))
            self.kv[self._slot(row.blocks, position)] = (position, token, digest)
            answers.append(self._following(digest, position, token))
        return answers[len(answers) - row.num_logits :]

    def _slot(self, blocks: list[int], position: int) -> int:
        size = self.pool.block_size
        return blocks[position // size] * size + position % size


def plain(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy output of a model, one token and the whole prefix a pass: the definition."""
    pool = model.pool
    tokens = list(prompt)
    blocks = pool.allocate(pool.num_blocks_for(len(prompt) + count))
    try:
        start = 0
        for _ in range(count):
            answer = model.greedy([Rows(tokens[start:], start, blocks, 1)])
            start = len(tokens)
            tokens.append(answer[0][0])
    finally:
        pool.release(blocks)
    return tokens[len(prompt) :]
