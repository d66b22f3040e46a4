"""What can be known to be wrong before a run's first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_fn.backends.model import ModelError, read_config
from verl_fn.config import ConfigError
from verl_fn.driver import build
from verl_fn.schema import Config
from verl_fn.tasks import Source, Task


def check(cfg: Config, source: Source) -> None:
    """Compare tokenizer, models and lengths.

    Raises:
        ModelError: the tokenizer's vocabulary is not the model's, or actor and critic differ in theirs.
        ConfigError: the longest row does not fit the token budget or the model's positions.
    """
    # A made task has one token a character, and the bos token before them.
    prompt = source.max_prompt + isinstance(source, Task)
    longest = prompt + cfg.data.max_response_length
    for role in build.roles(cfg):
        folder = cfg.critic.path if role == "critic" and cfg.critic.path else cfg.model.path
        check_vocabulary(folder, build.tokenizer(cfg))
        positions = getattr(read_config(folder), "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise ConfigError(
                f"a row may have {longest} tokens (prompt and data.max_response_length), but {folder} has only "
                f"{positions} positions; lower data.max_response_length or data.max_prompt_length"
            )
        settings, table = (cfg.critic, "critic") if role == "critic" else (cfg.actor, "actor")
        if longest > settings.ppo_max_token_len_per_gpu:
            raise ConfigError(
                f"a row may have {longest} tokens (prompt and data.max_response_length), more than "
                f"{table}.ppo_max_token_len_per_gpu = {settings.ppo_max_token_len_per_gpu}; raise that budget"
            )


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
