"""How large a model is, without its weights."""

from __future__ import annotations

from pathlib import Path

from verl_fn.state import Key

from .folder import hollow
from .lora import Lora, target_layers


def parameter_counts(folder: str | Path, head: str, lora: Lora | None = None) -> tuple[int, int]:
    """Counts the elements of a model, adapters included, and those that training changes.

    Args:
        folder: a Hugging Face model folder; its weights are not read.
        head: ``lm``, or ``value`` for a scalar head.
        lora: the adapters that are trained alone.
    """
    skeleton = hollow(folder, head, key=Key.from_seed(0)).skeleton
    model, output = skeleton.model, skeleton.output_layer
    total = sum(p.numel() for p in model.parameters())
    if lora is None:
        return total, total
    trained = sum(p.numel() for p in output.parameters()) if head == "value" else 0
    layers = target_layers(model, lora, output, folder)
    adapters = sum(lora.rank * sum(model.get_submodule(name).weight.shape) for name in layers)
    return total + adapters, adapters + trained
