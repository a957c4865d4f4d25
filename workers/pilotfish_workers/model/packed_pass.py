"""One packed pass through a transformers model."""

import inspect
from typing import Any

import torch

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.kv_pool import KvPool
from pilotfish_workers.model.paged_attention import PagedPass
from pilotfish_workers.model.pass_plan import PassPlan

__all__ = ["run_pass", "run_recorded", "takes_wanted_rows"]


def takes_wanted_rows(model: Any) -> bool:
    """Whether the model can be asked for the logits of single tokens (`logits_to_keep`)."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def run_pass(model: Any, plan: PassPlan, kv: KvPool) -> torch.Tensor:
    """Run the whole model; only the wanted tokens go through the output layer.

    Returns logits `[M, vocab]` in the model's dtype. They come out of the causal LM's own forward,
    so that whatever it does after its output layer (soft capping, scales) is done here too.
    """
    logits, paged = run_recorded(model, plan, kv)
    if len(paged.calls) != len(kv.shapes):
        raise ModelError(f"attention ran in {len(paged.calls)} layers instead of {len(kv.shapes)}")
    return logits


def run_recorded(model: Any, plan: PassPlan, kv: KvPool | None) -> tuple[torch.Tensor, PagedPass]:
    """The same, and the record of the attention calls beside it.

    Without a pool nothing is stored nor attended to, and the logits mean nothing.
    """
    paged = PagedPass(plan, kv)
    with paged.running():
        logits: torch.Tensor = model(
            input_ids=plan.token_ids,
            position_ids=plan.positions,
            logits_to_keep=plan.logit_index,
            use_cache=False,
            return_dict=True,
        ).logits[0]
    return logits, paged
