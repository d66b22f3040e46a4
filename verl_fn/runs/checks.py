"""What can be known to be wrong before a run's first step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.hf.folder import ModelError, read_config
from verl_fn.backends.hf.ulysses import LayoutError, check_heads
from verl_fn.config import ConfigError, plan
from verl_fn.config.schema import Config
from verl_fn.data.tasks import Source, Task
from verl_fn.driver import build, ranks


def check(cfg: Config, source: Source) -> None:
    """Compare tokenizer, models, lengths and device.

    Raises:
        ModelError: the tokenizer's vocabulary is not the model's, or actor and critic differ in theirs.
        ConfigError: the longest row does not fit the token budget or the model's positions, prompts are longer
            than allowed, the device is not there, or a goal can never be reached.
    """
    d = cfg.data
    _check_device(cfg)
    check_ranks(cfg, ranks.training_ranks(cfg))
    if cfg.trainer.stop_at is not None and d.train_files and not d.val_files:
        raise ConfigError("trainer.stop_at needs held-out problems; set data.val_files")
    tokenizer = build.tokenizer(cfg)
    prompt = source.max_prompt
    if isinstance(source, Task):
        # A made task has one token a character, and the bos token before them.
        prompt += tokenizer.bos_token_id is not None
        if prompt > d.max_prompt_length:
            raise ConfigError(
                f"prompts of data.task = {source.name} have up to {prompt} tokens, more than data.max_prompt_length "
                f"= {d.max_prompt_length}; raise it"
            )
    longest, of = prompt + d.max_response_length, "prompt and data.max_response_length"
    # What is trained on: responses, or for sft the data's own answers, whatever their length.
    trained, parts = longest, of
    if cfg.algorithm.name == "sft":
        trained = prompt + source.max_answer + 1 if isinstance(source, Task) else getattr(source, "max_row", 0)
        parts = "prompt, answer and end token"
    for role in plan.roles(cfg):
        folder = plan.folder_of(cfg, role)
        check_vocabulary(folder, tokenizer)
        positions = getattr(read_config(folder), "max_position_embeddings", None)
        if positions is not None and trained > positions and cfg.algorithm.name == "sft":
            raise ConfigError(
                f"a row of the data may have {trained} tokens ({parts}), but {folder} has only {positions} positions; "
                "leave long rows out, or take a model with more positions"
            )
        if positions is not None and longest > positions:
            raise ConfigError(
                f"a row may have {longest} tokens ({of}), but {folder} has only "
                f"{positions} positions; lower data.max_response_length or data.max_prompt_length"
            )
        settings = plan.settings(cfg, role)
        if trained > plan.token_budget(settings):
            table, sp = "critic" if role == "critic" else "actor", settings.fsdp_config.ulysses_sequence_parallel_size
            shared = (
                f" on {sp} ranks together" if plan.token_budget(settings) > settings.ppo_max_token_len_per_gpu else ""
            )
            raise ConfigError(
                f"a row may have {trained} tokens ({parts}), more than {table}.ppo_max_token_len_per_gpu = "
                f"{settings.ppo_max_token_len_per_gpu}{shared}; raise that budget"
            )


def check_ranks(cfg: Config, ranks: int) -> None:
    """Whether every role's layout goes with the number of ranks and with its model.

    Raises:
        ConfigError: it does not.
    """
    for role in plan.roles(cfg):
        settings = plan.settings(cfg, role)
        owns = role == "critic" and cfg.critic.strategy is not None
        table = "critic" if owns else "actor"
        if settings.strategy == "local":
            if ranks > 1:
                started = "ray.ranks is" if cfg.driver.kind == "ray" else "torchrun's number of processes is"
                raise ConfigError(
                    f"{table}.strategy is local, which is one process, but {started} {ranks}; set {table}.strategy=fsdp"
                )
            continue
        f, folder = settings.fsdp_config, plan.folder_of(cfg, role)
        for name in ("replicate", "ulysses_sequence_parallel_size"):
            if ranks % getattr(f, name):
                raise ConfigError(
                    f"{table}.fsdp_config.{name} = {getattr(f, name)} does not divide the {ranks} training ranks"
                )
        try:
            check_heads(read_config(folder), f.ulysses_sequence_parallel_size)
        except LayoutError as error:
            raise ConfigError(f"{table}.fsdp_config.ulysses_sequence_parallel_size: {error}") from error


def _check_device(cfg: Config) -> None:
    # A Ray cluster may have GPUs that this process does not see.
    ray = sys.modules.get("ray") if cfg.driver.kind == "ray" else None
    connected = (ray is not None and ray.is_initialized()) or (cfg.driver.kind == "ray" and bool(cfg.ray.address))
    if cfg.driver.device == "cuda" and not connected and not torch.cuda.is_available():
        raise ConfigError("driver.device is cuda, but torch finds no GPU here; set driver.device=cpu or auto")


def check_vocabulary(folder: str | Path, tokenizer: Any) -> None:
    """Refuse a tokenizer that makes ids which the model does not know.

    Raises:
        ModelError: it does.
    """
    size = read_config(folder).get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model in {folder} only {size}: "
            f"they do not belong together; use the tokenizer that the model was trained with"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {folder} has no eos token, so no response could end; set one")
