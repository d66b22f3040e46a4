"""Which families of causal language models ``local`` computes right: log-probs and gradients beside transformers'.

For each name that transformers maps to a causal language model, a tiny model with random weights is saved as a
folder. The backend's log-probs, and the gradient of their sum, are compared with transformers' own forward of each
row by itself (eager attention, float64). The embedded engine then samples from the model, and its log-probs are
compared with the backend's.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.hf.checks import kernels_for
from verl_fn.backends.hf.config import quiet, reason
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.state import Batch, Key, Sampling, pack, requests_for
from verl_fn.steps import aggregate, cross_entropy, sgd

from . import measure

# Log-probs in nats; gradients relative to the norm of each parameter's.
BAR = 1e-4
# A parameter whose gradient is smaller, relative to the whole gradient, is compared as if it were as large: softmax
# ignores the bias of keys, so that its gradient is rounding.
NOISE = 1e-3
RIGHT, WRONG, REFUSED, NO_MODEL = "right", "wrong", "refused", "no tiny model"
ROWS = ([5, 9, 13, 7, 11, 3, 8, 21, 40, 2], [4, 12, 6], [33, 17, 10, 19, 50, 28, 1], [60, 14, 61, 15])
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


def tiny_config(name: str, **sizes: Any) -> Any:
    """Returns the config of a family with tiny sizes, or the ones that are given.

    Example:
        >>> config = tiny_config("qwen3")
        >>> config.hidden_size, config.num_hidden_layers, config.vocab_size
        (32, 4, 67)
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


def tiny_folder(name: str, out: str | Path, **sizes: Any) -> Path:
    """Saves a tiny model of a family with random weights; ``sizes`` replace the tiny ones.

    Raises:
        Exception: whatever transformers raises for these sizes.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **sizes)
    with torch.random.fork_rng(devices=[]), quiet(), kernels_for("cpu", AutoModelForCausalLM, config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        model.save_pretrained(out)
    return Path(out)


def reference(
    folder: Path, batch: Batch, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, dict[str, torch.Tensor], str]:
    """Returns log-probs and gradients of transformers' own forward of each row, and the name of its class."""
    from transformers import AutoModelForCausalLM

    with quiet():
        # Grouped products of experts have no float64.
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    logprobs = torch.zeros(batch.num_tokens)
    total = torch.zeros(())
    start = 0
    for row in batch.rows():
        own = model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        drawn = own.gather(1, row[1:, None])[:, 0]
        logprobs[start + 1 : start + len(row)] = drawn.detach()
        total = total - drawn.sum()
        start += len(row)
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs, grads, type(model).__name__


def compare(folder: Path, row_layout: str = "auto") -> dict[str, Any]:
    """Returns how ``local`` and the embedded engine compute a folder's model, beside transformers."""
    rows = [list(row) for row in ROWS]
    mask = [[0.0] + [1.0] * (len(row) - 1) for row in rows]
    batch = aggregate(Batch.from_rows(rows, {"response_mask": mask}), "token-mean")
    count = float(batch["response_mask"].sum())
    expected, grads, model = reference(folder, batch)
    backend = Local(folder, sgd(0.0), row_layout=row_layout, max_tokens=20)
    state = backend.load_pretrained()
    found = backend.forward(state.params, batch, ["logprobs"]).logprobs
    result: dict[str, Any] = {"model": model, "layout": backend._built().fit.layout}
    result["logprobs"] = float((found - expected * batch["response_mask"]).abs().max())
    own, _ = backend.forward_backward(state, batch, cross_entropy())
    result |= _gradients({name: g * count for name, g in own.items()}, grads)
    bar = BAR
    if result["gradient"] > BAR:
        # Linear attention of transformers' own is no more exact than this in fp32 on some CPUs.
        _, rounded, _ = reference(folder, batch, torch.float32)
        result["gradient_of_transformers"] = _gradients(rounded, grads)["gradient"]
        bar = max(BAR, 2 * result["gradient_of_transformers"])
    result["outcome"] = RIGHT if result["logprobs"] <= BAR and result["gradient"] <= bar else WRONG
    sampler = Sampler(folder, slots=3)
    sampler.publish(0, backend.weights(state.params))
    asked = requests_for([rows[0][:4], rows[1]], Sampling(6, n=2), Key.from_seed(1))
    drawn = pack(sampler.generate(asked, version=0))
    again = backend.forward(state.params, drawn, ["logprobs"]).logprobs
    result["sampled"] = float((again - drawn["rollout_log_probs"]).abs().max())
    return result


def _gradients(own: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> dict[str, Any]:
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    worst: dict[str, Any] = {"gradient": 0.0, "parameter": ""}
    for name, g in own.items():
        theirs = grads.get(name, torch.zeros_like(g))
        error = float((g - theirs).norm() / torch.maximum(theirs.norm(), NOISE * norm))
        if not error <= worst["gradient"]:
            worst = {"gradient": error, "parameter": name}
    missing = sorted(grads.keys() - own.keys())
    if missing:
        worst = {"gradient": float("inf"), "parameter": missing[0]}
    ours = torch.stack([g.norm() for g in own.values()]).norm()
    return {"grad_norm": float((ours - norm).abs() / norm), **worst}


def family(name: str) -> dict[str, Any]:
    """Returns the outcome of a family, also if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny_folder(name, folder)
        except Exception as error:
            return {"outcome": NO_MODEL, "why": reason(error)}
        return outcome(Path(folder))


def outcome(folder: Path) -> dict[str, Any]:
    """Returns what ``compare`` returns, or why a folder's model is refused."""
    try:
        return compare(folder)
    except Exception as error:
        return {"outcome": REFUSED, "why": reason(error).replace(f"{folder}: ", "").replace(f"{folder}/", "")}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the results as a page of the docs."""
    of = {kind: [name for name, r in results.items() if r["outcome"] == kind] for kind in (RIGHT, WRONG, REFUSED)}
    packed = [name for name in of[RIGHT] if results[name]["layout"] == "packed"]
    padded = [name for name in of[RIGHT] if results[name]["layout"] == "padded"]
    lines = [
        "# Families of models",
        "",
        "`verl-fn bench families --page docs/families.md` makes this page. It gives each causal language model of",
        "transformers tiny sizes and random weights, and compares log-probs and gradients of `local` in fp32 on a",
        f"CPU with transformers' own forward of each row in float64. Of {len(results)} names, {len(of[RIGHT])} are",
        f"right within {BAR:g} (a gradient within twice the error of transformers' own in fp32, if that is more),",
        f"{len(of[WRONG])} are wrong, and {len(of[REFUSED])} are refused. With",
        "`--model FOLDER` the command does the same for a model of yours. `fsdp` runs the same code on shards; what",
        "[Megatron](megatron.md) runs is another list.",
        "",
        f"Rows are packed end to end for {len(packed)} families, and padded on the right for {len(padded)}, whose",
        "layers do not keep packed rows apart or have attention that packed rows lack. `model.layout` chooses, and",
        "`--check` says why rows are padded. The embedded engine has a cache for families with packed rows; for the",
        "others it computes whole rows for every token, so use [vLLM](vllm.md) on a GPU. There,",
        "linear attention and state-space layers are fast with the kernels of the extra `verl_fn[linear-attention]`,",
        "and a run names the packages that are missing.",
        "",
        "| family | rows | log-probs, nats | gradient of the worst parameter | engine beside trainer, nats |",
        "|---|---|---|---|---|",
    ]
    for name in (*of[RIGHT], *of[WRONG]):
        r = results[name]
        errors = " | ".join(f"{r[key]:.1e}" for key in ("logprobs", "gradient", "sampled"))
        lines.append(f"| {name}{' (wrong)' if name in of[WRONG] else ''} | {r['layout']} | {errors} |")
    lines += ["", "| refused | reason |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for name in of[REFUSED]:
        why = re.sub(r"^\w*Error: |\w+(?= is not causal)", "", results[name]["why"]).strip()
        reasons.setdefault(why.partition(";")[0][:160].replace("|", "\\|"), []).append(name)
    lines += [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
    without = [name for name, r in results.items() if r["outcome"] == NO_MODEL]
    lines += ["", f"transformers makes no tiny model of {', '.join(without)} with these sizes.", ""]
    return "\n".join(lines)


def main(args: Sequence[str]) -> int:
    parser = measure.parser("families", (__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="families, such as qwen3; by default all that transformers has")
    parser.add_argument("--model", metavar="DIR", help="a model folder of yours instead")
    parser.add_argument("--page", metavar="F", help="write the results as a page in Markdown here")
    options = parser.parse_args(args)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = options.names or ([options.model] if options.model else list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    results = {}
    for name in names:
        results[name] = r = outcome(Path(name)) if options.model else family(name)
        about = f"{r['layout']:7} {r['logprobs']:.1e} {r['gradient']:.1e}" if "layout" in r else r["why"]
        print(f"{name:24} {r['outcome']:8} {about}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in Counter(r["outcome"] for r in results.values()).items()))
    measure.write(options.json, "families", "cpu", {"results": results})
    if options.page:
        Path(options.page).write_text(page(results), encoding="utf-8")
    return int(any(r["outcome"] == WRONG for r in results.values()))
