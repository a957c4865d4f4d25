"""A real model's passes as target and as drafter: the tokens of one by one, the plain numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.speculative.accept import BAD_LOGITS, NOT_JUDGED, Outcome
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.sampler import Case, Draw, Sampler
from tests.tiny_models import build_tiny

VOCAB = 288
POISON = 200
FAMILIES = ("llama", "qwen3", "gpt2")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "bad_words": ((7,),)},
    "coupled": {"temperature": 0.8, "top_p": 0.95, "rule": "coupled", "repetition_penalty": 1.1},
    "rejection": {"temperature": 0.8, "top_p": 0.95, "rule": "rejection"},
    "block": {"temperature": 0.8, "top_k": 20, "rule": "block"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return build_tiny(path, request.param, tie=request.param != "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(str(folder), device="cpu", num_threads=1, kv_tokens=4096)


@dataclass
class Job:
    """One sequence of a bare engine."""

    runner: ModelRunner
    sampler: Sampler
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    @classmethod
    def of(cls, runner: ModelRunner, prompt: Sequence[int], seed: int = 1, **params: Any) -> Job:
        made = SamplingParams.from_mapping(params)
        words = tuple(tuple(int(token) for token in word) for word in made.bad_words)
        sampler = Sampler(made, Coins(seed), list(prompt), len(prompt), bad_words=words)
        pool = runner.pool
        return cls(runner, sampler, pool.allocate(pool.num_blocks_for(len(prompt) + 64)))

    def rows(self, drafted: Sequence[int] = (), num_scored: int = 0) -> Rows:
        """All that is not computed, and what was drafted."""
        tokens = [*self.sampler.tokens[self.num_computed :], *drafted]
        fed = [token if token < VOCAB else 0 for token in tokens]
        return Rows(fed, self.num_computed, self.blocks, num_scored + 1 + len(drafted))

    def take(self, drafted: Sequence[int], outcome: Outcome | None) -> Outcome:
        assert outcome is not None
        self.sampler.tokens += outcome.tokens(drafted)
        self.num_computed = len(self.sampler.tokens) - 1
        return outcome

    @property
    def output(self) -> list[int]:
        return self.sampler.tokens[self.sampler.num_prompt :]

    def close(self) -> None:
        self.runner.pool.release(self.blocks)


def verify(runner: ModelRunner, jobs: Sequence[Job], drafts: Sequence[Sequence[int]]) -> list[Any]:
    """One pass for all of them."""
    pairs = list(zip(jobs, drafts, strict=True))
    outcomes = runner.verify(
        [job.rows(drafted) for job, drafted in pairs],
        [Case(job.sampler, drafted) for job, drafted in pairs],
    )
    return [
        job.take(drafted, outcome) for (job, drafted), outcome in zip(pairs, outcomes, strict=True)
    ]


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 190, (n,), generator=generator).tolist() for n in lengths]


def one_by_one(runner: ModelRunner, prompt: list[int], count: int, **params: Any) -> list[int]:
    job = Job.of(runner, prompt, **params)
    while len(job.output) < count:
        verify(runner, [job], [()])
    job.close()
    return job.output


@pytest.mark.parametrize("way", ["plain", "greedy", "coupled"])
def test_drafts_of_any_length_change_nothing_but_the_number_of_passes(
    runner: ModelRunner, way: str
) -> None:
    """Drafts are right for a while and then wrong; sequences of all lengths share the passes."""
    prompts = prompts_of([1, 14, 33, 60])
    count = 30
    truths = [one_by_one(runner, prompt, count, **WAYS[way]) for prompt in prompts]
    jobs = [Job.of(runner, prompt, **WAYS[way]) for prompt in prompts]
    draw = random.Random(2)
    while any(len(job.output) < count for job in jobs):
        active, drafts, right = [], [], []
        for job, truth in zip(jobs, truths, strict=True):
            done = len(job.output)
            if done < count:
                good = draw.randint(0, 4)
                tail = [(token + 1) % 190 for token in truth[done + good :]]
                drafted = (truth[done : done + good] + tail)[: draw.randint(0, 6)]
                active.append(job)
                drafts.append([*drafted, VOCAB + 3] if draw.random() < 0.2 else drafted)
                right.append(min(good, len(drafted)))
        outcomes = verify(runner, active, drafts)
        if all(len(job.output) <= count for job in active):
            assert [outcome.num_accepted for outcome in outcomes] == right
    assert [job.output[:count] for job in jobs] == truths
    for job in jobs:
        job.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_a_model_that_drafts_for_itself_is_never_rejected(runner: ModelRunner, way: str) -> None:
    """Drafter and target in the same pool, round by round; K from 1 to 8."""
    prompts = prompts_of([5, 40])
    jobs = [Job.of(runner, prompt, 7, **WAYS[way]) for prompt in prompts]
    drafters = [Job.of(runner, prompt, 7, **WAYS[way]) for prompt in prompts]
    for k in (1, 8, 3, 5, 2):
        drafted: list[list[int]] = [[] for _ in jobs]
        laws: list[list[Any]] = [[] for _ in jobs]
        for _ in range(k):
            rows = [
                Rows(
                    [*one.sampler.tokens, *tokens][one.num_computed :],
                    one.num_computed,
                    one.blocks,
                    1,
                )
                for one, tokens in zip(drafters, drafted, strict=True)
            ]
            draws = [
                Draw(one.sampler, tokens) for one, tokens in zip(drafters, drafted, strict=True)
            ]
            for i, drawn in enumerate(runner.draw(rows, draws)):
                assert drawn is not None
                drafted[i].append(drawn.token)
                laws[i].append(drawn.law)
                drafters[i].num_computed = rows[i].start + len(rows[i].tokens)
        has_laws = laws[0][0] is not None
        assert has_laws == (way in ("rejection", "block"))
        outcomes = runner.verify(
            [job.rows(tokens) for job, tokens in zip(jobs, drafted, strict=True)],
            [
                Case(job.sampler, tokens, own if has_laws else None)
                for job, tokens, own in zip(jobs, drafted, laws, strict=True)
            ],
        )
        for job, one, tokens, outcome in zip(jobs, drafters, drafted, outcomes, strict=True):
            assert job.take(tokens, outcome).num_accepted == k
            one.sampler.tokens[:] = job.sampler.tokens
    for job in [*jobs, *drafters]:
        job.close()


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_those_of_the_plain_model(
    runner: ModelRunner, folder: Path, way: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = prompts_of([25])[0]
    job = Job.of(runner, prompt, **WAYS[way], logprobs=3, prompt_logprobs=2)
    case = Case(job.sampler, scored=prompt[1:])
    first = job.take((), runner.verify([job.rows(num_scored=24)], [case])[0])
    found = list(first.logprobs or [])
    truth = one_by_one(runner, prompt, 12, **WAYS[way])
    while len(job.output) < 10:
        done = len(job.output)
        drafted = [*truth[done : done + 2], 5]
        found += verify(runner, [job], [drafted])[0].logprobs
    with torch.inference_mode():
        logits = plain(torch.tensor([job.sampler.tokens])).logits[0]
        wanted = torch.log_softmax(logits.double(), -1)
    assert len(found) == len(job.output)
    assert first.scored is not None
    assert len(first.scored) == 24
    for position, one in enumerate([*first.scored, *found]):
        token = job.sampler.tokens[position + 1]
        assert one.logprob == pytest.approx(float(wanted[position, token]), abs=1e-4)
        best = wanted[position].topk(2 if position < 24 else 3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    job.close()


def test_kinds_of_rows_share_a_pass(runner: ModelRunner) -> None:
    """A bare prefill chunk, a scored one, and every way of decoding: each as it is alone."""
    prompts = prompts_of([30] * (2 + len(WAYS)))

    def work() -> tuple[list[Job], list[Rows], list[Case | None]]:
        jobs = [Job.of(runner, prompt) for prompt in prompts[:2]]
        rows = [
            Rows(prompts[0][:20], 0, jobs[0].blocks, 0),
            Rows(prompts[1][:20], 0, jobs[1].blocks, 20),
        ]
        scorer = Job.of(runner, prompts[1], prompt_logprobs=0)
        jobs.append(scorer)
        cases: list[Case | None] = [
            None,
            Case(scorer.sampler, scored=prompts[1][1:21], is_judged=False),
        ]
        for prompt, way in zip(prompts[2:], WAYS.values(), strict=True):
            jobs.append(Job.of(runner, prompt, **way))
            rows.append(jobs[-1].rows((5, 6)))
            cases.append(Case(jobs[-1].sampler, (5, 6)))
        return jobs, rows, cases

    jobs, rows, cases = work()
    together = runner.verify(rows, cases)
    alone = [runner.verify([row], [case])[0] for row, case in zip(rows, cases, strict=True)]
    assert together[0] is None
    assert together[1] is not None
    assert alone[1] is not None
    assert together[1].token == NOT_JUDGED
    assert [one.logprob for one in together[1].scored or []] == pytest.approx(
        [one.logprob for one in alone[1].scored or []], abs=1e-5
    )
    assert together[2:] == alone[2:]
    assert runner.greedy(rows[2:3])[0][: together[2].num_accepted + 1] == together[2].tokens((5, 6))  # type: ignore[union-attr]
    for job in jobs:
        job.close()


@pytest.fixture
def poisoned(folder: Path) -> ModelRunner:
    """A runner whose embedding of one token is NaN (and untied, so that logits stay usable)."""
    runner = ModelRunner.load(str(folder), device="cpu", kv_tokens=4096)
    embedding = runner._model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
    embedding.weight[POISON] = torch.nan
    return runner


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_that_breaks_the_model_fails_only_the_job_that_accepts_it(
    poisoned: ModelRunner, runner: ModelRunner, way: str
) -> None:
    prompt = prompts_of([30])[0]
    truth = one_by_one(runner, prompt, 6, **WAYS[way])
    mate = Job.of(poisoned, prompts_of([9, 9])[1])
    job = Job.of(poisoned, prompt, **WAYS[way], logprobs=0)
    assert verify(poisoned, [job], [()])[0].token == truth[0]
    drafted = [truth[1], POISON, 7]
    mates, outcome = verify(poisoned, [mate, job], [(), drafted])
    assert mates.token >= 0
    if way in ("plain", "greedy", "coupled"):
        assert outcome.tokens(drafted) == truth[1:3]
        assert verify(poisoned, [job], [()])[0].token == truth[3]  # the KV before it is whole
    else:
        assert outcome.token >= 0 or outcome.num_accepted == 2
    assert len(outcome.logprobs) == outcome.num_accepted + (outcome.token >= 0)
    assert all(one.logprob <= 0 for one in outcome.logprobs)


def test_a_prompt_that_breaks_the_model_gives_no_token(poisoned: ModelRunner) -> None:
    for way in WAYS.values():
        job = Job.of(poisoned, [5, POISON, 6], **way)
        outcomes = poisoned.verify([job.rows((3, 4))], [Case(job.sampler, (3, 4))])
        assert outcomes[0] == Outcome(0, BAD_LOGITS)
        drawn = poisoned.draw([Rows([5, POISON, 6], 0, job.blocks, 1)], [Draw(job.sampler)])
        assert drawn[0] is not None
        assert (drawn[0].token, drawn[0].law) == (BAD_LOGITS, None)


def test_a_row_without_a_draw_only_computes(runner: ModelRunner) -> None:
    prompts = prompts_of([20, 12])
    jobs = [Job.of(runner, prompt, **WAYS["block"]) for prompt in prompts]
    rows = [Rows(prompts[0][:11], 0, jobs[0].blocks, 0), Rows(prompts[1], 0, jobs[1].blocks, 1)]
    first = runner.draw(rows, [None, Draw(jobs[1].sampler)])
    assert first[0] is None
    assert first[1] is not None
    rest = Rows(prompts[0][11:], 11, jobs[0].blocks, 1)
    in_two = runner.draw([rest], [Draw(jobs[0].sampler)])[0]
    whole = runner.draw([Rows(prompts[0], 0, jobs[0].blocks, 1)], [Draw(jobs[0].sampler)])[0]
    assert in_two is not None
    assert whole is not None
    assert in_two.token == whole.token
    assert runner.draw([], []) == []
    for job in jobs:
        job.close()


@pytest.mark.parametrize("num_logits", [0, 2])
def test_a_draw_asks_for_one_row_of_logits(runner: ModelRunner, num_logits: int) -> None:
    job = Job.of(runner, [5, 6, 7])
    with pytest.raises(ModelError, match="logits for a draw"):
        runner.draw([Rows([5, 6, 7], 0, job.blocks, num_logits)], [Draw(job.sampler)])
    with pytest.raises(ModelError, match="logits for no draw"):
        runner.draw([Rows([5, 6, 7], 0, job.blocks, 1)], [None])
    job.close()
