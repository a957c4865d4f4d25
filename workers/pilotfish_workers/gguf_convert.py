"""Turn a GGUF file into a bf16 folder of the transformers layout.

Run as ``python -m pilotfish_workers.gguf_convert FILE.gguf FOLDER``: in a process of its own, so
that the memory is given back and a caller needs neither torch nor transformers in its process.

transformers reads the weights. What it leaves out is added here: the way the text is cut before
byte-pair merging, the context length in the tokenizer, and an explicit generation config.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


class ConversionError(Exception):
    """The GGUF file, or the folder made from it, is not what it must be."""


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder` (must not exist) from `gguf`, then check it.

    Raises:
        ConversionError: the file needs something that is not known here, or the result is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), dtype=torch.bfloat16, **options, **_dequantize()
    )
    tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(_pre_tokenizer_name(gguf))
    tokenizer.model_max_length = model.config.max_position_embeddings
    # greedy unless a request says otherwise; the ids are the file's
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # some writers use 0600, which a shared cache cannot serve
    check(folder)


def _dequantize() -> dict[str, Any]:
    """Ask for dense weights. Older versions of transformers give no others and lack the class."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _pre_tokenizer_name(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _pre_tokenizer(name: str) -> Any:
    """The cut before merging that a GGUF file only names.

    `smollm`: every digit on its own first, then GPT-2's pattern on the pieces between. Without
    the first step a run of spaces before a digit becomes other tokens than the model was
    trained on.
    """
    from tokenizers import pre_tokenizers

    if name != "smollm":
        raise ConversionError(f"the pre-tokenizer {name!r} is not known here")
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def check(folder: Path) -> None:
    """Raise ConversionError unless `folder` is a whole bf16 chat model with tied embeddings."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a  1"}], tokenize=False, add_generation_prompt=True
    )
    expectations = {
        "all weights are bf16": dtypes == {"BF16"},
        "tied embeddings are stored once": ("lm_head.weight" in names)
        != config.tie_word_embeddings,
        "the vocabularies agree": len(tokenizer) == config.vocab_size,
        "the end token is the config's": tokenizer.eos_token_id == config.eos_token_id,
        "the chat template renders": "a  1" in rendered and tokenizer.eos_token in rendered,
        "text survives the tokenizer": tokenizer.decode(tokenizer.encode("né  42\n 7!"))
        == "né  42\n 7!",
    }
    if failed := [name for name, is_met in expectations.items() if not is_met]:
        raise ConversionError("not true of the converted model: " + "; ".join(failed))


def main(arguments: list[str]) -> int:
    """Command line; the reason of a failure is the last line on standard error."""
    if len(arguments) != 2:
        print("usage: python -m pilotfish_workers.gguf_convert FILE.gguf FOLDER", file=sys.stderr)
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except Exception as error:  # any library may raise here; the caller gets one line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
