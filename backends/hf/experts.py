"""The experts of Hugging Face models: how many a layer has, where a token goes, and experts with biases.

transformers gathers a bias for each token, and the backward pass adds the gradients of an expert's tokens one after
another. Experts with biases are computed here instead, registered with transformers as ``verl_fn_grouped``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .config import EXPERTS, ModelError

NAME = "verl_fn_grouped"

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


def use_grouped(model: nn.Module) -> None:
    """Sets ``grouped`` for the experts with biases of a model that transformers would compute by grouped products."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped)
    found: list[Any] = [module for module in model.modules() if hasattr(module, "has_bias")]
    if all(module.has_bias and module.has_gate for module in found):
        for module in found:
            if module.config._experts_implementation == "grouped_mm":
                module.config._experts_implementation = NAME


def grouped(
    module: Any,
    hidden: Float[Tensor, "T H"],
    picked: Int[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
) -> Float[Tensor, "T H"]:
    """Returns the weighted sum of what the picked experts compute for each token.

    Args:
        module: transformers' module of experts.
        picked: the numbers of the experts of each token, all of them of this module.
        weights: of the picked experts.
    """
    from transformers.integrations.moe import _grouped_linear

    experts, order = picked.flatten().sort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    of_expert = experts[:, None] == torch.arange(module.num_experts, device=experts.device)
    # A product with ones and zeros picks biases, so that their gradients are a product, too.
    ones, ends = of_expert.to(module.down_proj.dtype), of_expert.sum(0).cumsum(0, dtype=torch.int32)
    product = functools.partial(_grouped_linear, offs=ends, is_transposed=module.is_transposed)
    x = _Moved.apply(hidden.repeat_interleave(picked.shape[1], 0), order, back)
    x = torch.addmm(product(x, module.gate_up_proj), ones, module.gate_up_proj_bias)
    x = product(module._apply_gate(x), module.down_proj)
    x = torch.addmm(x, ones, module.down_proj_bias) * _Moved.apply(weights.flatten(), order, back)[:, None]
    return _Moved.apply(x, back, order).unflatten(0, picked.shape).sum(1).to(hidden.dtype)


class _Moved(torch.autograd.Function):
    """Rows in another order. Its gradient is read in the inverse order; an index's would be added to zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        return x[order]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grad[back], None, None
