"""Every served family: speculation over packed passes gives what `generate` gives."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from tests.tiny_families import FAMILIES
from tests.tiny_models import build_tiny

BLOCK = 4
CHUNK = 13
"""Tokens of a prefill chunk: longer than the short windows, shorter than the long ones."""
NUM_TOKENS = 20
PROMPT_LENGTHS = (2, 9, 30)
WINDOWS = (5, 16)
"""The longest sequence is over twice the longer one; the shorter one slides in every sequence."""

WINDOWED = [(name, size) for name in FAMILIES if FAMILIES[name].window for size in WINDOWS]
CASES = [(name, None) for name in FAMILIES] + WINDOWED


def prompts_of(seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 288) for _ in range(length)] for length in PROMPT_LENGTHS]


def generate(folder: Path, prompts: list[list[int]], attention: str | None) -> list[list[int]]:
    """Greedy tokens of transformers' own loop, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


class Speculation:
    """A bare engine: prefill in chunks and verify what is drafted, all in the same passes.

    The drafter knows the truth and errs at a third of its tokens.
    """

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], truths: list[list[int]]):
        self.runner = runner
        self.truths = truths
        self.prompts = prompts
        self.sequences = [list(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)
        self.draw = random.Random(5)
        self.accepted = self.rejected = 0
        free = list(range(runner.pool.num_blocks))
        self.draw.shuffle(free)
        needed = [-(-(len(prompt) + NUM_TOKENS + 8) // BLOCK) for prompt in prompts]
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        for tensor in (*runner.kv.keys, *runner.kv.values):
            tensor[:-1] = 1e4  # whatever is read before it is written shows

    def run(self) -> list[list[int]]:
        while any(self._wanted(number) for number in range(len(self.prompts))):
            self._step()
        pairs = zip(self.sequences, self.prompts, strict=True)
        return [sequence[len(prompt) :][:NUM_TOKENS] for sequence, prompt in pairs]

    def _wanted(self, number: int) -> int:
        return len(self.prompts[number]) + NUM_TOKENS - len(self.sequences[number])

    def _draft(self, number: int) -> list[int]:
        base = len(self.sequences[number]) - len(self.prompts[number])
        right = self.truths[number][base : base + self.draw.randrange(6)]
        return [
            self.draw.randrange(288) if self.draw.random() < 1 / 3 else token for token in right
        ]

    def _step(self) -> None:
        rows, drafts = [], {}
        for number, sequence in enumerate(self.sequences):
            if self._wanted(number) <= 0:
                continue
            start, table = self.done[number], self.tables[number]
            chunk = sequence[start : start + CHUNK]
            is_last = start + len(chunk) == len(sequence)
            drafted = self._draft(number) if is_last else []
            rows.append(Rows(chunk + drafted, start, table, len(drafted) + 1 if is_last else 0))
            drafts[number] = drafted
            self.done[number] += len(chunk)
        for (number, drafted), answer in zip(drafts.items(), self.runner.greedy(rows), strict=True):
            if not answer:
                continue
            kept = 0
            while kept < len(drafted) and drafted[kept] == answer[kept]:
                kept += 1
            self.accepted += kept
            self.rejected += kept < len(drafted)
            self.sequences[number] += answer[: kept + 1]
            self.done[number] = len(self.sequences[number]) - 1


@pytest.mark.parametrize(("family", "window"), CASES)
def test_speculation_equals_generate(tmp_path: Path, family: str, window: int | None) -> None:
    build_tiny(tmp_path, family, sliding_window=window, context=128, tie=False)
    prompts = prompts_of()
    truths = generate(tmp_path, prompts, None)
    runner = ModelRunner.load(str(tmp_path), device="cpu", kv_tokens=256, block_size=BLOCK)
    assert runner.info.family == FAMILIES[family].model_type
    speculation = Speculation(runner, prompts, truths)
    assert speculation.run() == truths
    assert speculation.accepted >= 10
    assert speculation.rejected >= 5
    assert min(len(set(truth)) for truth in truths) >= 4
