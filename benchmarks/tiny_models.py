"""Tiny models of every family of causal language models that transformers has, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.hf.checks import kernels_for
from verl_fn.backends.hf.config import only_transformers, quiet

SIZES: dict[str, Any] = {
    # The widths of attention and MLPs, under each name that a family gives them.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_lm_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_channels", "head_size", "hidden_size_per_layer_input", "d_kv", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank"), 16),
    # Layers.
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "num_mem_blocks"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "mtp_num_layers"), 0),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "n_shared_experts"), 1),
    "zero_expert_num": 1,
    # State-space layers, linear attention and convolutions.
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads", "mamba_ngroups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "time_step_rank"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("ssm_state_size", "chunk_size", "mamba_chunk_size", "block_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "lru_width", "mamba_dt_rank"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    "mamba_d_ssm": 64,
    "max_inference_chunksize": 64,
    # Windows and lengths: rows are longer than the windows.
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size", "index_topk"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 128),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "hash_vocab"), 67),
}
# What a family needs beside SIZES.
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    # A cap that changes scores of this size.
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "use_mamba_kernels": False},
    # transformers' own code for chunks is right for rows of one chunk only.
    "nemotron_h": {"chunk_size": 16, "use_mamba_kernels": False},
    "zamba2": {
        "chunk_size": 16, "use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32}},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}  # fmt: skip
# The sizes that vLLM's kernels take.
VLLM_SIZES: dict[str, Any] = {
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
# What vLLM reads of a config, as released models have it, and what its kernels take, beside VLLM_SIZES.
VLLM_OWN: dict[str, dict[str, Any]] = {
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


def tiny_config(name: str, **sizes: Any) -> Any:
    """Returns the config of a family with tiny sizes, or the ones that are given.

    Example:
        >>> config = tiny_config("qwen3")
        >>> config.hidden_size, config.num_hidden_layers, config.vocab_size
        (32, 4, 67)
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    only_transformers()
    return _tiny(CONFIG_MAPPING[name], OWN.get(name, {}) | sizes)


def _tiny(kind: Any, own: dict[str, Any]) -> Any:
    default = kind()
    given: dict[str, Any] = {}
    for name, value in vars(default).items():
        if hasattr(value, "get_text_config"):
            given[name] = _tiny(type(value), {}).to_dict()
        elif name in SIZES and (value is None or type(value) in (int, str)):
            given[name] = SIZES[name]
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and value is not None:
            given[name] = 0
        elif type(value) is float and ("dropout" in name or name.endswith("_pdrop")):
            given[name] = 0.0
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    return kind(**(given | own))


def vllm_sizes(name: str) -> dict[str, Any]:
    """Returns the fields of the tiny config of a family, with the sizes that vLLM takes.

    Example:
        >>> vllm_sizes("llama")["hidden_size"]
        256
    """
    known = tiny_config(name).to_dict()
    return {key: value for key, value in VLLM_SIZES.items() if key in known} | VLLM_OWN.get(name, {})


def tiny_like(config: Any, *, vllm: bool = False) -> Any:
    """Returns a tiny config of the same family that keeps what is no size: tied embeddings, biases, activations.

    Args:
        config: of a model of any size.
        vllm: with the least sizes that vLLM's kernels take.

    Example:
        >>> tiny_like(tiny_config("llama", tie_word_embeddings=True, hidden_size=64)).hidden_size
        32
    """
    text = config.get_text_config()
    kept = {
        name: value
        for name, value in text.to_diff_dict().items()
        if isinstance(value, bool | str) and name not in SIZES and name not in ("model_type", "dtype")
    }
    return tiny_config(text.model_type, **((vllm_sizes(text.model_type) if vllm else {}) | kept))


def tiny_folder(name: str, out: str | Path, **sizes: Any) -> Path:
    """Saves a tiny model of a family with random weights; ``sizes`` replace the tiny ones.

    Raises:
        Exception: whatever transformers raises for these sizes.
    """
    return random_folder(tiny_config(name, **sizes), out)


def random_folder(config: Any, out: str | Path) -> Path:
    """Saves a model of a config with random weights in every tensor.

    Raises:
        Exception: whatever transformers raises for this config.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), quiet(), kernels_for("cpu", AutoModelForCausalLM, config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
                else:
                    # Norms of 1 and biases of 0 hide that one stands where another belongs.
                    p.add_(torch.randn(p.shape), alpha=0.1)
            saved = model.state_dict()
            for name, b in model.named_buffers():
                # Others, such as masks, are what the architecture says.
                if name in saved and b.dim() == 1 and b.is_floating_point():
                    b.add_(torch.randn(b.shape), alpha=0.1)
        model.save_pretrained(out)
    return Path(out)
