"""The experts of Hugging Face models: how many a layer has, and which of them each token goes to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .config import EXPERTS, ModelError

# The argument with which transformers gives a layer's experts the numbers that the router picked.
PICKED = "top_k_index"


def experts_of(config: Any) -> int | None:
    """Returns how many experts a layer of a Hugging Face model has, or None without experts."""
    return next((n for name in EXPERTS if (n := getattr(config, name, None))), None)


def recorded_dtype(experts: int) -> torch.dtype:
    """Returns the dtype of recorded experts, the smallest that can count them.

    Example:
        >>> recorded_dtype(256), recorded_dtype(512)
        (torch.uint8, torch.int16)
    """
    return torch.uint8 if experts <= 256 else torch.int16


class Recorder:
    """Records the experts of each token while a model of transformers computes.

    Args:
        model: whose layers call a module with the picked experts.

    Raises:
        ModelError: the model has no experts, or does not say which ones it picks.
    """

    def __init__(self, model: nn.Module, folder: str | Path) -> None:
        config: Any = model.config
        experts = experts_of(config.get_text_config())
        places = {m: parameters.index(PICKED) for m in model.modules() if PICKED in (parameters := _parameters(m))}
        if not experts:
            raise ModelError(f"{folder} has no experts, so there is no routing to record")
        if not places:
            raise ModelError(
                f"{folder}: routing cannot be recorded, since the layers of {config.model_type} have no module that "
                f"is called with {PICKED}; set actor.router_replay.mode=R2"
            )
        self._dtype, self._layers = recorded_dtype(experts), len(places)
        self._picked: dict[int, Tensor] = {}
        for layer, (module, place) in enumerate(places.items()):
            module.register_forward_pre_hook(functools.partial(self._keep, layer, place), with_kwargs=True)

    def take(self) -> Int[Tensor, "t l k"]:
        """Returns the experts of the tokens of the last pass, and forgets them."""
        picked = [self._picked[layer] for layer in range(self._layers)]
        self._picked = {}
        return torch.stack(picked, 1)

    def _keep(
        self, layer: int, place: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        picked: Tensor = kwargs[PICKED] if PICKED in kwargs else args[place]
        self._picked[layer] = picked.reshape(-1, picked.shape[-1]).to(self._dtype)


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)
