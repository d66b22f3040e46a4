"""Loading published weights into vLLM's model, with a check that vLLM took them.

vLLM names its own parameters: it fuses some tensors and splits others among tensor-parallel ranks. Its loaders take
Hugging Face names, skip some that they do not know, and only warn of a layer that received nothing. Here each of its
parameters must be loaded. Where vLLM loads by layers, it counts elements, and each layer must have all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.models.siglip import SiglipVisionModel

from verl_fn.backends.hf.lora import is_adapter
from verl_fn.backends.hf.vision import family_of
from verl_fn.backends.protocol import BUCKET_BYTES, Chunk, TensorSpec, WeightSource
from verl_fn.backends.vllm.adapters import renaming
from verl_fn.backends.weight_sync import IncompleteWeights, arriving, whole_of_parts

# Methods of layers that compute with their weights as they are loaded.
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def load(
    model: torch.nn.Module,
    config: Any,
    source: WeightSource,
    *,
    checked: bool,
    buffers: Collection[str] = (),
    conversions: Sequence[Any] = (),
    adapters: dict[str, Tensor] | None = None,
) -> None:
    """Replaces all weights of vLLM's model; if the source has none of the tower that sees images, all others.

    Args:
        source: weights under Hugging Face names.
        buffers: the names of the tensors that are published in parts.
        conversions: transformers' conversions of names in files, by which vLLM knows tensors.
        adapters: receives the tensors of adapters, since these are no weights of the model; None without adapters.

    Raises:
        IncompleteWeights: a part of the source is missing, arrived twice or was altered, or a parameter of vLLM's
            model was not loaded, or not all of it.
    """
    loader: Any = model
    in_layers, tower = not in_place(model), kept_tower(model, config, source)
    between = (lambda: _keep_pending(model)) if in_layers else lambda: None
    places = {} if in_layers else _embeddings(model)
    tensors: Iterator[tuple[str, Tensor]] = whole(source, checked=checked, between=between, places=places)
    tensors = ((name, whole_of_parts(t) if name in buffers else t) for name, t in tensors)
    if adapters is not None:
        tensors = _without_adapters(tensors, adapters)
    if _stacked(model):
        # vLLM's loader of gpt-oss has the name that its experts had before they became a layer of their own.
        tensors = ((name.replace(".experts.", ".experts.routed_experts."), t) for name, t in tensors)
    else:
        hf_config = config.hf_config
        tensors = (part for name, t in tensors for part in in_files(name, t, conversions, hf_config))
    if adapters is not None:
        renamed = renaming(model)
        tensors = ((renamed(name), t) for name, t in tensors)
    if isinstance(getattr(model, "vision_tower", None), SiglipVisionModel):
        # vLLM's has the level of names that published files have, and transformers' has not.
        tensors = ((name.replace("vision_tower.", "vision_tower.vision_model."), t) for name, t in tensors)
    with torch.no_grad():
        names: set[str] = (
            _load_by_layers(loader, config, tensors, tower) if in_layers else loader.load_weights(tensors)
        )
    loaded = (name for name, _ in model.named_parameters() if not name.startswith(tower))
    if missing := [name for name in loaded if name not in names]:
        raise IncompleteWeights(
            f"vLLM took the weights and left {len(missing)} of its parameters as they were, such as {missing[0]}"
        )


def kept_tower(model: Any, config: Any, source: WeightSource) -> tuple[str, ...]:
    """Returns how the names of vLLM's tower begin, if a source has none of its weights; else nothing."""
    family = family_of(config.hf_config)
    if family is None or any(family.tower in spec.name.split(".") for spec in source.specs):
        return ()
    return tuple(f"{name.rstrip('.')}." for name in model.get_mm_mapping().tower_model)


def in_place(model: torch.nn.Module) -> bool:
    """Returns whether vLLM computes with all weights as they are loaded, so that they can be overwritten.

    Otherwise it repacks them after loading, as on CPUs and for experts, and only its loading by layers is right.
    """
    if any(p.device.type == "cpu" for p in model.parameters()):
        return False
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    direct = _stacked(model)
    # Triton's kernels compute with the experts' weights as they are loaded.
    triton = UnquantizedMoeBackend.TRITON
    return all(
        method is None or type(method) in PLAIN or (direct and getattr(method, "unquantized_backend", None) == triton)
        for method in methods
    )


def _stacked(model: torch.nn.Module) -> bool:
    """Returns whether vLLM's loader takes all experts of a layer as one tensor, and writes it into the parameter."""
    return type(model).__name__ == "GptOssForCausalLM"


def _embeddings(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the weights of embeddings and output layers by name: the largest tensors, in memory that they have."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, VocabParallelEmbedding)]
    return {f"{name}.weight": layer.weight.detach() for name, layer in layers}


def _without_adapters(
    tensors: Iterator[tuple[str, Tensor]], adapters: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a model with LoRA layers, and copies the adapters into ``adapters``."""
    for name, t in tensors:
        if is_adapter(name):
            adapters[name] = t.clone()
        else:
            yield name, t


def _load_by_layers(
    model: Any, config: Any, tensors: Iterator[tuple[str, Tensor]], tower: tuple[str, ...]
) -> set[str]:
    tied = _tied(model)
    own = [layer for name, layer in model.named_modules() if not f"{name}.".startswith(tower)]
    # vLLM's loading by layers goes through ``modules``.
    layers: Any = SimpleNamespace(modules=lambda: own) if tower else model
    for p in model.parameters():
        if isinstance(loader := getattr(p, "weight_loader", None), functools.partial):
            # As of MiniMax's norms. vLLM asks a loader for its name.
            loader.__name__ = type(loader).__name__  # type: ignore[attr-defined]
    initialize_layerwise_reload(layers)
    try:
        loaded: set[str] = model.load_weights(tensors)
        for name, layer in model.named_modules():
            if layer not in tied:
                _check_loaded(name, layer)
    finally:
        # Also after a failure, since a layer that keeps its partial weights would mix them with the next ones.
        finalize_layerwise_reload(layers, config)
    for layer in tied:
        layer.quant_method.process_weights_after_loading(layer)
    return loaded


def _tied(model: torch.nn.Module) -> list[Any]:
    """Returns the layers with the weight of an earlier layer, such as an output layer with the embedding's.

    vLLM's loading by layers leaves them out, also where they compute with a repacked copy of the weight. Experts that
    share the bias of their router are none of them: to repack their weights twice would mix them up.
    """
    first: dict[Tensor, torch.nn.Module] = {}
    owned = ((layer, layer.named_parameters(recurse=False)) for layer in model.modules())
    weights = ((layer, p) for layer, own in owned for name, p in own if name == "weight")
    return [layer for layer, weight in weights if first.setdefault(weight, layer) is not layer]


def _check_loaded(name: str, layer: torch.nn.Module) -> None:
    """Raises an error for a layer that vLLM has not finished, although some of its parameters are to be loaded."""
    info = get_layerwise_info(layer)
    if not info.can_load() or isinstance(layer, (Attention, MLAAttention)):
        return
    # vLLM loads some at once, as the biases of MiniMax-M2's routers.
    wanted = sum(p.numel() for name, p in layer.named_parameters(recurse=False) if name not in SKIP_TENSORS)
    if isinstance(layer, VocabParallelEmbedding):
        # vLLM fills up the vocabulary with rows that no checkpoint has.
        shard = layer.shard_indices
        wanted = (
            wanted // layer.num_embeddings_per_partition * (shard.org_vocab_end_index - shard.org_vocab_start_index)
        )
    if info.load_numel < wanted:
        raise IncompleteWeights(f"vLLM loaded {info.load_numel} of the {wanted} elements of {name}")


def _keep_pending(model: torch.nn.Module) -> None:
    """Copies weights of layers that wait for more, since the next bucket may overwrite them."""
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for name, value in bound.arguments.items():
                if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and not value.is_meta:
                    bound.arguments[name] = value.clone()


def whole(
    source: WeightSource,
    *,
    checked: bool,
    between: Callable[[], None] = lambda: None,
    places: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors under their names; each is valid until the next one is taken.

    A tensor that comes in several chunks is put together in its place, if there is one, or in memory of its own.

    Args:
        between: is called before a bucket is overwritten.
        places: parameters that vLLM copies tensors of the same names into; they may have more rows.

    Raises:
        IncompleteWeights: as ``arriving``.
    """
    specs = {spec.name: spec for spec in source.specs}
    parts: dict[str, Tensor] = {}
    for bucket in arriving(source, max_bytes=BUCKET_BYTES, checked=checked):
        for chunk in bucket:
            tensor = _assembled(chunk, specs[chunk.name], parts, places or {})
            if tensor is not None:
                yield chunk.name, tensor
        between()


def _assembled(
    chunk: Chunk, spec: TensorSpec, parts: dict[str, Tensor], places: Mapping[str, Tensor]
) -> Tensor | None:
    """Returns the whole tensor that a chunk completes; None if more is to come."""
    if chunk.values.shape == spec.shape:
        return chunk.values
    if len(chunk.values) == spec.rows:
        return chunk.values.reshape(spec.shape)
    if chunk.name not in parts:
        place = places.get(chunk.name)
        if place is not None and _holds(place, spec):
            parts[chunk.name] = place[: spec.rows]
        else:
            parts[chunk.name] = chunk.values.new_empty(spec.shape)
    parts[chunk.name][chunk.start : chunk.start + len(chunk.values)] = chunk.values
    return parts.pop(chunk.name) if chunk.start + len(chunk.values) == spec.rows else None


def _holds(place: Tensor, spec: TensorSpec) -> bool:
    """Returns whether a parameter has the rows of a tensor; an embedding may be padded."""
    rows, *rest = place.shape or (0,)
    return place.dtype == spec.dtype and rows >= spec.rows and tuple(rest) == spec.shape[1:]


def in_files(name: str, tensor: Tensor, conversions: Sequence[Any], config: Any) -> Iterable[tuple[str, Tensor]]:
    """Returns a tensor, or its parts, under the names that the files of a model have for them.

    Args:
        name: in transformers' model, whose experts are stacked.
        conversions: transformers' conversions of names in files.

    Example:
        >>> from transformers import MixtralConfig
        >>> from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        >>> of_family = get_checkpoint_conversion_mapping("mixtral"), MixtralConfig()
        >>> parts = in_files("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(1, 6, 2), *of_family)
        >>> [(name.removeprefix("model.layers.0."), tuple(t.shape)) for name, t in parts]
        [('block_sparse_moe.experts.0.w1.weight', (3, 2)), ('block_sparse_moe.experts.0.w3.weight', (3, 2))]
    """
    # A prefix is not part of the names that vLLM knows, and a tensor that files join with others stays as it is.
    kept = [one for one in conversions if not isinstance(one, PrefixChange) and len(one.target_patterns) == 1]
    if not kept:
        return [(name, tensor)]
    return revert_weight_conversion(SimpleNamespace(_weight_conversions=kept, config=config), {name: tensor}).items()
