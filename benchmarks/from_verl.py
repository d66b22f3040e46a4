"""Translates launch scripts of verl, and compares what they mean in verl with what the translations mean here.

    python -m verl_fn.benchmarks.from_verl VERL/examples --source COMMIT --out benchmarks/results/from_verl.json

Each script is read by bash, with the variables of ``ENVIRONMENT``; scripts of SFT that ask for two arguments get
them. What a script means in verl is computed here from its settings and verl's defaults, without the tables of the
translator.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fn.config import ConfigError, flat, structure, to_table
from verl_fn.from_verl import Settings, Translation, read_settings, translate

# What some scripts ask for.
ENVIRONMENT = {
    "HDFS_ROOT": "/hdfs", "DATA_ROOT": "/data", "RAY_DATA_HOME": "/ray", "INFER_BACKEND": "vllm", "HOME": "/root",
    "LORA_ADAPTER_PATH": "/adapter", "ckpts_home": "/checkpoints", "PYTHONPATH": "", "SLURM_JOB_NUM_NODES": "1",
}  # fmt: skip
SFT_ARGUMENTS = ("8", "/tmp/sft")
ROWS = 7473  # of GSM8K, as the rows of every script's files
ARR = "actor_rollout_ref."
# Keys with the same value in verl and here: the key here, its names in verl from old to new, and verl's default.
PLAIN: Sequence[tuple[str, Sequence[str], Any]] = (
    ("model.path", [f"{ARR}model.path"], "~/models/deepseek-llm-7b-chat"),
    ("data.train_batch_size", ["data.train_batch_size"], 1024),
    ("data.max_prompt_length", ["data.max_prompt_length"], 512),
    ("data.max_response_length", ["data.max_response_length"], 512),
    ("data.truncation", ["data.truncation"], "error"),
    ("data.filter_overlong_prompts", ["data.filter_overlong_prompts"], False),
    ("data.shuffle", ["data.shuffle"], True),
    ("algorithm.adv_estimator", ["algorithm.adv_estimator"], "gae"),
    ("algorithm.gdpo_reward_keys", ["algorithm.gdpo_reward_keys"], None),
    ("algorithm.gamma", ["algorithm.gamma"], 1.0),
    ("algorithm.norm_adv_by_std_in_grpo", ["algorithm.norm_adv_by_std_in_grpo"], True),
    ("algorithm.use_kl_in_reward", ["algorithm.use_kl_in_reward"], False),
    ("algorithm.kl_ctrl.kl_coef", ["algorithm.kl_ctrl.kl_coef"], 0.001),
    ("algorithm.use_kl_loss", [f"{ARR}actor.use_kl_loss"], False),
    ("algorithm.kl_loss_coef", [f"{ARR}actor.kl_loss_coef"], 0.001),
    ("algorithm.kl_loss_type", [f"{ARR}actor.kl_loss_type"], "low_var_kl"),
    ("algorithm.entropy_coeff", [f"{ARR}actor.entropy_coeff"], 0.0),
    ("algorithm.loss_agg_mode", [f"{ARR}actor.loss_agg_mode"], "token-mean"),
    ("algorithm.ppo_mini_batch_size", [f"{ARR}actor.ppo_mini_batch_size"], 256),
    ("algorithm.ppo_epochs", [f"{ARR}actor.ppo_epochs"], 1),
    ("algorithm.tau_pos", [f"{ARR}actor.policy_loss.tau_pos", f"{ARR}actor.tau_pos"], 1.0),
    ("algorithm.tau_neg", [f"{ARR}actor.policy_loss.tau_neg", f"{ARR}actor.tau_neg"], 1.05),
    ("algorithm.lam", ["algorithm.lam"], 1.0),
    ("algorithm.rollout_is", ["algorithm.rollout_correction.rollout_is"], None),
    ("actor.optim.lr", ["optim.lr", f"{ARR}actor.optim.lr"], 1e-6),
    ("actor.optim.weight_decay", ["optim.weight_decay", f"{ARR}actor.optim.weight_decay"], 0.01),
    ("actor.optim.betas", ["optim.betas", f"{ARR}actor.optim.betas"], [0.9, 0.999]),
    ("actor.enable_gradient_checkpointing", [f"{ARR}model.enable_gradient_checkpointing"], True),
    ("actor.lora_rank", [f"{ARR}model.lora.rank", "model.lora_rank", f"{ARR}model.lora_rank"], 0),
    ("critic.optim.lr", ["critic.optim.lr"], 1e-5),
    ("critic.path", ["critic.model.path"], "~/models/deepseek-llm-7b-chat"),
    ("rollout.n", [f"{ARR}rollout.n"], 1),
    ("rollout.temperature", [f"{ARR}rollout.temperature"], 1.0),
    ("rollout.top_p", [f"{ARR}rollout.top_p"], 1.0),
    ("rollout.gpu_memory_utilization", [f"{ARR}rollout.gpu_memory_utilization"], 0.5),
    ("rollout.slots", [f"{ARR}rollout.max_num_seqs"], 256),
    ("rollout.val_kwargs.temperature", [f"{ARR}rollout.val_kwargs.temperature"], 0.0),
    ("rollout.val_kwargs.top_p", [f"{ARR}rollout.val_kwargs.top_p"], 1.0),
    ("trainer.save_freq", ["trainer.save_freq"], -1),
    ("trainer.test_freq", ["trainer.test_freq"], -1),
    *((f"actor.megatron.{name}", [f"engine.{name}", f"{ARR}actor.megatron.{name}"], 1) for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size")),
)  # fmt: skip
SFT_PLAIN: Mapping[str, tuple[Sequence[str], Any]] = {
    "model.path": (["model.path"], "~/models/deepseek-llm-7b-chat"),
    "actor.optim.lr": (["optim.lr"], 1e-3),
    "actor.enable_gradient_checkpointing": (["model.enable_gradient_checkpointing"], True),
    "data.train_batch_size": (["data.train_batch_size"], 256),
    "data.max_prompt_length": (["data.max_length"], 1024),
    "data.max_response_length": (["data.max_length"], 1024),
}


def in_verl(settings: Settings) -> dict[str, Any]:
    """Returns what settings mean in verl, by the key that should mean the same here.

    Keys that the algorithm or the layout does not read are left out.
    """
    values = settings.values

    def get(names: Sequence[str], default: Any) -> Any:
        return next((values[name] for name in names if values.get(name) is not None), default)

    skip = set(_unused(settings, get))
    found = {key: get(names, default) for key, names, default in PLAIN if key not in skip}
    if settings.sft:
        kept = [key for key in found if key.startswith(("actor.", "trainer."))]
        found = {key: found[key] for key in kept} | {key: get(*entry) for key, entry in SFT_PLAIN.items()}
    return found | _computed(settings, get)


def _unused(settings: Settings, get: Any) -> Iterator[str]:
    estimator = get(["algorithm.adv_estimator"], "gae")
    if estimator != "gae":
        yield from ("critic.optim.lr", "critic.path")
        yield "algorithm.lam"
    if estimator in ("gae", "remax"):
        yield "algorithm.adv_estimator"
    if estimator != "gdpo":
        yield "algorithm.gdpo_reward_keys"
    if estimator not in ("gae", "reinforce_plus_plus"):
        yield "algorithm.gamma"
    if estimator not in ("grpo", "grpo_passk", "gdpo"):
        yield "algorithm.norm_adv_by_std_in_grpo"
    if not get(["algorithm.use_kl_in_reward"], False):
        yield "algorithm.kl_ctrl.kl_coef"
    if not get([f"{ARR}actor.use_kl_loss"], False):
        yield from ("algorithm.kl_loss_coef", "algorithm.kl_loss_type")
    if get([f"{ARR}actor.policy_loss.loss_mode"], "vanilla") != "sapo":
        yield from ("algorithm.tau_pos", "algorithm.tau_neg")
    if get([f"{ARR}actor.policy_loss.loss_mode"], "vanilla") == "geo_mean":
        yield "algorithm.loss_agg_mode"
    if get(["data.filter_overlong_prompts"], False):
        yield "data.truncation"
    if settings.engine != "megatron":
        yield from (key for key, _, _ in PLAIN if key.startswith("actor.megatron."))


def _computed(settings: Settings, get: Any) -> dict[str, Any]:
    """Returns what is computed from several settings: steps, warm-up, ranks, budgets, losses and penalties."""
    sft, megatron = settings.sft, settings.engine == "megatron"
    batch = get(["data.train_batch_size"], 256 if sft else 1024)
    epochs = get(["trainer.total_epochs"], 4 if sft else 30)
    steps = get(["trainer.total_training_steps"], ROWS // batch * epochs)
    mini = min(batch, get([f"{ARR}actor.ppo_mini_batch_size"], 256))
    updates = 1 if sft else get([f"{ARR}actor.ppo_epochs"], 1) * math.ceil(batch / mini)
    table = "optim." if sft else f"{ARR}actor.optim."
    warmup = get([table + "lr_warmup_steps"], -1)
    if warmup <= 0:
        warmup = int(get([table + "lr_warmup_steps_ratio"], 0.0) * get([table + "lr_decay_steps"], steps))
    style = get([table + "warmup_style", table + "lr_decay_style", table + "lr_scheduler_type"], "constant")
    found = {
        "algorithm.name": "sft" if sft else _algorithm(get),
        "trainer.total_training_steps": steps,
        "actor.optim.lr_warmup_steps": warmup * updates,
        "actor.optim.lr_scheduler_type": style,
        "actor.optim.decay_biases_and_norms": not megatron,
        "actor.strategy": "megatron" if megatron else "fsdp",
        "actor.dtype": "bfloat16",
        "ray.ranks": get(["trainer.nnodes"], 1) * get(["trainer.n_gpus_per_node"], 1 if sft else 8),
        "actor.ppo_max_token_len_per_gpu": _budget(settings, get),
    }
    if style != "constant":
        lr, lowest = get([table + "lr"], 1e-3 if sft else 1e-6), get([table + "min_lr"], 0.0)
        found["actor.optim.min_lr_ratio"] = get([table + "min_lr_ratio"], 0.0) or lowest / lr
    if _algorithm(get) == "ppo" and not sft:
        # The actor learns from step critic_warmup on, and the first step is 1.
        found["algorithm.critic_warmup"] = max(0, get(["trainer.critic_warmup"], 0) - 1)
        found["critic.ppo_max_token_len_per_gpu"] = _budget(settings, get, "critic.")
    return found if sft else found | _losses(get)


def _algorithm(get: Any) -> str:
    estimator = get(["algorithm.adv_estimator"], "gae")
    penalty = get([f"{start}enable" for start in PENALTIES], False)
    dapo = get(["algorithm.filter_groups.enable"], False) or penalty
    return {"gae": "ppo", "remax": "remax"}.get(estimator, "dapo" if dapo else "grpo")


PENALTIES = tuple(
    start + "overlong_buffer" + end
    for start, end in (
        ("reward_model.", "."),
        ("reward_model.reward_kwargs.", "_cfg."),
        ("reward.reward_kwargs.", "_cfg."),
    )
)


def _losses(get: Any) -> dict[str, Any]:
    loss = get([f"{ARR}actor.policy_loss.loss_mode"], "vanilla")
    found = {"algorithm.policy_loss": "ppo_clip" if loss == "vanilla" else loss}
    if loss in ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl"):
        found |= {
            f"algorithm.clip_ratio_{side}": get([f"{ARR}actor.clip_ratio_{side}"], 0.2) for side in ("low", "high")
        }
    if loss in ("vanilla", "dppo_tv", "dppo_kl"):
        found["algorithm.clip_ratio_c"] = get([f"{ARR}actor.clip_ratio_c"], 3.0)
    if get([f"{start}enable" for start in PENALTIES], False):
        found["algorithm.overlong_buffer.len"] = get([f"{start}len" for start in PENALTIES], 0)
        found["algorithm.overlong_buffer.penalty_factor"] = get(
            [f"{start}penalty_factor" for start in PENALTIES], 1.0
        )
    if _algorithm(get) == "dapo":
        found["algorithm.filter_groups.enable"] = get(["algorithm.filter_groups.enable"], False)
    return found


def _budget(settings: Settings, get: Any, role: str = f"{ARR}actor.") -> int:
    """Returns the tokens of a micro-batch on each rank: verl's budget, or so many rows, and at least one row."""
    if settings.sft:
        dynamic, rows = get(["data.use_dynamic_bsz"], True), get(["data.micro_batch_size_per_gpu"], 4)
        budget, longest = get(["data.max_token_len_per_gpu"], 8192), get(["data.max_length"], 1024)
    else:
        dynamic = get([role + "use_dynamic_bsz", f"{ARR}actor.use_dynamic_bsz"], False)
        rows = get([role + "ppo_micro_batch_size_per_gpu"], None)
        budget = get([role + "ppo_max_token_len_per_gpu"], 32768 if role == "critic." else 16384)
        longest = get(["data.max_prompt_length"], 512) + get(["data.max_response_length"], 512)
    tables = ["engine.", role, f"{role}fsdp_config.", f"{role}fsdp.", f"{role}model.fsdp_config."]
    names = [f"{table}ulysses_sequence_parallel_size" for table in tables]
    if settings.engine == "megatron":
        names = ["engine.context_parallel_size", f"{role}megatron.context_parallel_size"]
    if not dynamic and rows:
        budget = rows * longest
    return max(budget, math.ceil(longest / get(names, 1)))


def compared(settings: Settings, translation: Translation) -> dict[str, list[Any]]:
    """Returns the values in verl and here of everything that ``in_verl`` knows, by key."""
    here = flat(to_table(structure(translation.table)))
    here = {key: list(value) if isinstance(value, tuple) else value for key, value in here.items()}
    return {key: [value, here.get(key)] for key, value in in_verl(settings).items()}


def agree(theirs: Any, ours: Any) -> bool:
    """Returns whether two values mean the same; numbers may differ by rounding.

    Example:
        >>> agree(1, 1.0), agree("a", "b")
        (True, False)
    """
    if isinstance(theirs, float) and isinstance(ours, int | float):
        return math.isclose(theirs, ours, rel_tol=1e-12)
    return bool(theirs == ours)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the table of all scripts below a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", required=True, help="where the scripts are from")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/from_verl.json"))
    args = parser.parse_args(argv)
    os.environ |= ENVIRONMENT
    scripts = {}
    for script in sorted(args.folder.rglob("*.sh")):
        name = str(script.relative_to(args.folder))
        scripts[name] = entry_of(script, args.folder)
    complete = [entry for entry in scripts.values() if not entry["exit"]]
    summary = {
        "scripts": len(scripts),
        "translated": len(complete),
        "values": sum(len(entry["values"]) for entry in complete),
        "values that differ": sum(len(entry["differ"]) for entry in complete),
    }
    result = {"source": args.source, "rows of every file": ROWS, **summary}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in scripts.items())
    table = f'{json.dumps(result)[:-1]}, "table": {{\n{lines}\n}}}}\n'
    # Scripts name folders below $HOME.
    args.out.write_text(table.replace(f"{Path.home()}/", "~/"))
    print(summary)


def entry_of(script: Path, folder: Path) -> dict[str, Any]:
    """Returns the row of a script: the exit status, and what it means, or why it is refused."""
    try:
        try:
            settings = read_settings([str(script)])
        except ConfigError:
            settings = read_settings([str(script), *SFT_ARGUMENTS])
    except ConfigError as error:
        return {"exit": 1, "refused": [str(error).replace(str(folder), "examples")]}
    translation = translate(settings, lambda files: ROWS)
    if not translation.complete:
        return {"exit": 1, "refused": [*translation.not_possible, *translation.unknown]}
    pairs = compared(settings, translation)
    return {
        "exit": 0,
        "values": {key: theirs for key, (theirs, _) in pairs.items()},
        "differ": {key: pair for key, pair in pairs.items() if not agree(*pair)},
    }


if __name__ == "__main__":
    main()
