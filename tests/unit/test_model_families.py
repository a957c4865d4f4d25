"""Every served family: speculation over packed passes gives what `generate` gives."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.pass_plan import Group
from pilotfish_workers.model.runner import ModelRunner
from tests.tiny_families import FAMILIES
from tests.tiny_models import build_tiny

VOCAB = 288
BLOCK = 4
CHUNK = 13
"""Tokens of a prefill chunk: longer than the short windows, shorter than the long ones."""
NUM_TOKENS = 20
PROMPT_LENGTHS = (2, 9, 30)
WINDOWS = (5, 16)
"""The longest sequence is over twice the longer one; the shorter one slides in every sequence."""
OFTEN_MET = {
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama"),
    *("mistral", "olmo", "olmo2", "phi", "phi3", "qwen2", "qwen3"),
}


def cases() -> list[Any]:
    """Every family as it is, and with windows where it has them; the rarer ones are slow."""
    return [
        pytest.param(family, window, marks=[] if family in OFTEN_MET else pytest.mark.slow)
        for family, made in FAMILIES.items()
        for window in (None, *(WINDOWS if made.window else ()))
    ]


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def load(folder: Path) -> ModelRunner:
    return ModelRunner.load(
        str(folder), device="cpu", num_threads=1, kv_tokens=256, block_size=BLOCK
    )


def generate(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' own loop, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
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

    def __init__(
        self, runner: ModelRunner, prompts: list[list[int]], truths: list[list[int]]
    ) -> None:
        self.runner = runner
        self.truths = truths
        self.prompts = prompts
        self.sequences = [list(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)
        self.draw = random.Random(5)
        self.accepted = self.rejected = 0
        free = list(range(runner.pool.num_blocks))
        self.draw.shuffle(free)
        needed = [-(-(len(prompt) + NUM_TOKENS) // BLOCK) for prompt in prompts]
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        for tensor in (*runner.kv.keys, *runner.kv.values):
            tensor[:-1] = 1e4  # whatever is read before it is written shows

    def run(self) -> list[list[int]]:
        for _ in range(8 + NUM_TOKENS):
            self._step()
        pairs = zip(self.sequences, self.prompts, strict=True)
        return [sequence[len(prompt) :] for sequence, prompt in pairs]

    def _wanted(self, number: int) -> int:
        return len(self.prompts[number]) + NUM_TOKENS - len(self.sequences[number])

    def _draft(self, number: int) -> list[int]:
        base = NUM_TOKENS - self._wanted(number)
        length = min(self.draw.randrange(6), self._wanted(number) - 1)
        right = self.truths[number][base : base + length]
        return [
            self.draw.randrange(VOCAB) if self.draw.random() < 1 / 3 else token for token in right
        ]

    def _step(self) -> None:
        rows, drafts = [], {}
        for number, sequence in enumerate(self.sequences):
            if self._wanted(number) == 0:
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
            self.done[number] = len(self.sequences[number]) - 1  # what was rejected is run over


def check(folder: Path, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> None:
    prompts = prompts_of(lengths)
    truths = generate(folder, prompts)
    assert min(len(set(truth)) for truth in truths) >= 4  # else much would go unnoticed
    speculation = Speculation(load(folder), prompts, truths)
    assert speculation.run() == truths
    assert speculation.accepted >= 10
    assert speculation.rejected >= 5


@pytest.mark.parametrize(("family", "window"), cases())
def test_speculation_equals_generate(tmp_path: Path, family: str, window: int | None) -> None:
    build_tiny(tmp_path, family, sliding_window=window, context=128, tie=False)
    check(tmp_path)


def test_the_text_of_a_model_with_images_is_served(tmp_path: Path) -> None:
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=3,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    check(tmp_path)


def test_a_long_rope_is_right_up_to_its_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.5] * 8,
        "long_factor": [9.0] * 8,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 50}
    build_tiny(tmp_path, "phi3", context=200, tie=False, config_changes=changes)
    assert load(tmp_path).info.context_length == 50
    check(tmp_path, (2, 50 - NUM_TOKENS))


def test_a_dynamic_rope_is_right_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    build_tiny(tmp_path, "llama", context=50, tie=False, config_changes={"rope_parameters": rope})
    assert load(tmp_path).info.context_length == 50
    check(tmp_path, (2, 50 - NUM_TOKENS))


FAULTS = [
    *((family, "no window") for family in ("mistral", "phi3", "qwen2", "gemma2", "gemma3_text")),
    *((family, "a key too many") for family in ("llama", "gpt2", "mistral", "gemma2")),
]


@pytest.mark.parametrize(("family", "fault"), FAULTS)
def test_a_mask_that_is_wrong_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fault: str
) -> None:
    """The second fault lets a token see the one after it, rejected earlier perhaps."""
    window = WINDOWS[1] if FAMILIES[family].window else None
    build_tiny(tmp_path, family, sliding_window=window, context=128, tie=False)
    prompts = prompts_of(PROMPT_LENGTHS)
    truths = generate(tmp_path, prompts)
    speculation = Speculation(load(tmp_path), prompts, truths)
    right = Group.mask

    def wrong(group: Group, window: int | None, *arguments: Any) -> torch.Tensor:
        if fault == "no window":
            return right(group, None, *arguments)
        moved = replace(group, positions=group.positions + 1, masks={})
        return right(moved, window and window + 1, *arguments)

    monkeypatch.setattr(Group, "mask", wrong)
    assert speculation.run() != truths
