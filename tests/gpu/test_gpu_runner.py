"""The packed pass on a CUDA device: the same tokens as transformers' own greedy decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pilotfish_workers.model.interface import Rows
from tests.tiny_models import build_tiny

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NUM_TOKENS = 24


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_ragged_sequences_decode_as_generate_does(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    from pilotfish_workers.model.runner import ModelRunner

    folder = build_tiny(tmp_path / family, family)
    runner = ModelRunner.load(str(folder), device="cuda", dtype="float32", kv_tokens=8192)
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 250) for _ in range(n)] for n in (1, 2, 17, 64, 130, 300)]
    outputs = decode(runner, prompts)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda")
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = plain.generate(
            torch.tensor([prompt], device="cuda"),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
        )
        assert output == expected[0, len(prompt) :].tolist()


def decode(runner: object, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, one packed pass a step."""
    pool = runner.pool  # type: ignore[attr-defined]
    tables = [pool.allocate(pool.num_blocks_for(len(p) + NUM_TOKENS)) for p in prompts]
    fed = [list(prompt) for prompt in prompts]
    starts = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(NUM_TOKENS):
        rows = [
            Rows(tokens=tokens, start=start, blocks=table, num_logits=1)
            for tokens, start, table in zip(fed, starts, tables, strict=True)
        ]
        answers = runner.greedy(rows)  # type: ignore[attr-defined]
        for index, answer in enumerate(answers):
            starts[index] += len(fed[index])
            fed[index] = answer
            outputs[index] += answer
    return outputs
