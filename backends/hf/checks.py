"""Checks on a small random model that an architecture computes what a pure step needs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.config import ModelError, quiet, reason, refused
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.state import Batch

# Sizes that only make a model large; smaller ones do not change the results of the checks.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim")
VOCABULARY, WIDTH = 64, 64
_checked: set[str] = set()


def check_architecture(auto: Any, config: Any, head: str, options: dict[str, Any], folder: str | Path) -> None:
    """Raises an error for a model whose rows see each other, or which changes its logits after the output layer.

    Each config is checked once in a process.

    Args:
        auto: transformers' class that makes the model.
        config: of the whole model.
        head: ``lm`` or ``value``.
        options: for ``auto.from_config``.
        folder: where the config comes from, for errors.

    Raises:
        ModelError: it is such a model, or it uses what packed attention lacks.
    """
    checked_config = json.dumps([auto.__name__, head, config.to_dict()], sort_keys=True, default=str)
    if checked_config in _checked:
        return
    failure = "it has no sizes"
    with refused(f"{folder}: a small model of this config cannot be run"):
        for small in smaller(config):
            try:
                with quiet():
                    _check(_random_model(auto, small, head, options), folder)
            except ModelError:
                raise
            except NotImplementedError as error:
                raise ModelError(f"{folder}: {error}") from error
            except Exception as error:
                # This architecture does not allow these sizes together; the next ones are closer to its own.
                failure = reason(error)
                continue
            _checked.add(checked_config)
            return
    raise ModelError(f"{folder}: a small model of this config cannot be run: {failure}")


def smaller(config: Any) -> Iterator[Any]:
    """Yields the config with small sizes: first all sizes, then only independent ones, then the config as it is.

    Example:
        >>> from transformers import Qwen2Config
        >>> first = next(smaller(Qwen2Config(num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2)))
        >>> first.num_hidden_layers, first.num_attention_heads, first.num_key_value_heads, first.vocab_size
        (2, 12, 2, 64)
    """
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    depth = _cut_layers(text)
    _lower(text, "vocab_size", VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    narrow = copy.deepcopy(shallow)
    if _cut_widths(narrow.get_text_config()):
        yield narrow
    if depth:
        yield shallow
    yield config


def _cut_layers(config: Any) -> bool:
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return False
    kinds = list(getattr(config, "layer_types", None) or ())
    dense = getattr(config, "first_k_dense_replace", None)
    # Keep a layer of every kind.
    wanted = max([2, (dense or 0) + 1, *(kinds.index(kind) + 1 for kind in set(kinds))])
    depth = min(layers, wanted)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth
    return True


def _cut_widths(config: Any) -> bool:
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return False
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = 2 if shared % 2 == 0 else 1
    config.num_attention_heads = kv_heads * (heads // shared)
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = kv_heads
    config.hidden_size = config.num_attention_heads * width
    for name in WIDTHS:
        _lower(config, name, WIDTH)
    return True


def _lower(config: Any, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and value > most:
        setattr(config, name, most)


def _random_model(auto: Any, config: Any, head: str, options: dict[str, Any]) -> Skeleton:
    """Returns a model with activations and logits as large as trained ones, since soft caps change only those."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(copy.deepcopy(config), **options)
        model.config.use_cache = False
        skeleton = Skeleton(model.eval(), head)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=1 / math.sqrt(p.shape[-1]))
        if head == "lm":
            skeleton.output_layer.weight *= 10.0
    return skeleton


@torch.no_grad()
def _check(skeleton: Skeleton, folder: str | Path) -> None:
    vocab = skeleton.config.get_text_config().vocab_size
    rows = [[1 % vocab, 2 % vocab, 3 % vocab], [5 % vocab, 4 % vocab]]
    batch = Batch.from_rows(rows)

    def hidden(batch: Batch) -> Tensor:
        return skeleton.hidden_states(batch.tokens, batch.positions, Packing.of(batch, torch.device("cpu")))

    together = hidden(batch)
    apart = torch.cat([hidden(Batch.from_rows([row])) for row in rows])
    scale = together.abs().max().clamp(min=1.0)
    if (together - apart).abs().max() > 1e-3 * scale:
        raise ModelError(f"{folder}: rows packed together see each other in {type(skeleton.model).__name__}")
    if skeleton.head == "value":
        return
    packing = Packing.of(batch, torch.device("cpu"))
    tokens, positions = batch.tokens[None], batch.positions[None]
    logits = skeleton.model(input_ids=tokens, position_ids=positions, use_cache=False, packing=packing).logits[0]
    if (skeleton.output_layer(together) - logits).abs().max() > 1e-3 * logits.abs().max().clamp(min=1.0):
        raise ModelError(f"{folder}: {type(skeleton.model).__name__} changes its logits after the output layer")
