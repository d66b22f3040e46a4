"""Checks that Megatron's model computes what transformers' does, where Megatron-Bridge drops settings of a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.megatron.conversion import Task
from verl_fn.backends.megatron.names import Canonical

# Rotary embeddings with other frequencies differ by much more than rounding at one of so many positions.
POSITIONS, ROUNDING = 1024, 1e-3
ACTIVATION_ROUNDING = 1e-5


def check_same_model(model: Any, transformers_model: nn.Module, folder: str | Path) -> None:
    """Checks the windows, activation, norms and rotary embedding of Megatron's model, since no weight shows them.

    Args:
        model: Megatron's.
        transformers_model: of the same folder, without weights.
        folder: for errors.

    Raises:
        ModelError: they differ from transformers' model.
    """
    config: Any = transformers_model.config
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 0
    windows = [w for m in transformers_model.modules() if isinstance(w := getattr(m, "sliding_window", None), int)]
    if any(window < longest for window in windows) and model.config.window_size is None:
        raise ModelError(
            f"{folder} has layers with a sliding window of {min(windows)} tokens, and Megatron-Bridge makes "
            "attention to all tokens of them; set actor.strategy=fsdp"
        )
    _check_activation(model, transformers_model, folder)
    rope = getattr(text, "rope_parameters", None) or {}
    if model.config.multi_latent_attention and "mscale_all_dim" in rope:
        raise ModelError(
            f"{folder} has multi-latent attention with YaRN, whose mscale_all_dim Megatron applies to attention "
            "scores and transformers does not; set actor.strategy=fsdp"
        )
    ours, theirs = _of_transformers(transformers_model), _of_megatron(model)
    if ours is None or theirs is None:
        return
    if 2 * ours.shape[-1] == theirs.shape[-1]:
        # Each frequency belongs to two numbers of a head, and some models have it once.
        ours = ours.repeat_interleave(2, -1)
    if ours.shape != theirs.shape or float((ours - theirs).abs().max()) > ROUNDING:
        raise ModelError(
            f"{folder} has the rotary embedding {rope}, and Megatron-Bridge makes "
            "one with other frequencies; set actor.strategy=fsdp"
        )


def check_head(skeleton: Skeleton, folder: str | Path) -> None:
    """Refuses a model of images, and one whose logits are more than the output layer's, with a factor and a bound.

    Args:
        skeleton: transformers' model of the folder.
        folder: for errors.

    Raises:
        ModelError: the model is such.
    """
    if skeleton.family is not None and skeleton.config.model_type != "gemma3":
        raise ModelError(
            f"{folder} is a {type(skeleton.model).__name__}: models with images do not run on Megatron here; set "
            "actor.strategy to local or fsdp"
        )
    bias = skeleton.head == "lm" and skeleton.output_layer.bias is not None
    if skeleton.fit.own_head or bias:
        raise ModelError(
            f"{folder} is a {type(skeleton.model).__name__}: it makes logits by "
            f"{'an output layer with a bias' if bias else 'code of its own'}, and Megatron by an output layer "
            "without a bias; set actor.strategy=fsdp"
        )


def take_epsilons(
    tasks: Sequence[Task], canonical: Canonical, transformers_model: nn.Module, folder: str | Path
) -> None:
    """Gives each norm of Megatron's model the epsilon of transformers' norm, since Bridge has one for all norms.

    Args:
        tasks: of all parameters.
        canonical: the canonical names.
        transformers_model: of the same folder, without weights.
        folder: for errors.

    Raises:
        ModelError: an epsilon differs, and Megatron's norm has no place for another one.
    """
    for task in tasks:
        if not isinstance(task.hub, str) or task.module is None:
            continue
        name = canonical.place(task.hub).name.rpartition(".")[0]
        theirs = transformers_model.get_submodule(name)
        epsilon = getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))
        if "Norm" not in type(theirs).__name__ or not isinstance(epsilon, float):
            continue
        module: Any = task.module
        own = getattr(module, "eps", module.config.layernorm_epsilon)
        if own == epsilon:
            continue
        if not isinstance(getattr(module, "eps", None), float):
            raise ModelError(
                f"{folder} has the epsilon {epsilon} in {name}, and Megatron-Bridge makes it {own}; set "
                "actor.strategy=fsdp"
            )
        module.eps = epsilon


@torch.no_grad()
def _check_activation(model: Any, transformers_model: nn.Module, folder: str | Path) -> None:
    at = torch.linspace(-4, 4, 65)
    for module in transformers_model.modules():
        ours: Any = getattr(module, "act_fn", None)
        theirs: Any = model.config.activation_func
        if callable(ours) and float((ours(at) - theirs(at)).abs().max()) > ACTIVATION_ROUNDING:
            name = getattr(theirs, "__name__", repr(theirs))
            raise ModelError(
                f"{folder} has the activation {type(ours).__name__}, and Megatron-Bridge makes {name} of it; set "
                "actor.strategy=fsdp"
            )


@torch.no_grad()
def _of_transformers(model: Any) -> Float[Tensor, "t dim"] | None:
    """Returns the cosines of transformers' rotary embedding, in order of size; None without a single one."""
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    if not isinstance(getattr(rotary, "inv_freq", None), Tensor):
        return None
    device = rotary.inv_freq.device
    pair = rotary(torch.zeros(1, device=device), torch.arange(POSITIONS, device=device)[None])
    # Cosines and sines; other models have complex numbers.
    return _ordered(pair[0][0]) if isinstance(pair, tuple) else None


@torch.no_grad()
def _of_megatron(model: Any) -> Float[Tensor, "t dim"] | None:
    """Returns Megatron's, with elements in any order; None without a single one."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    rotary: Any = getattr(model, "rotary_pos_emb", None)
    if type(rotary) not in (RotaryEmbedding, YarnRotaryEmbedding):
        return None
    angles = rotary.get_emb(POSITIONS)
    # With YaRN, a factor for the cosines and sines comes with the angles.
    angles, factor = angles if isinstance(angles, tuple) else (angles, 1.0)
    return _ordered(angles[:, 0, 0].cos() * factor)


def _ordered(cosines: Float[Tensor, "t dim"]) -> Float[Tensor, "t dim"]:
    return cosines.float().cpu().sort(-1).values
