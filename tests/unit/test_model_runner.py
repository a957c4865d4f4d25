"""Packed, paged passes equal the plain model."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pilotfish_workers.model.interface import BAD_LOGITS, Rows
from pilotfish_workers.model.runner import ModelRunner
from tests.tiny_models import build_tiny

VOCAB = 288
POISON = 200
VARIANTS = {
    "llama": ("llama", None),
    "qwen3": ("qwen3", None),
    "gpt2": ("gpt2", None),
    "qwen3 with a window": ("qwen3", 24),
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, window = VARIANTS[request.param]
    path = tmp_path_factory.mktemp(family)
    return build_tiny(path, family, sliding_window=window, tie=family != "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(str(folder), device="cpu", num_threads=1, kv_tokens=8192, block_size=16)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def scattered(runner: ModelRunner) -> "Scattered":
    return Scattered(runner)


class Scattered:
    """Hands out block tables in random order over a dirty pool."""

    def __init__(self, runner: ModelRunner) -> None:
        self.free = list(range(runner.pool.num_blocks))
        random.Random(7).shuffle(self.free)
        for tensors in (runner.kv.keys, runner.kv.values):
            for tensor in tensors:
                tensor[:-1] = torch.nan  # whatever is read before it is written shows at once

    def table(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // 16))]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 190, (n,), generator=generator).tolist() for n in lengths]


def generate(plain: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def decode_together(
    runner: ModelRunner, prompts: list[list[int]], tables: list[list[int]], count: int, chunk: int
) -> list[list[int]]:
    """A bare engine: prefill in chunks, decode what is prefilled, all in the same passes."""
    sequences = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    while any(len(s) < len(p) + count for s, p in zip(sequences, prompts, strict=True)):
        rows, owners = [], []
        for i, sequence in enumerate(sequences):
            if len(sequence) >= len(prompts[i]) + count:
                continue
            part = sequence[done[i] : done[i] + chunk]
            is_last = done[i] + len(part) == len(sequence)
            rows.append(Rows(part, done[i], tables[i], int(is_last)))
            owners.append(i)
            done[i] += len(part)
        for i, ids in zip(owners, runner.greedy(rows), strict=True):
            sequences[i] += ids
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


@pytest.mark.parametrize("chunk", [48, 512])
def test_ragged_prompts_decoded_together_equal_generate(
    runner: ModelRunner, plain: Any, scattered: Scattered, chunk: int
) -> None:
    prompts = prompts_of([1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 129, 200, 257, 300])
    tables = [scattered.table(len(prompt) + 16) for prompt in prompts]
    together = decode_together(runner, prompts, tables, 16, chunk)
    assert together == [generate(plain, prompt, 16) for prompt in prompts]


def test_wanted_logits_equal_the_plain_forward(
    runner: ModelRunner, plain: Any, scattered: Scattered
) -> None:
    prompts = prompts_of([5, 90, 40])
    wanted = [5, 3, 0]
    rows = [
        Rows(prompt, 0, scattered.table(len(prompt)), number)
        for prompt, number in zip(prompts, wanted, strict=True)
    ]
    logits = runner.forward(rows)
    with torch.no_grad():
        expected = [
            plain(torch.tensor([prompt])).logits[0, len(prompt) - number :]
            for prompt, number in zip(prompts, wanted, strict=True)
        ]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_wrong_drafted_tokens_leave_no_trace_once_overwritten(
    runner: ModelRunner, plain: Any, scattered: Scattered
) -> None:
    """Each round runs wrong drafts past the committed tokens, also across block borders."""
    prompts = prompts_of([14, 61, 3, 120], seed=3)
    expected = [generate(plain, prompt, 24) for prompt in prompts]
    tables = [scattered.table(len(prompt) + 40) for prompt in prompts]
    for row in zip(prompts, tables, strict=True):
        runner.greedy([Rows(row[0][:-1], 0, row[1], 0)] if len(row[0]) > 1 else [])
    coins = random.Random(1)
    committed: list[list[int]] = [[] for _ in prompts]
    while any(len(tokens) < 24 for tokens in committed):
        rows, right = [], []
        for prompt, table, tokens, truth in zip(prompts, tables, committed, expected, strict=True):
            good = coins.randint(0, 3)
            drafted = truth[len(tokens) : len(tokens) + good]
            drafted += [(token + 1) % 190 for token in truth[len(tokens) + good :][:4]]
            known = [*prompt, *tokens]
            rows.append(Rows([known[-1], *drafted], len(known) - 1, table, 1 + len(drafted)))
            right.append(good)
        for tokens, good, truth, ids in zip(
            committed, right, expected, runner.greedy(rows), strict=True
        ):
            accepted = min(good, 24 - len(tokens))
            run = ids[: accepted + 1][: 24 - len(tokens)]
            assert run == truth[len(tokens) : len(tokens) + len(run)]
            tokens += run
    assert committed == expected


@pytest.fixture
def poisoned(folder: Path) -> ModelRunner:
    """A runner whose embedding of one token is NaN (and untied, so that logits stay usable)."""
    runner = ModelRunner.load(str(folder), device="cpu", kv_tokens=4096)
    model = runner._model
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
    embedding.weight[POISON] = torch.nan
    return runner


def test_a_broken_sequence_spoils_only_itself(poisoned: ModelRunner, plain: Any) -> None:
    scattered = Scattered(poisoned)
    prompts = prompts_of([20, 21, 70, 5])
    prompts[1][3] = POISON
    tables = [scattered.table(len(prompt) + 8) for prompt in prompts]
    outputs = []
    for prompt, table in zip(prompts, tables, strict=True):
        outputs.append(Rows(prompt, 0, table, 1))
    ids = [row[0] for row in poisoned.greedy(outputs)]
    assert ids[1] == BAD_LOGITS
    assert [ids[i] for i in (0, 2, 3)] == [generate(plain, prompts[i], 1)[0] for i in (0, 2, 3)]
    good = (0, 2, 3)
    assert decode_together(
        poisoned, [prompts[i] for i in good], [tables[i] for i in good], 8, 512
    ) == [generate(plain, prompts[i], 8) for i in good]


def test_a_reused_block_of_a_broken_sequence_is_clean(poisoned: ModelRunner, plain: Any) -> None:
    scattered = Scattered(poisoned)
    table = scattered.table(64)
    assert poisoned.greedy([Rows([POISON] * 60, 0, table, 1)]) == [[BAD_LOGITS]]
    prompt = prompts_of([18])[0]
    assert decode_together(poisoned, [prompt], [table], 8, 7) == [generate(plain, prompt, 8)]


def test_a_drafted_token_that_breaks_the_model_does_not_break_the_tokens_before_it(
    poisoned: ModelRunner, plain: Any
) -> None:
    scattered = Scattered(poisoned)
    prompt = prompts_of([30])[0]
    truth = generate(plain, prompt, 6)
    table = scattered.table(60)
    poisoned.greedy([Rows(prompt[:-1], 0, table, 0)])
    drafted = [*truth[:2], POISON, 7]
    result = poisoned.greedy([Rows([prompt[-1], *drafted], 29, table, 5)])[0]
    assert result == [*truth[:3], BAD_LOGITS, BAD_LOGITS]
    # and the KV before it is whole
    assert poisoned.greedy([Rows([truth[2]], 32, table, 1)]) == [[truth[3]]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_with_nan_or_infinity_are_bad(poisoned: ModelRunner, value: float) -> None:
    head = poisoned._model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
    head.weight[9] = value
    table = Scattered(poisoned).table(8)
    assert poisoned.greedy([Rows([5, 6], 0, table, 1)]) == [[BAD_LOGITS]]


def test_minus_infinity_is_fine_while_one_logit_is_finite(poisoned: ModelRunner) -> None:
    class Head(torch.nn.Module):
        weight = torch.zeros(VOCAB, 1)
        finite: tuple[int, ...] = (17, 40)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*hidden.shape[:-1], VOCAB), -torch.inf)
            logits[..., list(self.finite)] = 1.0
            return logits

    head = Head()
    poisoned._model.set_output_embeddings(head)
    table = Scattered(poisoned).table(8)
    assert poisoned.greedy([Rows([5, 6], 0, table, 1)]) == [[17]]  # the lowest id on a tie
    head.finite = ()
    assert poisoned.greedy([Rows([5, 6], 0, table, 1)]) == [[BAD_LOGITS]]
