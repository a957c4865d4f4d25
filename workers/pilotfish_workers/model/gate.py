"""The gate at load: a model is served exactly, or refused with the reason.

Some models ignore the attention hook, some bend it, some scale what comes after. Three checks:
what the configuration says, one probing pass that shows how the hook is called, and comparisons
of packed, ragged, chunked passes over scattered blocks with the model's own plain forward.

What the comparisons cover, with a few dozen tokens however long the model's context is:

- Positions from 0, and with one sequence moved to the end of the context while the others stay.
  Whatever scales by the position is seen in the first, whatever scales by the longest sequence of
  a pass in the second.
- Windows. The pool's own mask applies a window; the model only says how long it is, layer by layer,
  and that must be what its configuration declares, since transformers' caches go by the latter.
  For the second comparison every window that the configuration and the layers name is made short,
  so that the sequences cross it; windows up to 184 tokens are crossed as they are too. What is
  relied on is that a longer window works like the short one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.interface import ModelInfo, Rows
from pilotfish_workers.model.kv_pool import KvPool, KvShape
from pilotfish_workers.model.packed_pass import run_recorded, takes_wanted_rows
from pilotfish_workers.model.paged_attention import ATTENTION_NAME, LayerCall
from pilotfish_workers.model.pass_plan import build_plan

__all__ = ["check_config", "check_exact", "probe"]

_SERVED_LAYERS: Final = {"full_attention", "sliding_attention"}
_RECURRENT_LAYERS: Final = {"conv", "hybrid", "linear_attention", "mamba", "recurrent"}
_FORBIDDEN: Final = {
    "is_encoder_decoder": "it is an encoder-decoder",
    "attention_chunk_size": "its attention is chunked",
    "use_bidirectional_attention": "its attention is bidirectional",
    "num_kv_shared_layers": "some of its layers share keys and values",
    "add_cross_attention": "it has cross-attention",
    "alibi": "its positions enter as an attention bias (ALiBi)",
}
_BLOCK: Final = 4
_LENGTHS: Final = (29, 5, 12)
"""Tokens of the compared sequences; the first one is made longer than short windows."""
_MAX_COMPARED: Final = 192
_SHORT_WINDOW: Final = 7
_TOLERANCE: Final = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Largest difference of a logit, relative to the largest logit."""
_ROWS_WITHIN: Final = {torch.float32: 1.0, torch.bfloat16: 0.75, torch.float16: 0.75}
"""Share of rows that must be within tolerance. In half precision single positions are chaotic: over
random ids, transformers' own two attentions differ at one of twelve by a third of the logits."""
_LAST_ROWS: Final = 8
"""Rows that are looked at once more by themselves: those beyond a window are the last ones."""
_STIFF: Final = "its windows cannot be made short for a trial"
_BROKEN: Final = (TypeError, ValueError, AttributeError, KeyError, RuntimeError)


def check_config(config: Any) -> None:
    """Refuse what the configuration already shows cannot be served. Reads no weights."""
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise _refusal(config, "it has more than one part for text") from error
    for part in (config, text, getattr(text, "attn_config", None)):
        for attribute, reason in _FORBIDDEN.items():
            if getattr(part, attribute, None):
                raise _refusal(config, reason)
    if getattr(text, "is_causal", True) is False:
        raise _refusal(config, "its attention is bidirectional")
    others = set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYERS
    if others:
        names = ", ".join(sorted(others))
        why = "whose state cannot be rolled back"
        if not others & _RECURRENT_LAYERS:
            why = "which paged attention does not serve"
        raise _refusal(config, f"it has layers of type {names}, {why}")


def probe(model: Any, device: torch.device) -> list[KvShape]:
    """Run two tokens to learn what every layer stores.

    `ModelError` unless each layer calls the hook exactly once, in order, with the window that the
    configuration declares, and only the wanted token goes through the output layer.
    """
    config = model.config
    unable = "it cannot be asked for the logits of single tokens"
    if not takes_wanted_rows(model):
        raise _refusal(config, unable)
    plan = build_plan([Rows([0, 0], 0, [0, 1], 1)], 1, 2, device)
    try:
        with torch.inference_mode():
            logits, paged = run_recorded(model, plan, None)
    except ModelError as error:
        raise _refusal(config, str(error)) from error
    except _BROKEN as error:
        raise _refusal(config, f"it does not take a packed pass ({error})") from error
    if logits.shape[0] != 1:
        raise _refusal(config, unable)
    num_layers = config.get_text_config().num_hidden_layers
    layers = [call.layer for call in paged.calls]
    if layers != list(range(num_layers)):
        raise _refusal(
            config,
            f"its {num_layers} layers use the attention registration {len(layers)} times "
            "(it is recurrent, hybrid, or brings its own attention)",
        )
    if [call.window for call in paged.calls] != _declared_windows(config):
        raise _refusal(config, "its layers do not tell attention the window that it declares")
    return [paged.shapes[layer] for layer in layers]


@torch.inference_mode()
def check_exact(model: Any, info: ModelInfo, shapes: list[KvShape]) -> None:
    """Compare packed passes with the model's plain forward; `ModelError` if they differ."""
    holders = _window_holders(model)
    prompts = _prompts([window for _, window in holders], info)
    try:
        _compare(model, _Trial(prompts), shapes)
        remark = "with a sequence at the end of its context, "
        if holders:
            remark += f"and with windows of {_SHORT_WINDOW}, "
        with _windows_at_most(holders, _SHORT_WINDOW):
            if any((window or 0) > _SHORT_WINDOW for window in _declared_windows(model.config)):
                raise _refusal(model.config, _STIFF)
            far = _Trial(prompts, info.context_length - len(prompts[0]), remark)
            _compare(model, far, shapes)
    except _BROKEN as error:
        raise _refusal(model.config, f"it does not run ({error})") from error


@dataclass(frozen=True, slots=True)
class _Trial:
    """One comparison of packed passes with the plain forward."""

    prompts: list[list[int]]
    offset: int = 0
    """Position of the first prompt's first token; the other prompts begin at 0."""
    remark: str = ""

    def positions(self, prompt: int) -> range:
        """Positions of that prompt's tokens as the model is told them."""
        start = 0 if prompt else self.offset
        return range(start, start + len(self.prompts[prompt]))


def _compare(model: Any, trial: _Trial, shapes: list[KvShape]) -> None:
    dtype: torch.dtype = model.dtype
    packed, calls = _packed_logits(model, trial, shapes)
    if [call.window for call in calls] != _declared_windows(model.config):
        raise _refusal(model.config, _STIFF)
    plain = _plain_logits(model, trial, all(call.is_plain for call in calls))
    for expected, actual in zip(plain, packed, strict=True):
        differences = (expected - actual).abs().amax(dim=-1)
        allowed = _TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
        within = (differences <= allowed).float()  # NaN is not within
        share = min(within.mean().item(), within[-_LAST_ROWS:].mean().item())
        if share < _ROWS_WITHIN[dtype]:
            raise _refusal(
                model.config,
                f"{trial.remark}over {len(expected)} tokens its logits differ from the plain "
                f"model's by up to {differences.max().item():.3g}, and {allowed:.3g} is allowed",
            )


def _prompts(windows: list[int], info: ModelInfo) -> list[list[int]]:
    """Ragged prompts of fixed random ids; one is longer than every window that is not too big."""
    crossed = [window + 8 for window in windows if window + 8 <= _MAX_COMPARED]
    lengths = [max([_LENGTHS[0], *crossed]), *_LENGTHS[1:]]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(
            info.vocab_size, (min(length, info.context_length),), generator=generator
        ).tolist()
        for length in lengths
    ]


def _plain_logits(model: Any, trial: _Trial, is_plain: bool) -> list[torch.Tensor]:
    """float32 `[len(prompt), vocab]` each, from transformers' own attention.

    Its fused attention knows neither caps nor sinks, so what `is_plain` is not needs the other.
    """
    model.set_attn_implementation("sdpa" if model._supports_sdpa and is_plain else "eager")
    try:
        return [
            model(
                input_ids=torch.tensor([prompt], device=model.device),
                position_ids=torch.tensor([list(trial.positions(number))], device=model.device),
                use_cache=False,
                return_dict=True,
            )
            .logits[0]
            .float()
            for number, prompt in enumerate(trial.prompts)
        ]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _packed_logits(
    model: Any, trial: _Trial, shapes: list[KvShape]
) -> tuple[list[torch.Tensor], list[LayerCall]]:
    """The same logits in three passes (a chunk, a longer chunk, single tokens) over blocks that
    lie scattered and interleaved, and how the layers called attention in the last one."""
    needed = [-(-len(prompt) // _BLOCK) for prompt in trial.prompts]
    ids = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    kv = KvPool(shapes, sum(needed) * _BLOCK, model.dtype, model.device)
    parts: list[list[torch.Tensor]] = [[] for _ in trial.prompts]
    for step in range(3):
        rows, owners = [], []
        positions: list[int] = []
        for number, (prompt, table) in enumerate(zip(trial.prompts, tables, strict=True)):
            cuts = (0, len(prompt) // 3, len(prompt) - 1, len(prompt))
            span = slice(cuts[step], cuts[step + 1])
            if prompt[span]:
                rows.append(Rows(prompt[span], cuts[step], table, len(prompt[span])))
                owners.append(number)
                positions += trial.positions(number)[span]
        plan = build_plan(rows, _BLOCK, kv.zero_slot, model.device)
        # only the model is told other positions: where keys lie and which are seen stays
        plan.positions = torch.tensor([positions], device=model.device)
        logits, paged = run_recorded(model, plan, kv)
        begin = 0
        for number, row in zip(owners, rows, strict=True):
            parts[number].append(logits[begin : begin + row.num_logits].float())
            begin += row.num_logits
    return [torch.cat(part) for part in parts], paged.calls


def _declared_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer as the configuration has it; None for full attention."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if not types:
        return [window] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _window_holders(model: Any) -> list[tuple[Any, int]]:
    """Everything that names a sliding window, and the window: configurations, whose value makes
    transformers' masks, and layers, whose value attention is told."""
    parts = (part for m in model.modules() for part in (m, getattr(m, "config", None)))
    windows = ((part, getattr(part, "sliding_window", None)) for part in parts)
    found = {id(part): (part, window) for part, window in windows if type(window) is int}
    return list(found.values())


@contextmanager
def _windows_at_most(holders: list[tuple[Any, int]], longest: int) -> Iterator[None]:
    """Shorten every sliding window for a while."""
    try:
        for holder, window in holders:
            holder.sliding_window = min(window, longest)
        yield
    finally:
        for holder, window in holders:
            holder.sliding_window = window


def _refusal(config: Any, reason: str) -> ModelError:
    return ModelError(
        f"this {config.model_type} model cannot be served: {reason}. "
        "Use another model, such as one of the families llama, qwen3, mistral and gemma3"
    )
