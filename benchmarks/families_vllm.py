"""Which families of causal language models vLLM samples from as ``local`` computes them.

Each family gets small random weights, of sizes that vLLM's kernels take. The engine's log-probs of the tokens that it
draws are compared with the trainer's, before and after an update: in fp32 on a CPU; in bf16 on a GPU, with the error
that training in bf16 has there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.local import Local
from verl_fn.state import Key, Sampling, pack, requests_for
from verl_fn.steps import adamw, aggregate, ppo_clip

from .families_page import BAR, RIGHT, WRONG
from .tiny_models import tiny_config

# In nats, beside three times the trainer's own error.
BARS = {"float32": BAR, "bfloat16": 1e-3}
MOVED = 0.1  # an update must change log-probs by more, so that an engine with old weights would be noticed

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "n_inner", "d_model", "ffn_dim"), 256),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_rope_head_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    # Attention over latent keys and values is computed at these sizes only.
    "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "sliding_window": 32, "vocab_size": 128,
}  # fmt: skip
MLA = {"v_head_dim": 128, "qk_head_dim": 192, "head_dim": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 256}
# What vLLM reads of a config, as released models have it, and what its kernels take, beside SIZES.
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen3_5_moe_text": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4_moe": {"head_dim": 64},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    **{name: {"attention_multiplier": 0.015625} for name in ("granitemoe", "granitemoeshared")},
    **{name: {"vocab_size_per_layer_input": 128} for name in ("gemma3n_text", "gemma4_text")},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "hunyuan_v1_moe": {"use_qk_norm": True, "moe_intermediate_size": 128, "num_shared_expert": 1,
                       "use_mixed_mlp_moe": True, "moe_topk": 2},
    "lfm2": {"block_dim": 256, "conv_dim": 256},
    "llama4_text": {"num_experts_per_tok": 1, "attention_chunk_size": 32},
    "deepseek_v2": MLA,
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **MLA},
    "glm4_moe_lite": {"topk_method": "noaux_tc", "first_k_dense_replace": 1, **MLA},
    "longcat_flash": MLA,
    # Queries grow with their position from 32 on.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    # vLLM has as many heads of keys as of queries here.
    "phi": {"num_key_value_heads": 4, "intermediate_size": 1024}, "olmo": {"num_key_value_heads": 4},
    # vLLM takes the width of MLPs from the hidden size.
    "falcon": {"ffn_hidden_size": 1024},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 256, **MAMBA},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 64, "chunk_size": 256, "sliding_window": None,
    },
}  # fmt: skip


def sizes_for(name: str) -> dict[str, Any]:
    """Returns the fields of the tiny config of a family, with the sizes that vLLM takes.

    Example:
        >>> sizes_for("llama")["hidden_size"]
        256
    """
    known = tiny_config(name).to_dict()
    return {key: value for key, value in SIZES.items() if key in known} | OWN.get(name, {})


def sampled(folder: Path, device: str) -> dict[str, Any]:
    """Returns how log-probs of vLLM's draws differ from the trainer's. The engine lives as long as this process.

    Returns:
        ``errors``, for each of two versions: by how much the engine's and the trainer's log-probs differ from
        training in fp32, in nats, the largest one on a CPU and the mean on a GPU. ``moved`` is the mean change by an
        update.
    """
    from verl_fn.backends.vllm import Vllm

    dtype = "float32" if device == "cpu" else "bfloat16"
    options: dict[str, Any] = {"device": device, "max_tokens": 4096}
    exact, own = (Local(folder, adamw(1e-2), dtype=each, **options) for each in ("float32", dtype))
    state = exact.load_pretrained(folder)
    more = {} if device == "cpu" else {"engine_kwargs": {"kv_cache_memory_bytes": 2**29}}
    memory: dict[str, Any] = {"slots": 32, "max_length": 256, "gpu_memory_utilization": 0.05, **more}
    engine = Vllm(folder, device=device, dtype=dtype, enforce_eager=True, **memory)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, engine.vocab, (n,), generator=generator).tolist() for n in (1, 7, 40, 100) * 4]
    errors: list[tuple[float, ...]] = []
    for version in range(2):
        engine.publish(version, own.weights(state.params))
        batch = pack(engine.generate(requests_for(prompts, Sampling(64), Key.from_seed(3)), version=version))
        want, ours = (one.forward(state.params, batch, ["logprobs"]).logprobs for one in (exact, own))
        mask = batch["response_mask"].bool()
        gaps = [(found - want)[mask].abs() for found in (batch["rollout_log_probs"], ours)]
        errors.append(tuple(float(gap.max() if dtype == "float32" else gap.mean()) for gap in gaps))
        advantages = torch.randn(len(want), generator=torch.Generator().manual_seed(version))
        ready = aggregate(batch.with_tokens(old_log_probs=want, advantages=advantages))
        grads, _ = exact.forward_backward(state, ready, ppo_clip())
        state, _ = exact.apply_update(state, grads)
    moved = float((exact.forward(state.params, batch, ["logprobs"]).logprobs - want)[mask].abs().mean())
    right = all(engines <= 3 * trainers + BARS[dtype] for engines, trainers in errors) and moved > MOVED
    return {"outcome": RIGHT if right else WRONG, "dtype": dtype, "errors": errors, "moved": moved}
