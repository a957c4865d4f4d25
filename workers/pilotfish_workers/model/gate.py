"""The gate at load: a model is served exactly, or refused with the reason.

Some models ignore the attention hook, some bend it, some scale what comes after. Three checks:
what the configuration says, one probing pass that shows how the hook is called, and a comparison
of packed, ragged, chunked passes over scattered blocks with the model's own plain forward.
"""

from typing import Any, Final

import torch

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.interface import ModelInfo, Rows
from pilotfish_workers.model.kv_pool import KvPool, KvShape
from pilotfish_workers.model.packed_pass import run_base, run_pass
from pilotfish_workers.model.paged_attention import ATTENTION_NAME
from pilotfish_workers.model.pass_plan import build_plan

__all__ = ["check_config", "check_exact", "probe"]

_SERVED_LAYERS: Final = {"full_attention", "sliding_attention"}
_ROPE_BY_LONGEST: Final = {"dynamic", "longrope"}
_LOGIT_SCALES: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_FORBIDDEN: Final = {
    "is_encoder_decoder": "it is an encoder-decoder",
    "attention_chunk_size": "its attention is chunked",
    "use_bidirectional_attention": "its attention is bidirectional",
    "num_kv_shared_layers": "some of its layers share keys and values",
    "add_cross_attention": "it has cross-attention",
    "alibi": "its positions enter as an attention bias (ALiBi)",
}
_BLOCK: Final = 4
_MAX_COMPARED: Final = 192
"""Tokens of the longest compared sequence; windows above that are not crossed at load."""
_TOLERANCE: Final = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Largest difference of a logit, relative to the largest logit."""
_ROWS_WITHIN: Final = {torch.float32: 1.0, torch.bfloat16: 0.75, torch.float16: 0.75}
"""Share of rows that must be within tolerance. In half precision single positions are chaotic: over
random ids, transformers' own two attentions differ at one of twelve by a third of the logits."""
_LAST_ROWS: Final = 8
"""Rows that are looked at once more by themselves: those beyond a window are the last ones."""


def check_config(config: Any) -> None:
    """Refuse what the configuration already shows cannot be served. Reads no weights."""
    for attribute, reason in _FORBIDDEN.items():
        if getattr(config, attribute, None):
            raise _refusal(config, reason)
    if getattr(config, "is_causal", True) is False:
        raise _refusal(config, "its attention is bidirectional")
    for attribute in _LOGIT_SCALES:
        if getattr(config, attribute, None) not in (None, 1, 1.0):
            raise _refusal(config, f"it changes its logits by {attribute}")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if others:
        raise _refusal(
            config, f"it has layers of type {', '.join(others)}, whose state cannot be rolled back"
        )
    rope = _rope_types(config) & _ROPE_BY_LONGEST
    if rope:
        raise _refusal(
            config,
            f"its {rope.pop()} rope scales by the longest sequence of a pass, "
            "so that sequences would change each other",
        )


def probe(model: Any, device: torch.device) -> list[KvShape]:
    """Run one token to learn what every layer stores.

    `ModelError` unless each layer calls the hook exactly once, in order, with our metadata.
    """
    config = model.config
    plan = build_plan([Rows([0], 0, [0], 0)], 1, 1, device)
    try:
        with torch.inference_mode():
            _, paged = run_base(model, plan, None)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise _refusal(config, f"it does not take a packed pass ({error})") from error
    num_layers = config.num_hidden_layers
    if paged.layers != list(range(num_layers)):
        raise _refusal(
            config,
            f"{len(paged.layers)} of its {num_layers} layers use the attention registration "
            "(it is recurrent, hybrid, or brings its own attention)",
        )
    expected, seen = _declared_windows(config), paged.windows
    if seen != expected:
        raise _refusal(config, "its layers do not tell attention the window that it declares")
    return [paged.shapes[layer] for layer in range(num_layers)]


@torch.inference_mode()
def check_exact(model: Any, info: ModelInfo, shapes: list[KvShape]) -> None:
    """Compare packed passes with the model's plain forward; `ModelError` if they differ."""
    device: torch.device = model.device
    dtype: torch.dtype = model.dtype
    prompts = _prompts(model.config, info)
    expected = _plain_logits(model, prompts, device)
    actual = _packed_logits(model, prompts, shapes, dtype, device)
    for prompt, plain, packed in zip(prompts, expected, actual, strict=True):
        differences = (plain - packed).abs().amax(dim=-1)
        allowed = _TOLERANCE[dtype] * max(1.0, plain.abs().max().item())
        within = (differences <= allowed).float()  # NaN is not within
        share = min(within.mean().item(), within[-_LAST_ROWS:].mean().item())
        if share < _ROWS_WITHIN[dtype]:
            raise _refusal(
                model.config,
                f"over {len(prompt)} tokens its logits differ from the plain model's by up to "
                f"{differences.max().item():.3g}, and {allowed:.3g} is allowed",
            )


def _prompts(config: Any, info: ModelInfo) -> list[list[int]]:
    """Ragged prompts of fixed random ids; one is longer than every window that is not too big."""
    windows = {window for window in _declared_windows(config) if window is not None}
    crossed = [window + 8 for window in windows if window + 8 <= _MAX_COMPARED]
    lengths = [max([21, *crossed]), 5, 12]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(
            info.vocab_size, (min(length, info.context_length),), generator=generator
        ).tolist()
        for length in lengths
    ]


def _plain_logits(model: Any, prompts: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """float32 `[len(prompt), vocab]` each, from transformers' own attention."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        return [
            model(input_ids=torch.tensor([prompt], device=device), use_cache=False)
            .logits[0]
            .float()
            for prompt in prompts
        ]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _packed_logits(
    model: Any,
    prompts: list[list[int]],
    shapes: list[KvShape],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """The same logits in three passes (a chunk, a longer chunk, single tokens) over blocks that
    lie scattered and interleaved."""
    needed = [-(-len(prompt) // _BLOCK) for prompt in prompts]
    ids = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    kv = KvPool(shapes, sum(needed) * _BLOCK, dtype, device)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(3):
        rows, owners = [], []
        for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
            cuts = (0, len(prompt) // 3, len(prompt) - 1, len(prompt))
            chunk = prompt[cuts[step] : cuts[step + 1]]
            if chunk:
                rows.append(Rows(chunk, cuts[step], table, len(chunk)))
                owners.append(number)
        logits = run_pass(model, build_plan(rows, _BLOCK, kv.zero_slot, device), kv).float()
        begin = 0
        for number, row in zip(owners, rows, strict=True):
            parts[number].append(logits[begin : begin + row.num_logits])
            begin += row.num_logits
    return [torch.cat(part) for part in parts]


def _declared_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer as the configuration has it; None for full attention."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _rope_types(config: Any) -> set[str]:
    """Every rope type that the configuration names, also where it has one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    groups = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {kind for group in groups if (kind := group.get("rope_type") or group.get("type"))}


def _refusal(config: Any, reason: str) -> ModelError:
    return ModelError(
        f"this {config.model_type} model cannot be served: {reason}. "
        "Use another model, such as one of the families llama, qwen3 and gpt2"
    )
