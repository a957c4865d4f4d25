"""Tiny random models with a byte-level tokenizer, built in code; nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

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
    """Write a random float32 model of `family` ("llama", "qwen3" or "gpt2") and its tokenizer.

    Equal arguments give equal weights. `sliding_window` (qwen3 only) applies to every second
    layer. Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    builders = {"llama": _llama, "qwen3": _qwen3, "gpt2": _gpt2}
    shape = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    changes = config_changes or {}
    model = builders[family](shape | changes, hidden, num_layers, context, sliding_window)
    _randomize(model, seed)
    model.save_pretrained(folder)
    template = CHAT_TEMPLATE if chat_template else None
    build_tokenizer(vocab_size, chat_template=template).save_pretrained(folder)
    return folder


def _llama(
    shape: dict[str, Any], hidden: int, layers: int, context: int, window: int | None
) -> Any:
    if window is not None:
        raise ValueError("llama has no sliding window")
    return LlamaForCausalLM(LlamaConfig(**_decoder(hidden, layers, context), **shape))


def _qwen3(
    shape: dict[str, Any], hidden: int, layers: int, context: int, window: int | None
) -> Any:
    if window is not None:
        types = ["sliding_attention" if i % 2 else "full_attention" for i in range(layers)]
        shape = {
            "sliding_window": window,
            "use_sliding_window": True,
            "layer_types": types,
        } | shape
    return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **_decoder(hidden, layers, context), **shape))


def _gpt2(shape: dict[str, Any], hidden: int, layers: int, context: int, window: int | None) -> Any:
    if window is not None:
        raise ValueError("gpt2 has no sliding window")
    config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=4, n_positions=context, **shape)
    return GPT2LMHeadModel(config)


def _decoder(hidden: int, layers: int, context: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
    }


def _randomize(model: Any, seed: int) -> None:
    """Weights large enough that greedy output wanders instead of repeating one token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                continue  # norms stay one, biases stay zero
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3)
