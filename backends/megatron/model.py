"""Makes Megatron's model of a Hugging Face folder, through Megatron-Bridge, in Megatron's DDP."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from verl_fn.backends.hf.config import ModelError, read_config, refused
from verl_fn.backends.hf.experts import experts_of
from verl_fn.backends.hf.lora import Adapters, Lora
from verl_fn.backends.hf.skeleton import Fit, Skeleton
from verl_fn.backends.megatron import adapters as lora_adapters
from verl_fn.backends.megatron.attention import PackedAttention, replace_attention
from verl_fn.backends.megatron.conversion import SEEING, bridge_of
from verl_fn.backends.megatron.fidelity import OF_ATTENTION, check_fields_of_sight, check_sight, checked
from verl_fn.backends.megatron.importing import has_transformer_engine, load_bridge, quiet
from verl_fn.backends.megatron.layout import Layout
from verl_fn.backends.megatron.rows import ROUTED, MicroBatch
from verl_fn.backends.megatron.shards import FULLY_SHARDED, unwrapped

# Bridge's layers that do the same without transformer-engine, with attention and norms of our own.
REPLACED = ("default_layer_spec", "get_gpt_decoder_block_spec")
# Kernels that need transformer-engine or Apex.
PLAIN = dict.fromkeys(
    ("persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion",
     "cross_entropy_loss_fusion", "moe_permute_fusion", "moe_grouped_gemm", "moe_router_fusion"),
    False,
)  # fmt: skip
# What transformers takes for fields that a config with YaRN lacks (Peng et al. 2023, arXiv 2309.00071).
YARN = {
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}  # fmt: skip


@attrs.frozen(eq=False)
class Built:
    """A model of Megatron on this rank.

    Attributes:
        ddp: Megatron's ``DistributedDataParallel``, or its ``FullyShardedDataParallel``.
        model: the model inside, a ``GPTModel``.
        tied: on the first and last of several stages, the weight that both have; otherwise None.
        fit: what the model does to its logits after the output layer.
        sight: what sees the images of a batch; None for a model of text.
    """

    bridge: Any
    config: Any
    ddp: Any
    model: Any
    tied: nn.Parameter | None
    fit: Fit
    sight: Sight | None = None

    @property
    def fully_sharded(self) -> bool:
        """Whether Megatron-FSDP has the place of DDP."""
        return self.ddp.ddp_config.use_megatron_fsdp

    def complete_gradients(self, layout: Layout) -> None:
        """Adds up gradients of which each rank of tensor parallelism has a part, where Megatron does not.

        The norm after linear attention is one for all heads, and ranks share the heads. Megatron adds up its
        gradients only with sequence parallelism (NVIDIA/Megatron-LM#7452).
        """
        if layout.sizes.tp == 1 or layout.sizes.sp:
            return
        for module in self.model.modules():
            if hasattr(module, "gated_delta_rule"):
                for p in module.out_norm.parameters():
                    if p.requires_grad:
                        dist.all_reduce(p.main_grad, group=layout.groups.tp)

    @property
    def keeps_rows_apart(self) -> bool:
        """Whether every layer of this stage mixes the tokens of a row by attention that takes rows end to end."""
        kinds: tuple[type[nn.Module], ...] = (PackedAttention,)
        if has_transformer_engine():
            from megatron.core.extensions.transformer_engine import TEDotProductAttention

            kinds += (TEDotProductAttention,)
        attention = [getattr(layer, "self_attention", None) for layer in self.model.decoder.layers]
        return all(isinstance(getattr(one, "core_attention", None), kinds) for one in attention)

    def output(self, tp_rank: int) -> tuple[int, Tensor, Tensor | None]:
        """Returns the rows of the output layer that a rank of tensor parallelism has, on the last stage.

        Returns:
            The token id of the first row, the rows without padding, and Megatron's buffer for their gradients where
            the backward pass may add to it.
        """
        weight: Any = self._output_weight
        first = tp_rank * weight.shape[0]
        rows = slice(max(0, self.config.get_text_config().vocab_size - first))
        buffered = torch.is_grad_enabled() and weight.requires_grad and not self.fully_sharded
        return first, weight[rows], weight.main_grad[rows] if buffered else None

    def embedded(self, layout: Layout, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Returns what Megatron's model reads in place of tokens, as its argument; nothing for a model of text."""
        return {} if self.sight is None else {"decoder_input": self.sight.embedded(self.model, layout, micro_batch)}

    @property
    def _output_weight(self) -> Tensor:
        if self.model.share_embeddings_and_output_weights:
            weight = self.model.shared_embedding_or_output_weight()
        else:
            weight = self.model.output_layer.weight
        if self.fully_sharded:
            # It gathers what a layer is called for, and this one is not.
            self.ddp.module.all_gather_and_wait_parameters_ready([weight], prefetch=False)
        return weight


class Sight:
    """transformers' tower beside Megatron's language model, and its features on their way into that model.

    Every rank of tensor parallelism has the whole tower and computes the same with it. Megatron-Bridge does so for
    Qwen2.5-VL. It makes Qwen3-VL's tower of transformer-engine's layers, of which CPUs have none, so that this tower
    is transformers', too.

    Args:
        how: how the model is made.

    Attributes:
        visual: transformers' module, by the name that its own function knows.
        deep: for each of the first layers, what is added to its output (DeepStack, arXiv 2406.04334), in the
            micro-batch that was embedded last. Its backward pass ends before the next one is embedded, since there
            are no pipeline stages.
    """

    def __init__(self, skeleton: Skeleton, how: How) -> None:
        own: Any = type(skeleton.tower)
        self.config = skeleton.config
        with torch.device(how.device):
            self.visual: Any = own(skeleton.config.vision_config)
        for p in self.visual.parameters():
            # Constants, such as rotary frequencies, stay in fp32.
            p.data = p.data.to(how.dtype)
        self.visual.requires_grad_(how.lora is None and not how.freeze_tower)
        if how.checkpointing:
            self.visual.gradient_checkpointing_enable({"use_reentrant": False})
        self.deep: list[Tensor] = []
        # transformers' function for this tower, without the language model that it belongs to there.
        self.get_image_features = functools.partial(type(skeleton.body).get_image_features, self)

    def join(self, model: Any) -> None:
        """Adds the tower to Megatron's model, and what rotates by positions of three axes as transformers does."""
        model.visual = self.visual
        if self.config.model_type == "qwen3_vl":
            from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import Qwen3VLMultimodalRotaryEmbedding

            model.rotary_pos_emb = Qwen3VLMultimodalRotaryEmbedding(
                model.config.kv_channels, rotary_base=model.config.rotary_base, cp_group=model.pg_collection.cp
            )
        for number, layer in enumerate(model.decoder.layers):
            layer.register_forward_hook(functools.partial(self._add, number))

    def _add(self, number: int, layer: nn.Module, args: Any, output: Any) -> Any:
        if number >= len(self.deep):
            return None
        hidden, *rest = output
        return hidden + self.deep[number], *rest

    def forget(self) -> None:
        """Lets go of the features of the last micro-batch."""
        self.deep = []

    def embedded(self, model: Any, layout: Layout, micro_batch: MicroBatch) -> Float[Tensor, "t b H"]:
        """Returns the embeddings of this rank's tokens, with features for image tokens."""
        embeddings = model.embedding(input_ids=micro_batch.tokens, position_ids=None)
        self.forget()
        images = micro_batch.images
        # Megatron's DDP adds up gradients that are zero, so a rank without images needs no tower.
        if images is None or images.blank:
            return _shared(embeddings, layout)
        shape = micro_batch.tokens.shape
        flat = embeddings.transpose(0, 1).flatten(0, 1)
        features, deep = images.features(self, flat.dtype)

        def placed(base: Tensor, t: Tensor) -> Tensor:
            whole = base.index_copy(0, micro_batch.image_tokens, t)
            return _shared(whole.view(*shape, -1).transpose(0, 1).contiguous(), layout)

        hidden, of_layers = placed(flat, features), [placed(torch.zeros_like(flat), t) for t in deep]
        self.deep = [t.detach().requires_grad_(t.requires_grad) for t in of_layers]
        return _Deep.apply(hidden, self.deep, *of_layers) if self.deep else hidden


def _shared(t: Tensor, layout: Layout) -> Tensor:
    """Returns this rank's part of the tokens, if ranks of tensor parallelism share them."""
    if not layout.sizes.sp:
        return t
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    return scatter_to_sequence_parallel_region(t, group=layout.groups.tp)


class _Deep(torch.autograd.Function):
    """Hands the gradients of features that layers have added on to the tower, after all layers.

    A layer that is recomputed runs a backward pass of its own. Without this function, that pass would go on through
    the tower, once for each such layer.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, added: list[Tensor], *deep: Tensor) -> Tensor:
        ctx.added = added
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *(t.grad for t in ctx.added)


@attrs.frozen(eq=False)
class How:
    """How a model is made.

    Attributes:
        checkpointing: recompute each layer in the backward pass.
        provider: fields of Bridge's provider.
        router_replay: whether routers can record and replay the experts of each token.
        updates_by: who computes updates, ``verl_fn`` or ``megatron``.
        fsdp: whether Megatron-FSDP takes the place of Megatron's DDP.
        freeze_tower: whether the module that sees images is not trained.
    """

    head: str
    dtype: torch.dtype
    device: torch.device
    checkpointing: bool
    provider: Mapping[str, Any]
    lora: Lora | None = None
    router_replay: bool = False
    updates_by: str = "verl_fn"
    fsdp: bool = False
    freeze_tower: bool = False

    @property
    def recorded(self) -> tuple[str, ...]:
        """The outputs that the model records on its way, with any head."""
        return (ROUTED,) if self.router_replay else ()


def build(folder: str | Path, layout: Layout, how: How, skeleton: Skeleton) -> Built:
    """Makes the model of a folder, whose weights are not read; all ranks call it together.

    Args:
        how: how it is made.

    Raises:
        ModelError: Megatron-Bridge does not know this family, has no such adapters, or a field does not exist.
        LayoutError: the model cannot be shared in this way.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    config = _for_bridge(read_config(folder), folder)
    check_sight(skeleton, layout.sizes, folder, fsdp=how.fsdp)
    settings = _settings(layout, how, config.get_text_config(), folder)
    bridge, provider, plain = _provider(config, folder, settings, how.provider)
    repeatable = _must_repeat(how, plain)
    _declare(provider, folder)
    cuda = [how.device] if how.device.type == "cuda" else []
    # DDP hangs its hooks on the graph of autograd.
    with layout.active(), torch.random.fork_rng(devices=cuda), torch.enable_grad(), quiet():
        model_parallel_cuda_manual_seed(0)
        with refused(f"{folder}: Megatron makes no model of these fields of its provider"):
            provider.finalize()
        sight = Sight(skeleton, how) if config.model_type in SEEING else None

        def changed(chunks: list[Any]) -> list[Any]:
            if sight is not None:
                sight.join(chunks[0])
            if plain:
                _replace_gates(chunks[0])
            _change(chunks[0], bridge, config, layout, how, skeleton.adapters, repeatable)
            return chunks

        # Given hooks replace the hooks that a bridge has registered.
        hooks = [*([provider.pre_wrap_hook] if provider.pre_wrap_hook else []), changed]
        try:
            (ddp,) = provider.provide_distributed_model(
                ddp_config=DistributedDataParallelConfig(
                    use_distributed_optimizer=True, grad_reduce_in_fp32=True, **(FULLY_SHARDED if how.fsdp else {})
                ),
                use_megatron_fsdp=how.fsdp,
                use_cpu_initialization=how.device.type == "cpu",
                mixed_precision_wrapper=None,
                pre_wrap_hook=hooks,
                pg_collection=layout.groups,
            )
        except ImportError as error:
            # The innermost error names the package.
            raise ModelError(f"{folder}: layers of this family need a package: {error.__cause__ or error}") from error
    ddp.train()
    model, tied = unwrapped(ddp) if how.fsdp else ddp.module, None
    if (
        layout.sizes.pp > 1
        and model.share_embeddings_and_output_weights
        and (model.pre_process or model.post_process)
    ):
        tied = model.shared_embedding_or_output_weight()
    return Built(bridge, config, ddp, model, tied, skeleton.fit, sight)


def _must_repeat(how: How, plain: bool) -> bool:
    """Returns whether transformer-engine's layers must repeat bitwise, so that its attention is replaced.

    Raises:
        ModelError: a field of the provider is for that attention.
    """
    repeats = not plain and torch.are_deterministic_algorithms_enabled()
    if repeats and (given := sorted(OF_ATTENTION & how.provider.keys())):
        raise ModelError(
            f"the provider's field {given[0]} is for transformer-engine's attention, and another one takes its place "
            "so that backward passes repeat bitwise; set driver.deterministic=false (deterministic=False) to keep it"
        )
    return repeats


def _change(
    model: Any, bridge: Any, config: Any, layout: Layout, how: How, adapters: Adapters, repeatable: bool
) -> None:
    """Changes Megatron's model before DDP wraps it."""
    if how.head == "value" and model.post_process:
        # Every rank of tensor parallelism has all of it.
        like = next(model.decoder.parameters())
        model.output_layer = nn.Linear(model.config.hidden_size, 1, device=like.device, dtype=like.dtype)
    _fix_padding(model, layout, getattr(config.get_text_config(), "pad_token_id", None))
    if layout.sizes.tp > 1:
        _share_sinks(model)
    if repeatable:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        replace_attention(model, TEDotProductAttention)
        _replace_products(model)
    if adapters.lora is not None:
        tasks = bridge_of(bridge, config).build_conversion_tasks(config, [model])
        lora_adapters.add(model, tasks, adapters, layout.sizes.tp)
        if how.head == "value" and model.post_process:
            model.output_layer.requires_grad_(True)


def _provider(
    config: Any, folder: str | Path, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[Any, Any, bool]:
    """Returns Bridge's ``AutoBridge`` of a config, its provider with these fields, and whether layers are our own.

    Those of transformer-engine compute products of fp32 in TF32, so megatron-core's layers have plain ones instead.

    Raises:
        ModelError: Bridge does not know this family, or a field does not exist.
    """
    auto = load_bridge()
    with refused(f"{folder}: Megatron-Bridge makes no model of it"), quiet():
        bridge = auto.from_hf_config(config)
        provider = bridge.to_megatron_provider(load_weights=False)
    if (kind := provider.experimental_attention_variant) not in (None, "gated_delta_net"):
        raise ModelError(
            f"{folder} has attention of the kind {kind}, with which Megatron computes other log-probs than "
            "transformers; set actor.strategy=fsdp"
        )
    of_core = _of_core(provider)
    exact = settings["params_dtype"] == torch.float32 and of_core and _has_plain_layers(bridge, config, provider)
    plain = exact or not has_transformer_engine()
    if config.model_type in SEEING:
        check_fields_of_sight(provider, overrides, folder)
    settings = {**settings, **(PLAIN if plain else fused_kernels(provider))}
    for name, value in {**settings, **checked(provider, overrides, folder)}.items():
        setattr(provider, name, value)
    if provider.position_embedding_type == "yarn":
        # Bridge leaves out what the config does.
        for name, value in YARN.items():
            setattr(provider, name, value if (given := getattr(provider, name)) is None else given)
    if config.model_type in SEEING:
        # transformer-engine's fused kernel would take the positions of the first row for all rows.
        provider.apply_rope_fusion = False
        # Only the language model; Bridge's provider of Qwen2.5-VL has the sections of the published sizes.
        provider.provide = provider.provide_language_model
        provider.mrope_section = list(config.get_text_config().rope_parameters["mrope_section"])
    if plain:
        if not of_core:
            raise ModelError(
                f"{folder}: Megatron-Bridge makes this family of layers that need transformer-engine: install it, or "
                "set actor.strategy=fsdp"
            )
        provider.transformer_layer_spec = plain_spec
    return bridge, provider, plain


def adds_losses(config: Any) -> bool:
    """Returns whether the routers of a model add losses of their own."""
    return config.moe_router_load_balancing_type != "none" or bool(config.moe_z_loss_coeff)


def _declare(provider: Any, folder: str | Path) -> None:
    """Warns of losses that a router adds, since a user can ask for them."""
    if adds_losses(provider):
        warnings.warn(
            f"{folder}: routers add losses of their own to the gradients (moe_router_load_balancing_type = "
            f"{provider.moe_router_load_balancing_type!r}, moe_z_loss_coeff = {provider.moe_z_loss_coeff}). Megatron "
            "computes them for each micro-batch, padding included, so gradients depend on micro-batches, and the "
            "metric loss does not have them",
            stacklevel=2,
        )


def _for_bridge(config: Any, folder: str | Path) -> Any:
    """Returns the config with the fields that Bridge reads.

    It has the language model's architecture, for Bridge to look up, since a critic's has another. Some families of
    transformers list the kind of each MLP, and Bridge reads how many of the first ones are dense.

    Raises:
        ModelError: transformers has no language model for it, or the kinds are in another order.
    """
    from transformers.models.auto import modeling_auto as auto

    of_images = config.model_type in SEEING
    names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if of_images else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names.get(config.model_type)
    if name is None:
        raise ModelError(f"transformers has no language model of the type {config.model_type}")
    config.architectures = [name]
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None and not hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if "dense" in kinds[config.first_k_dense_replace :]:
            raise ModelError(
                f"{folder} has dense layers after layers with experts, and Megatron-Bridge reads only dense layers "
                "before them"
            )
    return config


def _settings(layout: Layout, how: How, config: Any, folder: str | Path) -> dict[str, Any]:
    """Returns the fields of Bridge's provider that this backend decides, of a language model's config.

    Raises:
        LayoutError: ranks cannot share the model.
        ModelError: it has no experts to replay.
    """
    from megatron.core.transformer.enums import AttnBackend

    layout.sizes.check_model(config)
    if how.router_replay and not experts_of(config):
        raise ModelError(f"{folder}: router_replay needs a model with experts, and this one has none")
    sizes, dtype = layout.sizes, how.dtype
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp,
        "context_parallel_size": sizes.cp, "expert_model_parallel_size": sizes.ep, "expert_tensor_parallel_size": 1,
        "sequence_parallel": sizes.sp, "params_dtype": dtype, "pipeline_dtype": dtype, "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16, "fp16": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        # Megatron then adds gradients up, and divides by nothing.
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "should_pad_vocab": config.vocab_size % sizes.tp != 0, "make_vocab_size_divisible_by": 1,
        # A loss that a config inherits would change gradients unseen.
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None,
        "moe_token_dispatcher_type": "alltoall", "mtp_num_layers": None,
        # Bridge turns it on beside transformer-engine, and megatron-core's output layer then needs Apex.
        "gradient_accumulation_fusion": False,
        # Megatron keeps it in variables of the process, and a family's own choice would fit only one family.
        "attention_backend": AttnBackend.auto,
        # Some families have layers with megatron-core's own attention, whose kernels are Apex's.
        "masked_softmax_fusion": False,
        # A bias of experts that is part of the folder, and that no step changes.
        "moe_router_bias_update_rate": 0.0,
    }  # fmt: skip
    if how.router_replay:
        # Megatron's fused router does not ask what to replay.
        settings |= {"moe_enable_routing_replay": True, "moe_router_fusion": False}
    if how.head == "value":
        settings["share_embeddings_and_output_weights"] = False
    if how.checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return settings


def fused_kernels(provider: Any) -> dict[str, bool]:
    """Returns the kernels that Bridge turns on only for some of the families with megatron-core's own layers.

    Without them Megatron rotates queries and keys row by row, and each layer waits for the lengths of the rows.
    """
    if not _of_core(provider):
        return {}
    rotary = provider.position_embedding_type == "rope" and not provider.multi_latent_attention
    swiglu = provider.gated_linear_unit and provider.activation_func is nn.functional.silu
    dense = provider.num_moe_experts is None
    fused = {"apply_rope_fusion": rotary, "bias_activation_fusion": swiglu and dense}
    return {name: True for name, usable in fused.items() if usable}


def _has_plain_layers(bridge: Any, config: Any, provider: Any) -> bool:
    """Returns whether our own layers compute what this family needs, and Bridge maps their experts' parameters."""
    if provider.softmax_type != "vanilla" or provider.window_size is not None or provider.normalization != "RMSNorm":
        return False
    own = bridge._model_bridge
    own.hf_config = config
    expert = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    return provider.num_moe_experts is None or own.mapping_registry().megatron_to_hf_lookup(expert) is not None


def _of_core(provider: Any) -> bool:
    """Returns whether the model consists of megatron-core's own layers."""
    spec = getattr(provider, "transformer_layer_spec", None)
    return getattr(getattr(spec, "func", spec), "__name__", "") in REPLACED


class RMSNorm(nn.Module):
    """Root mean square normalisation in fp32, scaled in the model's dtype, without transformer-engine.

    A zero-centred weight w scales by 1 + w, in fp32.

    By the name of this class Megatron-Bridge knows that it is a norm, whose weights every rank has whole.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps, self.centred = eps, bool(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron adds up the gradients of ranks that share the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised tensor, of the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.centred:
            return ((1 + self.weight.float()) * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def plain_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Returns the layers of a model without transformer-engine, with attention and norms of our own."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    if config.multi_latent_attention and (config.tensor_model_parallel_size > 1 or config.q_lora_rank is None):
        raise ModelError("multi-latent attention without transformer-engine needs tp = 1 and a q_lora_rank")
    own_norm = config.normalization == "RMSNorm"
    if config.sequence_parallel and not own_norm:
        raise ModelError(f"sp needs transformer-engine for a model with {config.normalization}")
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if own_norm:
            parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
    if own_norm:
        block.layer_norm = RMSNorm
    return block


def _replace_gates(model: nn.Module) -> None:
    """Replaces the product of routers: transformer-engine's is not for CPUs, and computes fp32 in TF32."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import Router

    if moe_utils.te_general_gemm is None:
        return

    def gate(router: Any, x: Tensor) -> Tensor:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router.config.moe_router_dtype, x.dtype)
        bias = None if router.bias is None else router.bias.to(dtype)
        return nn.functional.linear(x.to(dtype), router.weight.to(dtype), bias)

    module: Any
    for module in model.modules():
        if isinstance(module, Router):
            module.gating = functools.partial(gate, module)


def _replace_products(model: nn.Module) -> None:
    """Replaces kernels of linear attention that do not repeat bitwise, as megatron-core's own setting does."""
    for module in model.modules():
        if hasattr(module, "gated_delta_rule"):
            from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

            module.gated_delta_rule = torch_chunk_gated_delta_rule


def _share_sinks(model: nn.Module) -> None:
    """Declares that ranks of tensor parallelism share the sinks of heads, as they share the heads."""
    sinks: Any
    for name, sinks in model.named_parameters():
        if name.endswith(".softmax_offset"):
            sinks.tensor_model_parallel, sinks.partition_dim, sinks.partition_stride = True, 0, 1


def _fix_padding(model: Any, layout: Layout, padding: int | None) -> None:
    """Makes the embedding of the padding token a constant, as transformers does."""

    def embed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor) -> Tensor:
        ids = args[0] if args else kwargs["input_"]
        is_padding = ids == padding
        if layout.sizes.sp and module.reduce_scatter_embeddings:
            # Ranks of tensor parallelism share the tokens, one position of all rows after the other.
            is_padding = is_padding.t().reshape(-1).chunk(layout.sizes.tp)[layout.tp_rank]
        return torch.where(is_padding.view(*rows.shape[:-1], 1), rows.detach(), rows)

    if padding is not None and model.pre_process:
        model.embedding.word_embeddings.register_forward_hook(embed, with_kwargs=True)
