"""Attention over the paged pool, hooked into unchanged transformers models.

Registered through transformers' public `AttentionInterface`. As no mask function bears the same
name, transformers builds no mask. What attention needs to know of the pass is kept beside the
model, one pass a thread, since some models hand no arguments of ours down to their layers.

The paged pool follows PagedAttention (Kwon et al., arXiv 2309.06180); here pages are gathered
and given to torch's fused `scaled_dot_product_attention`, or, where a layer caps its scores or has
sinks, to the same arithmetic written out.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.kv_pool import KvPool, KvShape
from pilotfish_workers.model.pass_plan import Group, PassPlan

__all__ = ["ATTENTION_NAME", "LayerCall", "PagedPass", "register"]

ATTENTION_NAME: Final = "pilotfish_paged"

# what models hand to attention functions and which changes nothing for a causal decoder
_HARMLESS: Final = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
_MAX_SCORES: Final = 1 << 24
"""Numbers that written-out attention holds at a time; more queries are done piece by piece."""

_current = threading.local()


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How one layer calls attention."""

    layer: int
    scaling: float | None = None
    """Factor of the scores; None is one over the root of the key's size."""
    window: int | None = None
    """A query sees the last `window` keys, its own among them; None is all of them."""
    softcap: float | None = None
    """Scores s become c tanh(s / c) before the mask (Gemma 2, arXiv 2408.00118)."""
    sinks: torch.Tensor | None = None
    """`[num_heads]`, a score of each head that takes weight and has no value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention does all that the layer asks for."""
        return self.softcap is None and self.sinks is None


class PagedPass:
    """One pass under way: its plan, the pool, and a record of which layers called the hook.

    Without a pool it is a probe: it records what each layer would store and attends to nothing.
    """

    def __init__(self, plan: PassPlan, kv: KvPool | None) -> None:
        self.plan = plan
        self.kv = kv
        self.calls: list[LayerCall] = []
        self.shapes: dict[int, KvShape] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the pass that models called in this thread attend by."""
        _current.paged = self
        try:
            yield
        finally:
            _current.paged = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Store keys and values `[N, num_kv_heads, dim]`, return `[N, num_heads, value_dim]`."""
        self.calls.append(call)
        if self.kv is None:
            self.shapes[call.layer] = KvShape(key.shape[1], key.shape[2], value.shape[2])
            return query.new_zeros(*query.shape[:2], value.shape[2])
        self.kv.write(call.layer, self.plan.write_slots, key, value)
        keys, values = self.kv.keys[call.layer], self.kv.values[call.layer]
        outputs = [_attend(group, query, keys, values, call) for group in self.plan.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.plan.output_index is not None:
            output = output.index_select(0, self.plan.output_index)
        return output


def _attend(
    group: Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: LayerCall
) -> torch.Tensor:
    """One group's attention, `[G * Q, num_heads, value_dim]`."""
    rows, queries, num_heads, num_kv = (
        group.num_rows,
        group.query_len,
        query.shape[1],
        keys.shape[1],
    )
    repeats = num_heads // num_kv
    if group.query_index is not None:
        query = query.index_select(0, group.query_index)
    key = keys.index_select(0, group.kv_slots).view(rows, group.kv_len, num_kv, -1).transpose(1, 2)
    value = values.index_select(0, group.kv_slots).view(rows, group.kv_len, num_kv, -1)
    value = value.transpose(1, 2)
    if not call.is_plain:
        query = query.reshape(rows, queries, num_kv, repeats, -1).permute(0, 2, 3, 1, 4)
        mask = group.mask(call.window, 1, query.dtype)
        output = _written_out(query, key, value, mask, call).permute(0, 3, 1, 2, 4)
    elif group.is_folded:
        query = query.reshape(rows, queries, num_kv, repeats, -1).permute(0, 2, 3, 1, 4)
        query = query.reshape(rows, num_kv, repeats * queries, -1)
        mask = group.mask(call.window, repeats, query.dtype)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scaling)
        output = output.view(rows, num_kv, repeats, queries, -1).permute(0, 3, 1, 2, 4)
    else:
        query = query.reshape(rows, queries, num_heads, -1).transpose(1, 2)
        mask = group.mask(call.window, 1, query.dtype)
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=call.scaling, enable_gqa=repeats > 1
        ).transpose(1, 2)
    return output.reshape(rows * queries, num_heads, -1)


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, call: LayerCall
) -> torch.Tensor:
    """Attention in plain arithmetic, weights in float32 as transformers' eager attention has them.

    `query` is `[G, num_kv, repeats, Q, dim]`, `key` and `value` `[G, num_kv, L, dim]`, `mask`
    `[G, 1, Q, L]`; returns `[G, num_kv, repeats, Q, value_dim]`.
    """
    rows, num_kv, repeats, queries, dim = query.shape
    length = key.shape[2]
    scaling = dim**-0.5 if call.scaling is None else call.scaling
    step = max(1, _MAX_SCORES // (rows * num_kv * repeats * length))
    outputs = []
    for begin in range(0, queries, step):
        part = query[:, :, :, begin : begin + step]
        # the heads that share a key lie side by side, which spares a copy of it for each of them
        scores = torch.matmul(part.reshape(rows, num_kv, -1, dim), key.transpose(2, 3))
        scores = scores.float().view(*part.shape[:4], length) * scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores += mask[:, :, begin : begin + step].unsqueeze(2)
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, num_kv, repeats, 1, 1)
            scores = torch.cat([scores, sinks.expand(*part.shape[:4], 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length].to(query.dtype)
        output = torch.matmul(weights.reshape(rows, num_kv, -1, length), value)
        outputs.append(output.view(*part.shape[:4], -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)


def _hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: `[1, heads, N, dim]` in, `[1, N, heads, dim]` out."""
    paged = getattr(_current, "paged", None)
    if paged is None:
        raise ModelError("paged attention was called outside a packed pass")
    unknown = sorted(name for name in others.keys() - _HARMLESS if others[name] is not None)
    if attention_mask is not None:
        unknown.append("an attention mask of its own")
    if dropout:
        unknown.append("dropout")
    if is_causal is False:
        unknown.append("keys of later tokens")
    if unknown:
        raise ModelError(
            f"its attention takes {', '.join(unknown)}, which paged attention does not serve"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError("its attention layers do not say which layer they are")
    call = LayerCall(layer, scaling, sliding_window, softcap, s_aux)
    output = paged.attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call
    )
    return output.unsqueeze(0), None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers; repeating it changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _hook)
