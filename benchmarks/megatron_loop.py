"""The ``Megatron`` backend, and a loop that works in place on the same model.

The loop is what one writes by hand with megatron-core: Megatron-Bridge's model in Megatron's DDP, its schedule, its
distributed optimizer. It has the backend's kernels, log-probs, loss, micro-batches and dtypes. As Megatron does by
default, it decays only matrices.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl_fn.state import Batch, Key
from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, ppo_clip, total_loss

from . import workload

LR, CLIP = 1e-6, 1.0


@functools.cache
def prepare(device: str) -> None:
    """Lets megatron-core compute on a device; on the CPU that works only from a checkout."""
    if device == "cpu":
        helpers = Path(__file__).resolve().parents[1] / "tests/backends/helpers"
        runpy.run_path(str(helpers / "megatron_on_cpu.py"))["install"]()


class Ours:
    """``Megatron`` in bf16.

    Args:
        folder: a model folder.
        device: the device.
        sizes: how ranks share the model, as ``Megatron`` takes them.
        provider: fields of Bridge's provider.
        checkpointing: recompute each layer in the backward pass.
    """

    def __init__(
        self,
        folder: str,
        device: str,
        sizes: Mapping[str, Any] | None = None,
        provider: Mapping[str, Any] | None = None,
        checkpointing: bool = False,
    ) -> None:
        prepare(device)
        from verl_fn.backends.megatron import Megatron

        self.backend = Megatron(
            folder, chain(clip_by_global_norm(CLIP), adamw(constant(LR))), max_tokens=workload.BUDGET,
            dtype="bfloat16", checkpointing=checkpointing, provider=provider, device=device, **(sizes or {}),
        )  # fmt: skip
        self.state = self.backend.load_pretrained()

    def update(self, batch: Batch) -> float:
        """The norm of the gradient of one update."""
        grads, metrics = self.backend.forward_backward(self.state, batch, ppo_clip())
        self.state, updated = self.backend.apply_update(self.state, grads)
        assert metrics["loss"].value == metrics["loss"].value and updated["perf/residency_copies"].value == 0
        return updated["grad_norm"].value


class InPlace:
    """The loop by hand; the arguments are the same as for ``Ours``."""

    def __init__(
        self,
        folder: str,
        device: str,
        sizes: Mapping[str, Any] | None = None,
        provider: Mapping[str, Any] | None = None,
        checkpointing: bool = False,
    ) -> None:
        prepare(device)
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from verl_fn.backends.hf.folder import hollow
        from verl_fn.backends.megatron.layout import Layout, Sizes
        from verl_fn.backends.megatron.model import How, build

        self.layout = Layout.of(Sizes(**(sizes or {})))
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        how = How("lm", torch.bfloat16, self.device, checkpointing, dict(provider or {}))
        self.built = build(folder, self.layout, how, hollow(folder, "lm", key=Key.from_seed(0)).skeleton)
        config = OptimizerConfig(
            lr=LR, weight_decay=0.01, clip_grad=CLIP, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )  # fmt: skip
        with self.layout.active():
            self.built.bridge.load_hf_weights([self.built.ddp], folder)
            self.optimizer = get_megatron_optimizer(config, [self.built.ddp])

    def update(self, batch: Batch) -> float:
        """The norm of the gradient of one update."""
        from megatron.core.distributed import finalize_model_grads

        from verl_fn.backends.megatron.schedule import run

        loss, losses = ppo_clip(), []

        def finish(number: int, micro_batch: Any, outputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            total, _ = total_loss(loss, outputs, micro_batch.batch)
            losses.append(total.detach().clone())
            return total, {}

        ddp = self.built.ddp
        micro_batches = self._micro_batches(batch)
        with self.layout.active():
            ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            run(self.built, self.layout, micro_batches, frozenset(loss.needs), finish, forward_only=False)
            finalize_model_grads([ddp], None, pg_collection=self.layout.groups)
            _, norm, _ = self.optimizer.step()
        # The last stage of a pipeline has the losses.
        total_of_batch = float(torch.stack(losses).sum()) if losses else 0.0
        assert total_of_batch == total_of_batch
        return float(norm)

    def _micro_batches(self, batch: Batch) -> list[Any]:
        from verl_fn.backends.agreement import share_out
        from verl_fn.backends.megatron.rows import MicroBatch, padded_starts
        from verl_fn.state import one_thread

        sizes = self.layout.sizes
        with one_thread():
            parts = share_out(self.layout, batch, workload.BUDGET, lambda part: part).staged
            lengths = [padded_starts(part.lengths, sizes.tp, sizes.cp)[1] for part in parts]
            longest = max(lengths) if sizes.pp > 1 else None
            return [MicroBatch.of(part, self.layout, self.device, longest) for part in parts]
