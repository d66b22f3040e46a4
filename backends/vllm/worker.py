"""What vLLM's workers do for the engine: they load weights, and draw and collect tokens.

vLLM makes ``Extension`` a base of its worker class, so its methods run where the model is: in the engine's process,
or in one process for each GPU of a tensor-parallel engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from vllm import ModelRegistry

from verl_fn.backends.draws import NOISE, Drawn
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.protocol import Sampling, WeightSource
from verl_fn.backends.vllm.adapters import install, is_adapter
from verl_fn.backends.vllm.arguments import TEXT_MODELS
from verl_fn.backends.vllm.drawing import DrawingSampler
from verl_fn.backends.vllm.loading import load, whole
from verl_fn.backends.vllm.routes import layers_with_experts
from verl_fn.backends.weight_sync.inlet import Inlet

# A worker in a process of its own finds its model by name.
for name in TEXT_MODELS:
    if name not in ModelRegistry.models:
        ModelRegistry.register_model(name, f"verl_fn.backends.vllm.text_models:{name}")


class Extension:
    """Methods of a worker; the engine calls them by name on all workers."""

    model_runner: Any
    device: torch.device
    sleep: Callable[..., None]

    def verl_fn_set_up(self, vocab: int, lora: Lora | None) -> None:
        """Replaces vLLM's sampler, and lets the worker sleep on a GPU that it shares.

        Args:
            vocab: the size of the vocabulary.
            lora: the adapters that are published apart from the model; None for a model without them.
        """
        self._verl_fn_lora = lora
        runner = self.model_runner
        runner.sampler = DrawingSampler(runner, vocab, NOISE.get(runner.model_config.dtype, NOISE[torch.bfloat16]))
        if self.device.type == "cuda":
            self.sleep = beside_others(self.sleep)

    def verl_fn_layers_with_experts(self) -> list[int]:
        """Returns the numbers of the layers with experts; see ``layers_with_experts``."""
        return layers_with_experts(self.model_runner)

    def verl_fn_load(self, source: WeightSource, checked: bool) -> None:
        """Loads weights of this process."""
        self._verl_fn_load(source, checked)
        if self.device.type == "cuda":
            # The thread that draws may compute on another stream.
            torch.cuda.synchronize(self.device)

    def _verl_fn_load(self, source: WeightSource, checked: bool) -> None:
        runner, lora = self.model_runner, self._verl_fn_lora
        if lora is None:
            load(runner.get_model(), runner.model_config, source, checked=checked)
            return
        adapters: dict[str, Tensor] = {}
        if all(is_adapter(spec.name) for spec in source.specs):
            adapters.update((name, t.clone()) for name, t in whole(source, checked=checked))
        else:
            load(runner.get_model(), runner.model_config, source, checked=checked, adapters=adapters)
        install(runner, lora, adapters)

    def verl_fn_listen(self, host: str, secret: bytes) -> tuple[str, int]:
        """Returns the address to which ``verl_fn_receive`` wants weights to be sent."""
        self._verl_fn_inlet = Inlet(host, secret, self.device, self.model_runner.model_config.dtype)
        return self._verl_fn_inlet.address

    def verl_fn_receive(self, version: int, checked: bool) -> None:
        """Loads the weights that the next sender sends."""
        self._verl_fn_inlet.receive(version, lambda source: self.verl_fn_load(source, checked))

    @torch.inference_mode()
    def verl_fn_clear_cache(self) -> None:
        """Fills the cache with zeros, since NaN spreads from it, also from places that no row reads."""
        for cache in pytree.tree_leaves(self.model_runner.kv_caches):
            cache.zero_()

    def verl_fn_begin(self, sampling: Sampling, seeds: list[int], rows: Mapping[str, int]) -> None:
        """Starts a run; see ``DrawingSampler.begin``."""
        self.model_runner.sampler.begin(sampling, seeds, rows)

    def verl_fn_extend(self, seeds: list[int], rows: Mapping[str, int]) -> None:
        """Adds rows to the run; see ``DrawingSampler.extend``."""
        self.model_runner.sampler.extend(seeds, rows)

    def verl_fn_collect(self) -> Drawn | None:
        """Returns the draws since the last call; None if there are none."""
        drawn: Drawn | None = self.model_runner.sampler.collected()
        return drawn

    def verl_fn_end(self) -> None:
        """Ends the run."""
        self.model_runner.sampler.end()


def beside_others(sleep: Callable[..., None]) -> Callable[..., None]:
    """Returns a worker's ``sleep`` that succeeds where other processes take memory of the GPU meanwhile.

    vLLM compares the free memory of the GPU before and after, and fails if there is less, though its own is freed.
    """

    @functools.wraps(sleep)
    def slept(*args: Any, **kwargs: Any) -> None:
        try:
            sleep(*args, **kwargs)
        except AssertionError as error:
            if "increased after sleeping" not in str(error):
                raise

    return slept
