"""The experts of each token, as vLLM records them."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.backends.hf.config import ModelError, read_config
from verl_fn.backends.hf.experts import experts_of, recorded_dtype
from verl_fn.backends.vllm.arguments import EngineArgumentError


class RoutesMissing(RuntimeError):
    """vLLM returned the experts of other tokens than it computed."""


def layers_with_experts(runner: Any) -> list[int]:
    """Returns the numbers of the layers with experts of a worker's model, all of which report what they pick.

    vLLM itself gives zeros for a layer whose kernel picks the experts, as all do on CPUs.

    Args:
        runner: vLLM's model runner.

    Raises:
        EngineArgumentError: a layer does not report its experts.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    layers = [m for m in runner.compilation_config.static_forward_context.values() if isinstance(m, MoERunner)]
    for layer in layers:
        if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
            raise EngineArgumentError(
                f"actor.router_replay.mode=R3 needs the experts that vLLM picked, and {layer.layer_name} does not "
                "report them: its kernel picks them itself, as on CPUs; choose another kernel with "
                "rollout.engine_kwargs.moe_backend, or set rollout.name=sampler or actor.router_replay.mode=R2"
            )
    return sorted(layer.layer_id for layer in layers)


@attrs.frozen
class Routes:
    """How to read the experts that vLLM returns for all layers of a model.

    Attributes:
        layers: the numbers of the layers with experts.
        dtype: of a recording.
    """

    layers: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, folder: Any, layers: list[int]) -> Routes:
        """Returns how to read the experts of a model folder's layers.

        Raises:
            ModelError: the model has no experts.
        """
        experts = experts_of(read_config(folder).get_text_config())
        if not experts or not layers:
            raise ModelError(f"{folder} has no experts, so there is no routing to record")
        return cls(tuple(layers), recorded_dtype(experts))

    def whole(self, returned: Any, length: int) -> Int[Tensor, "T l k"]:
        """Returns the experts of a row's tokens; the last token repeats the one before, since vLLM never computes it.

        Args:
            returned: vLLM's array of all layers, or None.
            length: the tokens of the row.

        Raises:
            RoutesMissing: there are experts of more or fewer tokens.

        Example:
            >>> import numpy
            >>> array = numpy.arange(8, dtype=numpy.uint8).reshape(2, 2, 2)
            >>> Routes((1,), torch.uint8).whole(array, 3).tolist()
            [[[2, 3]], [[6, 7]], [[6, 7]]]
        """
        computed = 0 if returned is None else len(returned)
        if computed != length - 1:
            raise RoutesMissing(
                f"vLLM returned the experts of {computed} tokens for a row of {length} tokens, of which it computed "
                f"{length - 1}"
            )
        # As signed integers: torch has few operations on uint16.
        routed = torch.from_numpy(returned[:, list(self.layers)].astype("int64")).to(self.dtype)
        return torch.cat([routed, routed[-1:]])
