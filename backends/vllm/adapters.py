"""LoRA adapters beside the weights of vLLM's model: it computes with them by its own LoRA layers.

vLLM wraps the layers that may have adapters (this renames their parameters) and reads adapters from files. Here
published tensors take the place of the only adapter, and requests name it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Adapters, Lora, in_peft

# The ranks that vLLM makes room for.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
NUMBER, NAME = 1, "published"


def adapter_arguments(adapters: Adapters, *, sees: bool = False) -> dict[str, Any]:
    """Returns the arguments of vLLM's ``EngineArgs`` for a model with adapters.

    Args:
        sees: whether it is a model with images.

    Raises:
        ModelError: vLLM has no such adapters.

    Example:
        >>> adapters = Adapters(Lora(rank=3), ("model.layers.0.q_proj", "model.layers.1.q_proj"))
        >>> arguments = adapter_arguments(adapters)
        >>> arguments["max_lora_rank"], arguments["lora_target_modules"]
        (8, ['q_proj'])
    """
    assert adapters.lora is not None
    if sees:
        raise ModelError(
            "adapters of models with images are merged into published weights: set rollout.adapters=merged"
        )
    rank = next((rank for rank in RANKS if rank >= adapters.lora.rank), None)
    if rank is None or adapters.transposed:
        what = f"rank {adapters.lora.rank} > {RANKS[-1]}" if rank is None else "weights are stored as [in, out]"
        raise ModelError(f"vLLM has no such adapters ({what}): set rollout.adapters=merged")
    modules = list(dict.fromkeys(layer.rpartition(".")[2] for layer in adapters.layers))
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": modules}


def adapter_request() -> Any:
    """Returns what a request names the published adapters by."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, "published from memory")


def renaming(model: torch.nn.Module) -> Callable[[str], str]:
    """Returns a function that gives a Hugging Face name the name that vLLM's loaders want in a wrapped model."""
    wrapped = {name.removesuffix(".base_layer") for name, _ in model.named_modules() if name.endswith(".base_layer")}
    packing: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    packed = {part: name for name, parts in packing.items() for part in parts}

    def renamed(name: str) -> str:
        layer, _, last = name.rpartition(".")
        parent, _, module = layer.rpartition(".")
        there = f"{parent}.{packed.get(module, module)}"
        return f"{layer}.base_layer.{last}" if there in wrapped else name

    return renamed


def install(runner: Any, lora: Lora, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the adapters that vLLM computes with.

    Args:
        lora: rank and scale of the adapters.
        tensors: the halves of all adapters, under canonical names.

    Raises:
        ModelError: vLLM cannot adapt one of the layers.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = runner.lora_manager._adapter_manager
    model = LoRAModel.from_lora_tensors(
        NUMBER,
        {in_peft(name): t for name, t in tensors.items()},
        PEFTHelper(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)),
        device=str(runner.device),
        dtype=runner.lora_manager.lora_config.lora_dtype,
        weights_mapper=getattr(runner.get_model(), "hf_to_vllm_mapper", None),
    )
    # vLLM has wrapped a layer by itself, or together with others.
    wrapped = set(manager.modules)
    wrapped |= {part for name, parts in manager.packed_modules.items() if name in wrapped for part in parts}
    if left := [name for name in model.loras if name not in wrapped]:
        raise ModelError(
            f"vLLM cannot adapt {len(left)} of the layers, such as {left[0]}: set rollout.adapters=merged, or other "
            "layers (actor.target_modules)"
        )
    manager.remove_adapter(NUMBER)
    manager.add_adapter(model)
    manager.activate_adapter(NUMBER)
