"""verl's own trainer on the workload of ``step``, in its best configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_fn.backends.vllm.arguments import graph_arguments

from . import step_reward
from .step_work import BUDGET, LR, MEMORY, Work


def command(work: Work, steps: int, folder: Path) -> list[str]:
    """The command of a run: FSDP2, Liger, no padding, dynamic batches, parameters kept after the forward pass."""
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": f"[{work.data}]",
        "data.val_files": f"[{work.data}]",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt,
        "data.max_response_length": work.response,
        "reward.custom_reward_function.path": step_reward.__file__,
        "reward.custom_reward_function.name": step_reward.score.__name__,
        "trainer.total_training_steps": steps,
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": work.gpus,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        # Its actors ask for more processors than it computes with.
        "ray_kwargs.ray_init.num_cpus": max(64, os.cpu_count() or 1),
        "+ray_kwargs.ray_init._node_ip_address": "127.0.0.1",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": folder / "hydra",
        "hydra.output_subdir": "null",
    }
    model = {
        "path": work.model,
        "use_remove_padding": True,
        "use_liger": work.device == "cuda",
        "enable_gradient_checkpointing": work.checkpointing,
        "+override_config.attn_implementation": "flash_attention_2",
    }
    actor = {
        "strategy": "fsdp2",
        "optim.lr": LR,
        "ppo_mini_batch_size": work.prompts,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": BUDGET,
        "fsdp_config.reshard_after_forward": False,
    }
    rollout = {
        "name": "vllm",
        "n": work.n,
        "ignore_eos": True,
        "tensor_model_parallel_size": 1,
        "gpu_memory_utilization": MEMORY,
        "max_num_seqs": work.rows_of_engine,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": work.prompt + work.response,
        **(graph_arguments(work.rows_of_engine) if work.device == "cuda" else {}),
    }
    for table, values in (("model", model), ("actor", actor), ("rollout", rollout)):
        for name, value in values.items():
            plus, bare = ("+", name[1:]) if name.startswith("+") else ("", name)
            settings[f"{plus}actor_rollout_ref.{table}.{bare}"] = value
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in settings.items())]


def environment(folder: Path) -> dict[str, str]:
    """Variables of a run: where its metrics go, and that errors are whole in its log."""
    return {
        "VERL_FILE_LOGGER_PATH": str(metrics_file(folder)),
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
    }


def metrics_file(folder: Path) -> Path:
    """Where a run writes a line for each step."""
    return folder / "metrics.jsonl"


def metrics(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metrics in a line of verl's file."""
    values: Mapping[str, Any] = row["data"]
    return values
