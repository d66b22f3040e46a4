"""LoRA's adapters in Megatron's model, through Megatron-Bridge's canonical LoRA.

Which layers have adapters, and what they start with, is decided by transformers' model (``hf/lora.py``), so that they
are the same as in other backends. Megatron holds the projections of queries, keys and values as one layer, and of
the gate and up as one; canonical LoRA gives each projection an adapter of its own, as PEFT does.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from verl_fn.backends.agreement import gathered
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Adapters
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.importing import quiet

# The names that canonical LoRA has for the parts of Megatron's layers, in the order of Bridge's mappings.
PARTS = {
    "linear_qkv": {"q": "linear_q", "k": "linear_k", "v": "linear_v"},
    "linear_fc1": {"gate": "linear_fc1_gate", "up": "linear_fc1_up"},
}


def add(model: Any, tasks: list[Any], adapters: Adapters, tp: int) -> None:
    """Adds adapters to the layers of this stage, and freezes everything else.

    Args:
        model: Megatron's model, before it is in DDP.
        tasks: Bridge's conversion tasks of the model.
        tp: the ranks of tensor parallelism.

    Raises:
        ModelError: Bridge cannot give a layer these adapters.
        LayoutError: the ranks cannot share their matrices.
    """
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.recompute import PEFT_RECOMPUTE_PATCHED

    lora = adapters.lora
    assert lora is not None
    if lora.rank % tp:
        raise LayoutError(f"tp = {tp} does not divide the rank of LoRA, {lora.rank}")
    adapted = _adapted(tasks, adapters)
    targets = [f"{layer.rpartition('.')[0]}.{part}" for layer in adapted for part in _names_of_parts(layer).values()]
    # Bridge lists models that it has changed by their ids, and later models get these ids again.
    PEFT_RECOMPUTE_PATCHED.discard(id(model))
    with quiet():
        peft = CanonicalLoRA(target_modules=targets, dim=lora.rank, alpha=lora.alpha)
        # Without targets it would adapt every linear layer.
        (peft if targets else peft.freeze_model)([model])
    for layer, parts in adapted.items():
        model.get_submodule(layer).verl_fn_names = parts


def _names_of_parts(layer: str) -> dict[str, str]:
    """Returns the names that canonical LoRA has for the parts of a layer; a layer of one part is ``""``."""
    name = layer.rpartition(".")[2]
    return PARTS.get(name, {"": name})


def _adapted(tasks: list[Any], adapters: Adapters) -> dict[str, dict[str, str]]:
    """Returns the layers of this stage that get adapters, and the layers of transformers that each stands for."""
    wanted, adapted = set(adapters.layers), {}
    for task in tasks:
        if task is None or task.megatron_module is None or not task.param_name.endswith(".weight"):
            continue
        hub = task.mapping.hf_param
        parts = {
            key: name.removesuffix(".weight") for key, name in ({"": hub} if isinstance(hub, str) else hub).items()
        }
        if wanted.isdisjoint(parts.values()):
            continue
        layer = task.param_name.removesuffix(".weight")
        if lacking := [name for name in parts.values() if name not in wanted]:
            raise ModelError(
                f"LoRA's target_modules name only some of {', '.join(parts.values())}, which Megatron holds as one "
                f"layer, and Megatron-Bridge adapts all or none of them: add {', '.join(lacking)}"
            )
        if _names_of_parts(layer).keys() != parts.keys():
            raise ModelError(f"Megatron-Bridge has no adapters for {', '.join(parts.values())}")
        adapted[layer] = parts
    return adapted


def halves(model: Any, adapters: Adapters) -> list[tuple[Any, nn.Module | None, nn.Parameter | None]]:
    """Returns the two matrices of each adapter, in the same order on all ranks; all ranks call it together.

    Returns:
        Of each, Bridge's mapping between the whole matrix and the parts of the ranks, Megatron's module that has it,
        and its parameter; the last two are None where they are on another pipeline stage.
    """
    from megatron.bridge.models.conversion.param_mapping import ColumnParallelMapping, RowParallelMapping

    here: dict[str, Any] = {}
    for module in model.modules():
        for key, name in getattr(module, "verl_fn_names", {}).items():
            here[name] = module.adapter[f"adapter_{key}"] if key else module.adapter
    by_columns: dict[str, bool] = {}
    for of_rank in gathered({name: adapter.input_is_parallel for name, adapter in here.items()}):
        by_columns |= of_rank
    if lacking := [name for name in adapters.layers if name not in by_columns]:
        raise ModelError(f"Megatron's model has no layers for the adapters of {', '.join(lacking[:3])}")
    in_order: list[tuple[Any, nn.Module | None, nn.Parameter | None]] = []
    for name in adapters.layers:
        # Bridge names these mappings after the layer, of which the second one splits columns.
        first = RowParallelMapping if by_columns[name] else ColumnParallelMapping
        for half, inside, kind in (("lora_A", "linear_in", first), ("lora_B", "linear_out", ColumnParallelMapping)):
            mapping = kind("adapter.weight", f"{name}.{half}.weight")
            mapping.set_process_groups_from_pg_collection(model.pg_collection)
            module = getattr(here[name], inside) if name in here else None
            in_order.append((mapping, module, None if module is None else module.weight))
    return in_order
