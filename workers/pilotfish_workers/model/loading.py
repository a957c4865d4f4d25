"""From a folder or hub id to a transformers model, with errors that say what to do."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.paged_attention import ATTENTION_NAME, register

__all__ = [
    "LoadedModel",
    "context_length_of",
    "eos_ids_of",
    "load_config",
    "load_model",
    "resolve_device",
    "resolve_dtype",
]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model in evaluation mode and the folder that its files lie in."""

    model: Any
    folder: Path


def resolve_device(device: str) -> torch.device:
    """`auto | cpu | cuda[:n]` to a device that exists here, or `ModelError`."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ModelError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:0")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(number or 0)
    if index >= count:
        raise ModelError(
            f"device {device!r} does not exist: torch sees {count} CUDA devices; use auto or cpu"
        )
    return torch.device("cuda", index)


def resolve_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """The dtype to run in. `auto` is the checkpoint's own, float32 for float16 on a CPU."""
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ModelError(f"unknown dtype {dtype!r}: use auto, {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    stored = getattr(config, "dtype", None)
    if isinstance(stored, str):
        stored = getattr(torch, stored.removeprefix("torch."), None)
    if not isinstance(stored, torch.dtype) or stored not in _DTYPES.values():
        return torch.float32
    if stored == torch.float16 and device.type == "cpu":
        return torch.float32  # a CPU computes float16 slowly and with more error
    return stored


def load_config(path: str) -> Any:
    """The model's configuration, without running any code that comes with it."""
    _check_exists(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load the model {path!r}: {_first_line(error)}") from error


def load_model(path: str, config: Any, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The model with our attention chosen, on `device`, in evaluation mode."""
    register()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
        )
        folder = Path(str(cached_file(path, "config.json"))).parent
    except (OSError, ValueError, KeyError, ImportError) as error:
        if ATTENTION_NAME in str(error):  # it looks attention up in a table of its own
            raise ModelError(
                f"this {config.model_type} model cannot be served: it brings its own attention. "
                "Use another model, such as one of the families llama, qwen3, mistral and gemma3"
            ) from error
        raise ModelError(f"cannot load the model {path!r}: {_first_line(error)}") from error
    try:
        model = model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{path!r} does not fit into the memory of {device}: use another device or dtype"
        ) from error
    return LoadedModel(model, folder)


def eos_ids_of(model: Any) -> tuple[int, ...]:
    """Ids that end an output: the generation configuration's, else the model's own.

    The same precedence as transformers' `generate`, so that outputs end where its do.
    """
    for source in (getattr(model, "generation_config", None), model.config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return tuple(sorted({value} if isinstance(value, int) else set(value)))
    return ()


def context_length_of(config: Any) -> int:
    """Most tokens that the model was made for, or `ModelError`.

    A long rope changes its frequencies for the whole pass once the longest sequence is over its
    original length, so that sequences would change each other; such a model is served up to there.
    (A dynamic rope does so over `max_position_embeddings`, which is the end anyhow.)
    """
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return min([value, *_long_rope_lengths(text)])
    raise ModelError(
        f"the configuration of this {config.model_type} model names no max_position_embeddings"
    )


def _long_rope_lengths(config: Any) -> list[int]:
    """Original lengths of the long ropes, of which a model may have one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    groups = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return [
        group["original_max_position_embeddings"]
        for group in groups
        if group.get("rope_type") == "longrope" and "original_max_position_embeddings" in group
    ]


def _check_exists(path: str) -> None:
    """Tell a folder that is missing from a hub id, which transformers' own message does not."""
    looks_local = path.startswith((".", "~", os.sep)) or path.count("/") > 1
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"the folder {path!r} has no config.json, so it holds no model")
    elif looks_local or Path(path).exists():
        raise ModelError(f"there is no model folder {path!r}: check the path")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
