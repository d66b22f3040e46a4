"""From a config to the parts that an algorithm runs on, in the process that will hold them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import attrs

from verl_fn.config import plan
from verl_fn.config.schema import Config, ConfigError, OptimConfig

from . import ranks


def set_up_process(cfg: Config) -> None:
    """Threads of this process, and no stray log lines of libraries."""
    import torch

    torch.set_num_threads(cfg.driver.num_threads or max(1, (os.cpu_count() or 1) // ranks.training_ranks(cfg)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if cfg.driver.deterministic:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def model_folder(cfg: Config) -> Path:
    """``model.path``, or a random model for the task, made once below the run's folder."""
    from verl_fn.backends.hf.new_model import new_model
    from verl_fn.data.tasks import TASKS

    if cfg.model.path:
        return Path(cfg.model.path).expanduser()
    wanted = attrs.asdict(cfg.model.new) | {"chars": TASKS[cfg.data.task].alphabet, "seed": cfg.trainer.seed}
    folder = Path(cfg.trainer.dir) / "new_model"
    note = folder / "made_from.json"
    if _made_from(note) != wanted:
        # Aside and renamed, so that a folder of this name is whole.
        aside = folder.with_name(".new_model.writing")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            new_model(aside, **wanted)
            (aside / note.name).write_text(json.dumps(wanted))
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        except OSError as error:
            raise ConfigError(f"the random model cannot be written to {folder}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _made_from(note: Path) -> Any:
    """What the random model that is there was made from; None where that cannot be read."""
    try:
        return json.loads(note.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def optimizer(o: OptimConfig, total_steps: int) -> Any:
    """Clipping and AdamW on the schedule of an ``optim`` table."""
    from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, cosine, linear

    if o.lr_scheduler_type == "constant":
        schedule = constant(o.lr, o.lr_warmup_steps)
    else:
        decay = {"linear": linear, "cosine": cosine}[o.lr_scheduler_type]
        schedule = decay(o.lr, total_steps, o.lr_warmup_steps, o.min_lr_ratio)
    return chain(clip_by_global_norm(o.clip_grad), adamw(schedule, o.betas, o.eps, o.weight_decay))


def trainer(cfg: Config, role: str) -> Any:
    """The training backend of ``actor``, ``critic`` or ``reference``; ``fsdp`` wants a process group."""
    from verl_fn.backends.hf.lora import Lora
    from verl_fn.backends.local import Local
    from verl_fn.steps import frozen

    s = plan.settings(cfg, role)
    updates = cfg.trainer.total_training_steps * plan.updates_a_step(cfg)
    tx = frozen() if role == "reference" else optimizer(s.optim, updates)
    common: dict[str, Any] = {
        "head": "value" if role == "critic" else "lm",
        "compute_dtype": s.dtype,
        "checkpointing": s.enable_gradient_checkpointing,
        "lora": Lora(s.lora_rank, s.lora_alpha, s.target_modules) if s.lora_rank else None,
        "device": ranks.device(cfg),
        "deterministic": cfg.driver.deterministic,
    }
    if s.strategy != "fsdp":
        return Local(plan.folder_of(cfg, role), tx, max_tokens=s.ppo_max_token_len_per_gpu, **common)
    from verl_fn.backends.fsdp import Fsdp

    f = s.fsdp_config
    return Fsdp(
        plan.folder_of(cfg, role),
        tx,
        max_tokens=plan.token_budget(s),
        replicate=f.replicate,
        sp=f.ulysses_sequence_parallel_size,
        reshard_after_forward=f.reshard_after_forward,
        compile=f.use_torch_compile,
        **common,
    )


def rollout(cfg: Config) -> Any:
    """The rollout engine."""
    from verl_fn.backends.sampler import Sampler

    return Sampler(cfg.model.path, device=ranks.device(cfg), dtype=cfg.rollout.dtype, slots=cfg.rollout.slots)


def tokenizer(cfg: Config) -> Any:
    """The tokenizer of the model's folder.

    Raises:
        ModelError: the folder has none.
    """
    from transformers import AutoTokenizer

    from verl_fn.backends.hf.folder import ModelError

    folder = Path(cfg.model.path)
    # Without any of them transformers makes an empty tokenizer for some architectures.
    if not any(
        file for pattern in ("tokenizer.json", "*.model", "vocab.*", "tekken.json") for file in folder.glob(pattern)
    ):
        raise ModelError(f"{folder} has no tokenizer that can be read: copy the tokenizer's files into it")
    try:
        return AutoTokenizer.from_pretrained(cfg.model.path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{cfg.model.path} has no tokenizer that can be read: {str(error).splitlines()[0]}"
        ) from error


def reward(cfg: Config, folder: str | None = None) -> Any:
    """The reward by ``reward.functions``, or by the rules of the problems' data sources where there are none.

    Args:
        folder: what the functions' modules and files are looked up from, by default the current directory.

    Raises:
        RewardError: a function cannot be found or called.
    """
    from verl_fn.rewards.functions import RewardFunctions
    from verl_fn.rewards.reward import Reward
    from verl_fn.rewards.rules import by_rules

    r = cfg.reward
    judge = RewardFunctions(r.functions, r.weights, r.timeout, r.num_workers, folder) if r.functions else by_rules
    return Reward(judge, tokenizer(cfg))
