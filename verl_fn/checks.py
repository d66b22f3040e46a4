"""What can be known to be wrong before a run's first step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.model import ModelError, read_config
from verl_fn.config import ConfigError
from verl_fn.driver import build
from verl_fn.schema import Config
from verl_fn.tasks import Source, Task


def check(cfg: Config, source: Source) -> None:
    """Compare tokenizer, models, lengths and device.

    Raises:
        ModelError: the tokenizer's vocabulary is not the model's, or actor and critic differ in theirs.
        ConfigError: the longest row does not fit the token budget or the model's positions, prompts are longer
            than allowed, the device is not there, or a goal can never be reached.
    """
    d = cfg.data
    _check_device(cfg)
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
    for role in build.roles(cfg):
        folder = cfg.critic.path if role == "critic" and cfg.critic.path else cfg.model.path
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
        settings, table = (cfg.critic, "critic") if role == "critic" else (cfg.actor, "actor")
        if trained > settings.ppo_max_token_len_per_gpu:
            raise ConfigError(
                f"a row may have {trained} tokens ({parts}), more than "
                f"{table}.ppo_max_token_len_per_gpu = {settings.ppo_max_token_len_per_gpu}; raise that budget"
            )


def _check_device(cfg: Config) -> None:
    # A Ray cluster that is connected already may have GPUs that this process does not see.
    ray = sys.modules.get("ray") if cfg.driver.kind == "ray" else None
    connected = ray is not None and ray.is_initialized()
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
