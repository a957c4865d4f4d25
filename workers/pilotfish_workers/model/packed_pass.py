"""One packed pass through a transformers model."""

from typing import Any

import torch

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.kv_pool import KvPool
from pilotfish_workers.model.paged_attention import PLAN_ARGUMENT, PagedPass
from pilotfish_workers.model.pass_plan import PassPlan

__all__ = ["run_base", "run_pass"]


def run_base(model: Any, plan: PassPlan, kv: KvPool | None) -> tuple[torch.Tensor, PagedPass]:
    """Run the model without its output layer.

    Returns hidden states `[N, hidden]` and the record of the attention calls.
    """
    paged = PagedPass(plan, kv)
    output = model.base_model(
        input_ids=plan.token_ids,
        position_ids=plan.positions,
        use_cache=False,
        return_dict=True,
        **{PLAN_ARGUMENT: paged},
    )
    return output.last_hidden_state[0], paged


def run_pass(model: Any, plan: PassPlan, kv: KvPool) -> torch.Tensor:
    """Run the whole model; only the wanted tokens go through the output layer.

    Returns logits `[M, vocab]` in the model's dtype.
    """
    hidden, paged = run_base(model, plan, kv)
    if len(paged.layers) != len(kv.shapes):
        raise ModelError(f"attention ran in {len(paged.layers)} layers instead of {len(kv.shapes)}")
    logits: torch.Tensor = model.get_output_embeddings()(hidden.index_select(0, plan.logit_index))
    return logits
