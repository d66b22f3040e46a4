"""What vLLM's workers do for the engine: they load weights, and draw and collect tokens.

vLLM makes ``Extension`` a base of its worker class, so its methods run where the model is: in the process of vLLM's
core, or in one process for each GPU of a tensor-parallel engine.

vLLM's sampler is replaced by the draws of the embedded engine. A draw depends on the sample's seed and on the place
of the token, never on the rows beside it or on what was drawn before: a request that is asked again, of a restarted
engine too, gives the same tokens. Log-probs, near ties and the tokens themselves stay on the device until they are
collected, so vLLM handles no log-probs at all.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.sampler import Sampler

from verl_fn.backends.draws import NOISE, Drawn, Draws
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.lora import Lora, is_adapter
from verl_fn.backends.protocol import Sampling, WeightSource
from verl_fn.backends.vllm.adapters import install
from verl_fn.backends.vllm.arguments import EngineArgumentError, row_of
from verl_fn.backends.vllm.loading import load, whole
from verl_fn.backends.vllm.process import portable
from verl_fn.backends.weight_sync.inlet import Inlet, give_up
from verl_fn.state import uniform_at

# vLLM compiles this kernel for many seconds when it tries its own sampler at the start. ``DrawingSampler`` takes the
# place of that sampler afterwards, so until then, from the import of this module on, the kernel does nothing.
KERNEL = "apply_top_k_top_p_triton"
_kernel: Any = getattr(topk_topp_sampler, KERNEL, None)  # None without Triton


def use_kernel(kernel: Any) -> None:
    """Makes vLLM's own sampler use a kernel for top-k and top-p."""
    setattr(topk_topp_sampler, KERNEL, kernel)


def nothing(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Stands for the kernel: the logits as they are."""
    return logits


use_kernel(nothing)


# Where vLLM has the classes of models that it takes from transformers.
FROM_TRANSFORMERS = "vllm.model_executor.models.transformers"
# Methods of ``DrawingSampler`` that the engine calls on all workers, too.
OF_SAMPLER = ("begin", "extend", "collected")


class Extension:
    """Methods of a worker; the engine calls them by name on all workers."""

    model_runner: Any
    device: torch.device
    sleep: Callable[..., None]

    def verl_fn_call(self, request: bytes) -> bytes:
        """Returns the result of a method, or its error; see ``core.Engine.call``."""
        try:
            method, args = pickle.loads(request)
            if not isinstance(method, str):
                run = functools.partial(method, self)
            elif method in OF_SAMPLER:
                run = getattr(self.model_runner.sampler, method)
            else:
                run = getattr(self, f"verl_fn_{method}")
            return pickle.dumps((True, run(*args)))
        except Exception as error:
            return pickle.dumps((False, portable(error)))

    def verl_fn_set_up(
        self, vocab: int, lora: Lora | None, buffers: Sequence[str], conversions: Sequence[Any]
    ) -> None:
        """Replaces vLLM's sampler, and lets the worker sleep on a GPU that it shares.

        Args:
            lora: the adapters that are published apart from the model; None for a model without them.
            buffers: the names of the tensors that are published in parts.
            conversions: transformers' conversions of names in files, by which vLLM knows tensors.
        """
        self._verl_fn_lora = lora
        self._verl_fn_names: dict[str, Any] = {"buffers": frozenset(buffers), "conversions": conversions}
        use_kernel(_kernel)
        runner = self.model_runner
        model, text = runner.get_model(), runner.model_config.hf_text_config
        if any(FROM_TRANSFORMERS in kind.__module__ for kind in type(model).__mro__):
            # vLLM's own models have a soft cap if transformers' have one; these never get one.
            model.logits_processor.soft_cap = getattr(text, "final_logit_softcapping", None)
        runner.sampler = DrawingSampler(runner, vocab, NOISE.get(runner.model_config.dtype, NOISE[torch.bfloat16]))
        if self.device.type == "cuda":
            self.sleep = beside_others(self.sleep)

    def verl_fn_layers_with_experts(self) -> list[int]:
        """Returns the numbers of the layers with experts of the worker's model, all of which report what they pick.

        vLLM itself gives zeros for a layer whose kernel picks the experts, as all do on CPUs.

        Raises:
            EngineArgumentError: a layer does not report its experts.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        context = self.model_runner.compilation_config.static_forward_context
        layers = [m for m in context.values() if isinstance(m, MoERunner)]
        for layer in layers:
            if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise EngineArgumentError(
                    f"actor.router_replay.mode=R3 needs the experts that vLLM picked, and {layer.layer_name} does "
                    "not report them: its kernel picks them itself, as on CPUs; choose another kernel with "
                    "rollout.engine_kwargs.moe_backend, or set rollout.name=sampler or actor.router_replay.mode=R2"
                )
        return sorted(layer.layer_id for layer in layers)

    def verl_fn_load(self, source: WeightSource, checked: bool) -> None:
        """Loads weights that their senders send to this process."""
        try:
            self._verl_fn_load(source, checked)
        except BaseException:
            give_up()
            raise
        if self.device.type == "cuda":
            # Errors of kernels belong to this call.
            torch.cuda.synchronize(self.device)

    def _verl_fn_load(self, source: WeightSource, checked: bool) -> None:
        runner, lora, names = self.model_runner, self._verl_fn_lora, self._verl_fn_names
        if lora is None:
            load(runner.get_model(), runner.model_config, source, checked=checked, **names)
            return
        adapters: dict[str, Tensor] = {}
        if all(is_adapter(spec.name) for spec in source.specs):
            adapters.update((name, t.clone()) for name, t in whole(source, checked=checked))
        else:
            load(runner.get_model(), runner.model_config, source, checked=checked, adapters=adapters, **names)
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


class DrawingSampler(Sampler):
    """vLLM's sampler; from the first ``begin`` on it draws as ``Draws`` does.

    Args:
        noise: how much two computations of a logit may differ.
    """

    def __init__(self, runner: Any, vocab: int, noise: float) -> None:
        super().__init__(logprobs_mode=runner.model_config.logprobs_mode)
        self.runner, self.vocab, self.noise = runner, vocab, noise
        self._draws: Draws | None = None

    def begin(self, sampling: Sampling) -> None:
        """Starts a run without rows.

        Args:
            sampling: how all of its rows are drawn.
        """
        kernel = on_cuda().draw if self.runner.device.type == "cuda" else None
        self._draws = Draws(sampling, self.vocab, self.noise, kernel=kernel)
        self._seeds = torch.zeros(0, dtype=torch.int64, device=self.runner.device)
        # Of each step: rows, places and columns.
        self._drawn: list[tuple[Any, Tensor, tuple[Tensor, ...]]] = []
        # Of the requests in vLLM's batch; it seldom changes between two steps.
        self._present: list[str] = []
        self._present_rows: Any = np.zeros(0, int)
        self._present_seeds = self._seeds[:0]

    def extend(self, seeds: list[int]) -> None:
        """Adds rows to the run, before their requests are added to vLLM.

        Args:
            seeds: the seed of each row.
        """
        self._seeds = torch.cat([self._seeds, torch.tensor(seeds, device=self.runner.device)])

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Draws a token for each row of logits."""
        if self._draws is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        batch, count = self.runner.input_batch, len(logits)
        if self._present != batch.req_ids:
            self._present = list(batch.req_ids)
            self._present_rows = np.array([row_of(name) for name in self._present])
            self._present_seeds = self._seeds[torch.tensor(self._present_rows, device=self._seeds.device)]
        places = self.runner.seq_lens[:count].long()
        uniforms = uniform_at(self._present_seeds[:count], places)
        columns = self._draws.columns(logits[:, : self.vocab], uniforms)
        # A row of which only a part of the prompt was computed has no token yet.
        partial = self.runner.discard_request_mask.np[:count]
        self._drawn.append((np.where(partial, -1, self._present_rows), places, columns))
        # Without a finite logit the draw is beyond the vocabulary: an error once collected.
        drawn = columns[0].clamp(max=self.vocab - 1).to(torch.int32)
        return SamplerOutput(sampled_token_ids=drawn[:, None], logprobs_tensors=None)

    def collected(self) -> Drawn | None:
        """Returns the draws since the last call, on the CPU; None if there are none."""
        assert self._draws is not None
        if not self._drawn:
            return None
        of_rows, of_places, of_columns = zip(*self._drawn, strict=True)
        self._drawn.clear()
        rows, places = torch.from_numpy(np.concatenate(of_rows)), torch.cat(of_places).cpu()
        columns = [torch.cat(column).cpu() for column in zip(*of_columns, strict=True)]
        whole = rows >= 0
        return Drawn(rows[whole], places[whole], tuple(column[whole] for column in columns))
