"""How large a model is, without its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from .folder import read_config
from .lora import Lora, target_layers


def parameter_counts(folder: str | Path, head: str, lora: Lora | None = None) -> tuple[int, int]:
    """Counts the elements of a model, adapters included, and those that training changes.

    Args:
        folder: a Hugging Face model folder; only its config is read.
        head: ``lm``, or ``value`` for a scalar head.
        lora: the adapters that are trained alone.
    """
    import transformers

    config = read_config(folder)
    auto = transformers.AutoModelForCausalLM
    if head == "value":
        auto, config.num_labels = transformers.AutoModelForTokenClassification, 1
    with torch.device("meta"):
        model = auto.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    if lora is None:
        return total, total
    if head == "lm":
        output, trained = model.get_output_embeddings(), 0
    else:
        output = next(getattr(model, name) for name in ("score", "classifier") if hasattr(model, name))
        trained = sum(p.numel() for p in output.parameters())
    layers = target_layers(model, lora, output, folder)
    adapters = sum(lora.rank * sum(model.get_submodule(name).weight.shape) for name in layers)
    return total + adapters, adapters + trained
