"""The page of the docs that tells which families are right, made of the results in ``benchmarks/results``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RIGHT, WRONG, REFUSED, NO_MODEL = "right", "wrong", "refused", "no tiny model"
# Log-probs in nats; gradients relative to the norm of each parameter's.
BAR = 1e-4
RESULTS = {
    "local": "families_cpu", "fsdp": "families_fsdp_cpu", "megatron bf16": "families_megatron_h100",
    "megatron fp32": "families_megatron_h100_fp32", "vllm fp32": "families_vllm_cpu",
    "vllm bf16": "families_vllm_h200",
}  # fmt: skip
# The first families by downloads.
POPULAR = {
    "Qwen2.5": "qwen2", "Qwen3": "qwen3", "Qwen3-MoE": "qwen3_moe", "Qwen3.5": "qwen3_5_text", "Llama 3": "llama",
    "Llama 4": "llama4_text", "Gemma 2": "gemma2", "Gemma 3": "gemma3_text", "Gemma 4": "gemma4_text",
    "Mistral": "mistral", "gpt-oss": "gpt_oss", "Phi-4": "phi3", "OLMo 3": "olmo3", "GLM-4.x": "glm4_moe",
    "DeepSeek-V3": "deepseek_v3",
}  # fmt: skip


OF_VLLM = (
    "`--backend vllm` compares the log-probs of [vLLM](vllm.md)'s draws with the trainer's, before and after an",
    f"update: in fp32 on a CPU within {BAR:g} nats for each token; in bf16 on an H200 on average within three",
    "times what training in bf16 differs from fp32, plus 0.001. The column has the dtypes in which that holds,",
    "or by how many nats log-probs differ in fp32: use the embedded engine for such a family. An empty cell means",
    "that it was not run, or that vLLM does not run it at these sizes.",
)


def page(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns the results of all backends as a page of the docs.

    Args:
        results: by the names of ``RESULTS``, and by family.
    """
    own = results["local"]
    of = {kind: [name for name, r in own.items() if r["outcome"] == kind] for kind in (RIGHT, WRONG, REFUSED)}
    packed = [name for name in of[RIGHT] if own[name]["layout"] == "packed"]
    padded = [name for name in of[RIGHT] if own[name]["layout"] == "padded"]
    slow = [name for name in of[RIGHT] if not own[name]["cached"]]
    lines = [
        "# Families of models",
        "",
        "`verl-fn bench families` gives each causal language model of transformers tiny sizes and random weights.",
        "It compares log-probs and gradients of `local` in fp32 on a CPU with transformers' own forward of each row",
        f"in float64. Of {len(own)} names, {len(of[RIGHT])} are right within {BAR:g} (a gradient within twice the",
        f"error of transformers' own in fp32, if that is more), {len(of[WRONG])} are wrong, and {len(of[REFUSED])}",
        "are refused. `--backend fsdp` does the same with two ranks, `--backend megatron:bf16` on a GPU with",
        "[Megatron](megatron.md), and `--model FOLDER` with a model of yours. `--page docs/families.md` makes this",
        "page of the results in `benchmarks/results/families_*.json`.",
        "",
        "## Families that most people use",
        "",
        "| family | local | fsdp, 2 ranks | Megatron, H100 | embedded engine beside trainer | vLLM beside trainer |",
        "|---|---|---|---|---|---|",
    ]
    lines += _of_popular(results)
    lines += [
        "",
        "## local and the embedded engine",
        "",
        f"Rows are packed end to end for {len(packed)} families, and padded on the right for {len(padded)}, whose",
        "layers do not keep packed rows apart or have attention that packed rows lack. `model.layout` chooses, and",
        "`--check` says why rows are padded. The embedded engine goes on from a cache: its own for packed rows,",
        f"transformers' own for padded ones. For {len(slow)} families (*rows* below) it computes whole rows for",
        "every token, so use [vLLM](vllm.md) for them. In bf16 a state gathers rounding: on a CPU, these models with",
        "linear attention or Mamba layers differ from the trainer by up to 0.04 nats a token on average, and by",
        "less than 0.01 if whole rows are computed. Linear attention and state-space layers are fast with kernels",
        "of the extra `verl_fn[linear-attention]`, and a run names the packages that are missing.",
        "",
        *OF_VLLM,
        "",
        "| family | rows | log-probs, nats | gradient of the worst parameter | engine beside trainer, nats | "
        "engine goes on from | fsdp | vLLM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (*of[RIGHT], *of[WRONG]):
        r = own[name]
        errors = " | ".join(f"{r[key]:.1e}" for key in ("logprobs", "gradient", "sampled"))
        fsdp = results["fsdp"].get(name, {}).get("outcome", "")
        start = f"| {name}{' (wrong)' if name in of[WRONG] else ''} | {r['layout']}"
        vllm = ", ".join(_right_in(results, "vllm", name)) or _wrong_in(results, name)
        lines.append(f"{start} | {errors} | {'cache' if r['cached'] else 'rows'} | {fsdp} | {vllm} |")
    lines += _refusals(own, of[REFUSED])
    without_model = [name for name, r in own.items() if r["outcome"] == NO_MODEL]
    lines += ["", f"transformers makes no tiny model of {', '.join(without_model)} with these sizes."]
    return "\n".join([*lines, *_of_megatron(results["megatron bf16"], results["megatron fp32"])])


def _of_popular(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line of a table for each family of ``POPULAR``."""
    own, half, lines = results["local"], results["megatron bf16"], []
    for title, name in POPULAR.items():
        megatron, vllm = (_right_in(results, backend, name) for backend in ("megatron", "vllm"))
        of_megatron = "refused" if name in half else "unknown to Bridge"
        fsdp = results["fsdp"].get(name, {}).get("outcome", "not run")
        cells = [
            f"{own[name]['outcome']}, {own[name]['layout']}", fsdp, _in_words(megatron) or of_megatron,
            f"{own[name]['sampled']:.1e} nats", _in_words(vllm) or "not run",
        ]  # fmt: skip
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def _right_in(results: Mapping[str, Mapping[str, Any]], backend: str, name: str) -> list[str]:
    """Returns the dtypes in which a backend computes a family right."""
    return [
        dtype for dtype in ("fp32", "bf16") if results[f"{backend} {dtype}"].get(name, {}).get("outcome") == RIGHT
    ]


def _wrong_in(results: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Returns by how much the log-probs of a family in vLLM are wrong in fp32; nothing if they are not."""
    found = results["vllm fp32"].get(name, {})
    return f"{max(one for one, _ in found['errors']):.1e} nats" if found.get("outcome") == WRONG else ""


def _in_words(dtypes: Sequence[str]) -> str:
    return f"right in {' and '.join(dtypes)}" if dtypes else ""


def _of_megatron(half: Mapping[str, Any], full: Mapping[str, Any]) -> list[str]:
    """Returns the lines about Megatron, in bf16 and in fp32."""
    right = {name for results in (half, full) for name, r in results.items() if r["outcome"] == RIGHT}
    lines = [
        "",
        "## Megatron",
        "",
        f"On one H100 with transformer-engine, {len(right)} of the {len(half)} families that both Megatron-Bridge",
        "and transformers have are right. Weights come out bitwise as they went in. In fp32, log-probs and gradients",
        f"equal transformers' within {BAR:g}; in bf16 they differ from `local` in bf16 by at most three times as",
        "much as `local` in bf16 differs from transformers in float64. In fp32, layers are megatron-core's with",
        "attention of our own, or transformer-engine's without TF32 (`NVIDIA_TF32_OVERRIDE=0`).",
        "",
        "| family | rows | fp32: log-probs | fp32: gradient | bf16: log-probs (`local`) | bf16: gradient (`local`) |",
        "|---|---|---|---|---|---|",
    ]
    for name in half:
        if name not in right:
            continue
        a, b = full.get(name, {}), half[name]
        exact = [f"{a[key]:.1e}" if a.get("outcome") == RIGHT else "" for key in ("logprobs", "gradient")]
        rounded = [
            f"{b[key]:.2f} ({b[f'{key}_of_local']:.2f})" if b["outcome"] == RIGHT else ""
            for key in ("logprobs", "gradient")
        ]
        layout = (a if a.get("outcome") == RIGHT else b)["layout"]
        lines.append(f"| {name} | {layout} | {' | '.join(exact)} | {' | '.join(rounded)} |")
    return [*lines, *_refusals(half, [name for name in half if name not in right]), ""]


def _refusals(results: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Returns a table of why families are refused."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        why = re.sub(r"^\w*Error: |\w+(?= is not causal)", "", results[name].get("why", WRONG)).strip()
        reasons.setdefault(why.partition(";")[0].partition(" [")[0][:160].replace("|", "\\|"), []).append(name)
    return ["", "| refused | reason |", "|---|---|", *(f"| {', '.join(of)} | {why} |" for why, of in reasons.items())]


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the results in a folder, by the names of ``RESULTS``; empty where there is no file yet."""
    files = {name: folder / f"{file}.json" for name, file in RESULTS.items()}
    return {name: json.loads(f.read_text())["results"] if f.exists() else {} for name, f in files.items()}
