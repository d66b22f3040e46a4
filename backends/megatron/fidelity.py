"""Checks that Megatron's model computes what transformers' does, if Megatron-Bridge drops settings of a config.

Fields of Bridge's provider that a user sets are checked here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.conversion import SEEING, Task
from verl_fn.backends.megatron.layout import Sizes
from verl_fn.backends.megatron.names import Canonical
from verl_fn.errors import did_you_mean

# Rotary embeddings with other frequencies differ by much more than rounding at one of so many positions.
POSITIONS, ROUNDING = 1024, 1e-3
ACTIVATION_ROUNDING = 1e-5

# What this backend decides itself; a provider's override of these would break what it promises.
DECIDED = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size",
    "sequence_parallel", "params_dtype", "bf16", "fp16", "pipeline_dtype", "autocast_dtype", "hidden_dropout",
    "attention_dropout", "calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func",
    "share_embeddings_and_output_weights", "vocab_size", "perform_initialization", "use_cpu_initialization",
    "moe_enable_routing_replay", "mtp_num_layers", "use_mup",
})  # fmt: skip
# What the model's folder decides.
OF_FOLDER = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk",
})  # fmt: skip
# What makes a step depend on more than its arguments, or differ each time.
IMPURE = {
    "moe_router_enable_expert_bias": "changes between calls a buffer of the model that no state holds",
    "moe_router_bias_update_rate": "changes between calls a buffer of the model that no state holds",
    "moe_input_jitter_eps": "draws random numbers in each pass",
    "moe_router_force_load_balancing": "draws random experts in each pass",
    "moe_router_force_biased": "draws random numbers for each layer",
    "moe_expert_capacity_factor": "drops tokens by what else is in their micro-batch",
}
# A loss that a router adds, and the field without which it is not computed.
ROUTER_LOSS, ROUTER_LOSS_TYPE = "moe_aux_loss_coeff", "moe_router_load_balancing_type"
# Kinds of load balancing with which megatron-core computes something else than their name says, or no pure function.
BALANCING = {
    "seq_aux_loss": "takes rows that lie end to end for one row",
    "global_aux_loss": "is divided by the number of ranks with rows of their own (NVIDIA/Megatron-LM#3672)",
    "sinkhorn": "picks a token's experts by what else is in its micro-batch",
    "quantile_balancing": "changes between calls a buffer of the model that no state holds",
}
# What positions of three axes and the features of images need as it is.
OF_SIGHT = frozenset({
    "apply_rope_fusion", "position_embedding_type", "mrope_section", "rotary_base", "rotary_percent",
    "rotary_interleaved", "seq_len_interpolation_factor", "scatter_embedding_sequence_parallel",
})  # fmt: skip
# What only transformer-engine's attention reads.
OF_ATTENTION = frozenset({
    "attention_backend", "cp_comm_type", "fp8_dot_product_attention", "fp8_multi_head_attention",
    "log_max_attention_logit", "qk_clip",
})  # fmt: skip


def check_same_model(model: Any, transformers_model: nn.Module, folder: str | Path) -> None:
    """Checks the windows, activation, norms and rotary embedding of Megatron's model, since no weight shows them.

    Raises:
        ModelError: they differ from transformers' model.
    """
    config: Any = transformers_model.config
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 0
    windows = [w for m in transformers_model.modules() if isinstance(w := getattr(m, "sliding_window", None), int)]
    if any(window < longest for window in windows) and model.config.window_size is None:
        raise _makes_other(
            folder, f"layers with a sliding window of {min(windows)} tokens", "attention to all tokens of them"
        )
    _check_activation(model, transformers_model, folder)
    rope = getattr(text, "rope_parameters", None) or {}
    if model.config.multi_latent_attention and "mscale_all_dim" in rope:
        raise ModelError(
            f"{folder} has multi-latent attention with YaRN, whose mscale_all_dim Megatron applies to attention "
            "scores and transformers does not; set actor.strategy=fsdp"
        )
    if (section := rope.get("mrope_section")) is not None:
        _check_axes(model, transformers_model, section, folder)
        return
    ours, theirs = _of_transformers(transformers_model), _of_megatron(model)
    if ours is None or theirs is None:
        return
    if 2 * ours.shape[-1] == theirs.shape[-1]:
        # Each frequency belongs to two numbers of a head, and some models have it once.
        ours = ours.repeat_interleave(2, -1)
    if ours.shape != theirs.shape or float((ours - theirs).abs().max()) > ROUNDING:
        raise _makes_other(folder, f"the rotary embedding {rope}", "one with other frequencies")


def _makes_other(folder: str | Path, has: str, makes: str, way: str = "actor.strategy=fsdp") -> ModelError:
    return ModelError(f"{folder} has {has}, and Megatron-Bridge makes {makes}; set {way}")


def check_head(skeleton: Skeleton, folder: str | Path) -> None:
    """Raises ModelError for images, and for logits with a factor and a bound beside the output layer."""
    if skeleton.family is not None and skeleton.config.model_type not in SEEING:
        raise ModelError(
            f"{folder} is a {type(skeleton.model).__name__}, and of models with images only Qwen2.5-VL and Qwen3-VL "
            "run on Megatron here; set actor.strategy to local or fsdp"
        )
    bias = skeleton.head == "lm" and skeleton.output_layer.bias is not None
    if skeleton.fit.own_head or bias:
        raise ModelError(
            f"{folder} is a {type(skeleton.model).__name__}: it makes logits by "
            f"{'an output layer with a bias' if bias else 'code of its own'}, and Megatron by an output layer "
            "without a bias; set actor.strategy=fsdp"
        )


def check_sight(skeleton: Skeleton, sizes: Sizes, folder: str | Path, *, fsdp: bool) -> None:
    """Refuses what a model with images cannot do on Megatron; a model of text can do it.

    Args:
        sizes: how ranks share the model.
        fsdp: whether Megatron-FSDP takes the place of Megatron's DDP.

    Raises:
        LayoutError: ranks share it in such a way.
        ModelError: its adapters or fields are such.
    """
    if skeleton.family is None:
        return
    named = f"{folder} is a {type(skeleton.model).__name__}"
    if sizes.pp > 1:
        raise LayoutError(
            f"pp = {sizes.pp}: {named}, whose tower and first layers run together, so it has one pipeline stage "
            "here; set pp to 1, and raise tp"
        )
    if sizes.cp > 1:
        raise LayoutError(
            f"cp = {sizes.cp}: {named}, and ranks cannot share the tokens of a row with images here; set cp to 1 "
            "(with tp and sp, ranks share tokens outside of attention)"
        )
    if fsdp:
        raise LayoutError(f"{named}, and Megatron-FSDP does not divide its tower; set use_megatron_fsdp=false")
    towered = [name for name in skeleton.adapters.layers if ".visual." in f".{name}"]
    if towered:
        raise ModelError(
            f"{named}, and Megatron-Bridge has no adapters for its tower, such as for {towered[0]}; set "
            "actor.freeze_vision_tower=true"
        )


def take_epsilons(
    tasks: Sequence[Task], canonical: Canonical, transformers_model: nn.Module, folder: str | Path
) -> None:
    """Gives each norm of Megatron's model the epsilon of transformers' norm, since Bridge has one for all norms.

    Raises:
        ModelError: an epsilon differs, and Megatron's norm has no place for another one.
    """
    for task in tasks:
        if len(task.hub) > 1 or task.module is None:
            continue
        name = canonical.place(task.hub[0]).name.rpartition(".")[0]
        theirs = transformers_model.get_submodule(name)
        if type(task.module) is type(theirs):
            # A tower is transformers' own.
            continue
        epsilon = getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))
        if "Norm" not in type(theirs).__name__ or not isinstance(epsilon, float):
            continue
        module: Any = task.module
        own = getattr(module, "eps", module.config.layernorm_epsilon)
        if own == epsilon:
            continue
        if not isinstance(getattr(module, "eps", None), float):
            raise _makes_other(folder, f"the epsilon {epsilon} in {name}", f"it {own}")
        module.eps = epsilon


@torch.no_grad()
def _check_activation(model: Any, transformers_model: nn.Module, folder: str | Path) -> None:
    at = torch.linspace(-4, 4, 65)
    for module in transformers_model.modules():
        ours: Any = getattr(module, "act_fn", None)
        theirs: Any = model.config.activation_func
        if callable(ours) and float((ours(at) - theirs(at)).abs().max()) > ACTIVATION_ROUNDING:
            name = getattr(theirs, "__name__", repr(theirs))
            raise _makes_other(folder, f"the activation {type(ours).__name__}", f"{name} of it")


@torch.no_grad()
def _check_axes(model: Any, text: Any, section: Sequence[int], folder: str | Path) -> None:
    """Compares the angles of tokens whose times, heights and widths all differ."""
    device = text.rotary_emb.inv_freq.device
    place = torch.arange(POSITIONS, device=device)
    positions = torch.stack([place, place.flip(0), (7 * place + 3) % POSITIONS])[:, None]
    ours: Tensor = text.rotary_emb(torch.zeros(1, device=device), positions)[0]
    if ours.dim() == 4:
        # Of all three axes. Each part of the angles is one axis', and attention picks it out.
        parts = ours.split([*section, *section], -1)
        ours = torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)
    theirs = model.rotary_pos_emb(positions, model.mrope_section)[:, 0, 0].cos()
    if ours[0].shape != theirs.shape or float((ours[0] - theirs.to(device)).abs().max()) > ROUNDING:
        raise _makes_other(
            folder,
            has=f"the rotary embedding {text.config.rope_parameters}",
            makes="one with other angles for positions of three axes",
            way="actor.strategy to local or fsdp",
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


def check_fields_of_sight(provider: Any, overrides: Mapping[str, Any], folder: str | Path) -> None:
    """Raises ModelError for fields of a provider that the tower of images and its positions of three axes forbid.

    Args:
        overrides: what a user sets of it.
    """
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    of_text = {field.name for field in dataclasses.fields(GPTModelProvider)}
    of_images = {field.name for field in dataclasses.fields(provider)} - of_text
    for name in sorted(overrides.keys() & (of_images | OF_SIGHT)):
        if overrides[name] not in (None, False):
            raise ModelError(
                f"{folder}: the provider's field {name} cannot be set for a model with images; config.json and this "
                "backend decide it: leave it out of override_transformer_config"
            )


def checked(provider: Any, overrides: Mapping[str, Any], folder: str | Path) -> Mapping[str, Any]:
    """Returns the overrides of a provider.

    Raises:
        ModelError: a field does not exist, is decided by this backend or by the folder, or has a value of another
            type.
    """
    fields = {field.name for field in dataclasses.fields(provider)}
    settable = sorted(fields - DECIDED - OF_FOLDER - IMPURE.keys())
    for name, value in overrides.items():
        field = f"{folder}: the provider's field {name}"
        if name in DECIDED:
            raise ModelError(f"{field} cannot be set; this backend decides it")
        if name in IMPURE and value not in (None, False):
            raise ModelError(f"{field} cannot be set; it {IMPURE[name]}")
        if name in OF_FOLDER:
            raise ModelError(f"{field} cannot be set; config.json decides it")
        if name not in fields:
            raise ModelError(
                f"{folder}: {type(provider).__name__} has no field {name} that override_transformer_config could "
                f"set{did_you_mean(name, settable)}"
            )
        default = getattr(provider, name)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ModelError(f"{field} is {value!r}; it must be true or false")
        elif isinstance(default, int | float) and isinstance(value, str | bool):
            raise ModelError(f"{field} is {value!r}; it must be a number, as {default!r}")
    kinds = overrides.get(ROUTER_LOSS_TYPE, "none")
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in BALANCING:
            raise ModelError(
                f"{folder}: the provider's field {ROUTER_LOSS_TYPE} is {kind!r}, which {BALANCING[kind]}; set it to "
                "aux_loss, or leave it out"
            )
    if overrides.get(ROUTER_LOSS) and overrides.get(ROUTER_LOSS_TYPE, "none") == "none":
        raise ModelError(
            f"{folder}: the provider's field {ROUTER_LOSS} does nothing without {ROUTER_LOSS_TYPE}, such as aux_loss"
        )
    return overrides
