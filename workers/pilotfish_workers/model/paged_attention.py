"""Attention over the paged pool, hooked into unchanged transformers models.

Registered through transformers' public `AttentionInterface`. As no mask function bears the same
name, transformers builds no mask; what attention needs travels as one extra keyword argument of
the model's forward, which the supported models hand down to every layer.

The paged pool follows PagedAttention (Kwon et al., arXiv 2309.06180); here pages are gathered
and given to torch's fused `scaled_dot_product_attention`.
"""

from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.kv_pool import KvPool, KvShape
from pilotfish_workers.model.pass_plan import Group, PassPlan

__all__ = ["ATTENTION_NAME", "PLAN_ARGUMENT", "PagedPass", "register"]

ATTENTION_NAME: Final = "pilotfish_paged"
PLAN_ARGUMENT: Final = "pilotfish_pass"

# what models hand to attention functions and which changes nothing for a causal decoder
_HARMLESS: Final = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
)


class PagedPass:
    """One pass under way: its plan, the pool, and a record of which layers called the hook.

    Without a pool it is a probe: it records what each layer would store and attends to nothing.
    """

    def __init__(self, plan: PassPlan, kv: KvPool | None) -> None:
        self.plan = plan
        self.kv = kv
        self.layers: list[int] = []
        self.windows: list[int | None] = []
        self.shapes: dict[int, KvShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store keys and values `[N, num_kv_heads, dim]`, return `[N, num_heads, value_dim]`."""
        self.layers.append(layer)
        self.windows.append(window)
        if self.kv is None:
            self.shapes[layer] = KvShape(key.shape[1], key.shape[2], value.shape[2])
            return query.new_zeros(*query.shape[:2], value.shape[2])
        self.kv.write(layer, self.plan.write_slots, key, value)
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        outputs = [
            _attend(group, query, keys, values, scaling, window) for group in self.plan.groups
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.plan.output_index is not None:
            output = output.index_select(0, self.plan.output_index)
        return output


def _attend(
    group: Group,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
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
    if group.is_folded:
        query = query.reshape(rows, queries, num_kv, repeats, -1).permute(0, 2, 3, 1, 4)
        query = query.reshape(rows, num_kv, repeats * queries, -1)
        mask = group.mask(window, repeats, query.dtype)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        output = output.view(rows, num_kv, repeats, queries, -1).permute(0, 3, 1, 2, 4)
    else:
        query = query.reshape(rows, queries, num_heads, -1).transpose(1, 2)
        mask = group.mask(window, 1, query.dtype)
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=repeats > 1
        ).transpose(1, 2)
    return output.reshape(rows * queries, num_heads, -1)


def _hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: `[1, heads, N, dim]` in, `[1, N, heads, dim]` out."""
    paged = others.pop(PLAN_ARGUMENT, None)
    if not isinstance(paged, PagedPass):
        raise ModelError(
            "this model does not hand the pass's metadata down to attention; "
            "use a model of another family"
        )
    unknown = sorted(name for name in others.keys() - _HARMLESS if others[name] is not None)
    if unknown or attention_mask is not None or dropout:
        reasons = unknown or ["attention_mask" if attention_mask is not None else "dropout"]
        raise ModelError(
            f"this model's attention takes {', '.join(reasons)}, which paged attention does not "
            "serve; use a model of another family"
        )
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ModelError("this model's attention layers do not say which layer they are")
    output = paged.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
        sliding_window,
    )
    return output.unsqueeze(0), None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers; repeating it changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _hook)
