"""Tiny random models with a byte-level tokenizer, built in code; nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tests.tiny_families import FAMILIES

transformers_logging.disable_progress_bar()

__all__ = ["CHAT_TEMPLATE", "build_tiny", "build_tokenizer"]

SPECIAL_TOKENS = ("<eos>", "<user>", "<assistant>", "<system>")
_MERGES = ("t h", "th e", "i n", "a n", "Ġ the", "e r", "o n", "Ã ©", "ð Ł")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(
    vocab_size: int = 288, *, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: special tokens first, then all 256 bytes, a few merges, then filler."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    words = [*SPECIAL_TOKENS, *alphabet, *("".join(merge) for merge in merges)]
    if vocab_size < len(words):
        raise ValueError(f"vocab_size must be at least {len(words)}")
    words += [f"filler{number}" for number in range(vocab_size - len(words))]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0])
    fast.chat_template = chat_template
    return fast


def build_tiny(
    folder: Path,
    family: str,
    seed: int = 0,
    *,
    vocab_size: int = 288,
    context: int = 1024,
    sliding_window: int | None = None,
    chat_template: bool = True,
    tie: bool = True,
    num_layers: int = 2,
    hidden: int = 64,
    config_changes: dict[str, Any] | None = None,
) -> Path:
    """Write a random float32 model of a family of `FAMILIES` and its tokenizer.

    Equal arguments give equal weights. `sliding_window` applies to the layers that the family has
    it for, `ValueError` if it has none; `config_changes` go over everything. Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    made = FAMILIES[family]
    shape |= config_changes or {}
    config = made.config(shape, hidden, num_layers, context, sliding_window)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    _randomize(model, seed, made.spread)
    model.save_pretrained(folder)
    template = CHAT_TEMPLATE if chat_template else None
    build_tokenizer(vocab_size, chat_template=template).save_pretrained(folder)
    return folder


def _randomize(model: Any, seed: int, spread: float = 0.0) -> None:
    """Weights large enough that greedy output wanders instead of repeating one token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif spread:  # else norms stay one, biases stay zero
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
