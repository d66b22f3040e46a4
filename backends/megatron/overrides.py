"""Fields of Megatron-Bridge's provider that a user sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_fn.backends.hf.config import ModelError
from verl_fn.errors import did_you_mean

# What this backend decides itself; a provider's override of these would break what it promises.
DECIDED = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size",
    "sequence_parallel", "params_dtype", "bf16", "fp16", "pipeline_dtype", "autocast_dtype", "hidden_dropout",
    "attention_dropout", "calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func",
    "share_embeddings_and_output_weights", "vocab_size", "perform_initialization", "use_cpu_initialization",
    "moe_enable_routing_replay", "mtp_num_layers", "use_mup",
})  # fmt: skip
# What the model's folder decides.
OF_FOLDER = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk",
})  # fmt: skip
# What makes a step depend on more than its arguments, or differ each time.
IMPURE = {
    "moe_router_enable_expert_bias": "changes between calls a buffer of the model that no state holds",
    "moe_router_bias_update_rate": "changes between calls a buffer of the model that no state holds",
    "moe_input_jitter_eps": "draws random numbers in each pass",
    "moe_router_force_load_balancing": "draws random experts in each pass",
    "moe_router_force_biased": "draws random numbers for each layer",
    "moe_expert_capacity_factor": "drops tokens by what else is in their micro-batch",
}
# A loss that a router adds, and the field without which it is not computed.
ROUTER_LOSS, ROUTER_LOSS_TYPE = "moe_aux_loss_coeff", "moe_router_load_balancing_type"
# Kinds of load balancing with which megatron-core computes something else than their name says, or no pure function.
BALANCING = {
    "seq_aux_loss": "takes rows that lie end to end for one row",
    "global_aux_loss": "is divided by the number of ranks with rows of their own (NVIDIA/Megatron-LM#3672)",
    "sinkhorn": "picks a token's experts by what else is in its micro-batch",
    "quantile_balancing": "changes between calls a buffer of the model that no state holds",
}
# What only transformer-engine's attention reads.
OF_ATTENTION = frozenset({
    "attention_backend", "cp_comm_type", "fp8_dot_product_attention", "fp8_multi_head_attention",
    "log_max_attention_logit", "qk_clip",
})  # fmt: skip


def checked(provider: Any, overrides: Mapping[str, Any], folder: str | Path) -> Mapping[str, Any]:
    """Returns the overrides of a provider.

    Raises:
        ModelError: a field does not exist, is decided by this backend or by the folder, or has a value of another
            type.
    """
    fields = {field.name for field in dataclasses.fields(provider)}
    settable = sorted(fields - DECIDED - OF_FOLDER - IMPURE.keys())
    for name in overrides:
        if name in DECIDED:
            raise ModelError(f"{folder}: the provider's field {name} cannot be set; this backend decides it")
        if name in IMPURE and overrides[name] not in (None, False):
            raise ModelError(f"{folder}: the provider's field {name} cannot be set; it {IMPURE[name]}")
        if name in OF_FOLDER:
            raise ModelError(f"{folder}: the provider's field {name} cannot be set; config.json decides it")
        if name not in fields:
            raise ModelError(
                f"{folder}: {type(provider).__name__} has no field {name} that override_transformer_config could "
                f"set{did_you_mean(name, settable)}"
            )
        default, value = getattr(provider, name), overrides[name]
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ModelError(f"{folder}: the provider's field {name} is {value!r}; it must be true or false")
        if isinstance(default, int | float) and not isinstance(default, bool) and isinstance(value, str | bool):
            raise ModelError(
                f"{folder}: the provider's field {name} is {value!r}; it must be a number, as {default!r}"
            )
    kinds = overrides.get(ROUTER_LOSS_TYPE, "none")
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in BALANCING:
            raise ModelError(
                f"{folder}: the provider's field {ROUTER_LOSS_TYPE} is {kind!r}, which {BALANCING[kind]}; set it to "
                "aux_loss, or leave it out"
            )
    if overrides.get(ROUTER_LOSS) and overrides.get(ROUTER_LOSS_TYPE, "none") == "none":
        raise ModelError(
            f"{folder}: the provider's field {ROUTER_LOSS} does nothing without {ROUTER_LOSS_TYPE}, such as aux_loss"
        )
    return overrides
