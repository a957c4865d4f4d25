"""What a tiny random model of each family is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import AutoConfig

__all__ = ["FAMILIES", "Family"]

_MOE: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT: Final = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True, slots=True)
class Family:
    """How to configure a tiny model of one family.

    Attributes:
        changes: what its configuration has beyond or instead of the common sizes.
        window: the layers that a sliding window applies to: "every" one, the "odd" ones, those
            "after the first", or None where the family has no window.
        spread: standard deviation of the noise that vectors (norms, biases, sinks) get.
    """

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    window: str | None = None
    spread: float = 0.1

    def config(
        self, shape: Mapping[str, Any], hidden: int, layers: int, context: int, window: int | None
    ) -> Any:
        """The configuration of a model with these sizes; `shape` has the last word."""
        sizes = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "max_position_embeddings": context,
        }
        if self.model_type not in ("gpt2", "gpt_bigcode", "gptj"):
            sizes |= {"intermediate_size": 2 * hidden, "num_key_value_heads": 2}
        settings = sizes | self.changes | self._window(window, layers) | shape
        return AutoConfig.for_model(self.model_type, **settings)

    def _window(self, window: int | None, layers: int) -> dict[str, Any]:
        if window is None:
            return {}
        if self.window is None:
            raise ValueError(f"{self.model_type} has no sliding window")
        if self.window == "every":
            return {"sliding_window": window}
        if self.window == "after the first":
            return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
        types = ["sliding_attention" if i % 2 else "full_attention" for i in range(layers)]
        return {"sliding_window": window, "use_sliding_window": True, "layer_types": types}


FAMILIES: Final = {
    "llama": Family("llama", spread=0.0),
    "qwen3": Family("qwen3", {"head_dim": 16}, window="odd", spread=0.0),
    "gpt2": Family("gpt2", spread=0.0),
    "qwen2": Family("qwen2", window="after the first"),
    "mistral": Family("mistral", {"sliding_window": None}, window="every"),
    "gemma": Family("gemma", {"head_dim": 16}),
    # caps far below the defaults, so that they change something with scores and logits this small
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 25.0,
            "layer_types": None,
        },
        window="odd",
    ),
    "gemma3_text": Family("gemma3_text", {"head_dim": 16}, window="odd"),
    "gpt_neox": Family("gpt_neox"),
    "phi": Family("phi"),
    "phi3": Family("phi3", {"pad_token_id": None}, window="every"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", window="odd"),
    "starcoder2": Family("starcoder2", window="every"),
    "stablelm": Family("stablelm"),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0], "pad_token_id": None}),
    "opt": Family("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gptj": Family("gptj", {"rotary_dim": 8}),
    "gpt_bigcode": Family("gpt_bigcode"),
    "granite": Family(
        "granite",
        {
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": Family("cohere", {"logit_scale": 0.25}),
    "cohere2": Family("cohere2", {"logit_scale": 0.25, "head_dim": 16}, window="odd"),
    "nemotron": Family("nemotron"),
    "glm4": Family("glm4", {"head_dim": 16, "pad_token_id": None}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("qwen3_moe", {"head_dim": 16, "num_experts": 4, **_MOE}),
    "olmoe": Family("olmoe", {"num_experts": 4, **_MOE}),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **_MOE,
            **_LATENT,
        },
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **_MOE,
            **_LATENT,
        },
    ),
    "granitemoe": Family(
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    ),
    "phimoe": Family("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Family(
        "qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 48, **_MOE}
    ),
    "exaone4": Family("exaone4", {"head_dim": 16}, window="odd"),
    # its queries grow with the position, here from the 20th on
    "ministral3": Family(
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 20,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 288,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 25.0,
        },
        window="odd",
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        window="odd",
        spread=1.0,
    ),
}
