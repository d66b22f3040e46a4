"""What it costs that a sharded step is a function of values: ``Fsdp`` against an FSDP2 loop that works in place.

The loop is what one writes by hand: ``fully_shard`` on the layers and the root, a pass and a ``backward`` for each
micro-batch, ``clip_grad_norm_``, ``torch.optim.AdamW(fused=True)``. It has the same attention, log-prob kernels,
loss, micro-batches and dtypes. Whole updates are timed in interleaved pairs, with the loop against itself as a
control.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.folder import build
from verl_fn.backends.hf.outputs import Staged, token_outputs
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.state import Batch, Key, split_by_tokens
from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, ppo_clip, total_loss

from . import measure, workload

LR, CLIP = 1e-6, 1.0
BARS = {"time": 1.05, "memory": 1.03}


def ours(folder: str, batch: Batch, device: str) -> Callable[[], None]:
    """One update of ``Fsdp`` a call."""
    backend = Fsdp(
        folder, chain(clip_by_global_norm(CLIP), adamw(constant(LR))), max_tokens=workload.BUDGET, device=device,
        compute_dtype="bfloat16",
    )  # fmt: skip
    held = {"state": backend.load_pretrained()}

    def step() -> None:
        grads, metrics = backend.forward_backward(held["state"], batch, ppo_clip())
        held["state"], updated = backend.apply_update(held["state"], grads)
        assert metrics["loss"].value == metrics["loss"].value and updated["perf/residency_copies"].value == 0

    return step


def in_place(folder: str, batch: Batch, device: str) -> Callable[[], None]:
    """One update of the loop by hand a call."""
    skeleton, params = build(folder, "lm", pretrained=True, key=Key.from_seed(0))
    for module, name, parameter in _parameters(skeleton, params):
        setattr(module, name, parameter)
    skeleton.move_buffers(torch.device(device))
    skeleton.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in skeleton.model.base_model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(skeleton, mp_policy=policy, reshard_after_forward=False)
    parameters = list(skeleton.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    loss = ppo_clip()

    def compute(model: Skeleton, staged: Staged) -> torch.Tensor:
        return total_loss(loss, token_outputs(model, staged, loss.needs), staged.batch)[0]

    def step() -> None:
        total = 0.0
        for part in split_by_tokens(batch, workload.BUDGET):
            staged = Staged.of(part, torch.device(device))
            loss_of_part = skeleton(lambda model, s=staged: compute(model, s))
            loss_of_part.backward()
            total = total + loss_of_part.detach()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert float(total) == float(total)

    return step


def _parameters(skeleton: Skeleton, params: dict[str, torch.Tensor]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where each parameter goes, a tied one to every place that it has."""
    made = {id(p): nn.Parameter(params[name]) for name, p in skeleton.model.named_parameters()}
    return [
        (module, name, made[id(p)])
        for module in skeleton.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]


def peak(make: Callable[[], Callable[[], None]], device: str) -> float:
    """The most memory, in bytes, that a variant holds by itself during an update."""
    step = make()
    step()
    peak_bytes = measure.peak_bytes(step, device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    del step
    gc.collect()
    return peak_bytes + held


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench residency``: a line on the screen; exit status 1 where a bar is missed."""
    parser = measure.parser("residency", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved pairs")
    args = parser.parse_args(argv)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as name:
        folder = str(workload.write_model(Path(name) / "model", args.shape, args.device))
        batch = _with_old_log_probs(workload.batch(workload.vocabulary(args.shape)))
        made: dict[str, Any] = {
            "ours": lambda: ours(folder, batch, args.device),
            "in_place": lambda: in_place(folder, batch, args.device),
        }
        memory = {name: peak(make, args.device) for name, make in made.items()}
        mine, theirs = made["ours"](), made["in_place"]()
        variants = {"ours": mine, "in_place": theirs, "control": theirs}
        seconds = measure.interleave(variants, args.rounds, args.device)
    dist.destroy_process_group()
    time, control = (measure.ratio(seconds[name], seconds["in_place"]) for name in ("ours", "control"))
    result = {
        "shape": args.shape, "bars": BARS, "time": time, "control": control,
        "memory": memory["ours"] / memory["in_place"],
        "peak_gib": {name: value / 2**30 for name, value in memory.items()}, "seconds": seconds,
    }  # fmt: skip
    measure.write(args.json, "residency", args.device, result)
    held = time["median"] <= BARS["time"] and result["memory"] <= BARS["memory"]
    print(
        f"{args.shape}: time {time['median']:.3f} [{time['low']:.3f}, {time['high']:.3f}] of the loop in place, "
        f"the loop against itself {control['median']:.3f}, memory {result['memory']:.3f}: "
        f"{'held' if held else 'MISSED'}"
    )
    return 0 if held else 1


def _with_old_log_probs(batch: Batch) -> Batch:
    """Near those of a random model, so that some tokens clip."""
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    return batch.with_tokens(old_log_probs=-12.0 + 0.2 * noise)
