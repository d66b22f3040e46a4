"""What it costs that a sharded step is a function of values: ``Fsdp`` or ``Megatron`` against a loop in place.

The loop is what one writes by hand. For FSDP2: ``fully_shard`` on the layers and the root, a pass and a ``backward``
for each micro-batch, ``clip_grad_norm_``, ``torch.optim.AdamW(fused=True)``. For Megatron: see ``megatron_loop``. It
has the same attention, log-prob kernels, loss, micro-batches and dtypes. Whole updates are timed in interleaved
pairs, with the loop against itself as a control. The gradient norms of the first updates have to agree.

``--sizes`` shares a model of Megatron over several ranks, each with a GPU of its own; torchrun starts them:
``torchrun --no-python --nproc-per-node 2 verl-fn bench residency --backend megatron --sizes tp=2``.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
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
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant, ppo_clip, total_loss

from . import measure, megatron_loop, workload

LR, CLIP = 1e-6, 1.0
BARS = {"time": 1.05, "memory": 1.03, "grad_norm": 5e-3}

Step = Callable[[], float]


def ours(folder: str, batch: Batch, device: str) -> Step:
    """One update of ``Fsdp`` a call; returns the norm of its gradient."""
    backend = Fsdp(
        folder, chain(clip_by_global_norm(CLIP), adamw(constant(LR))), max_tokens=workload.BUDGET, device=device,
        dtype="bfloat16",
    )  # fmt: skip
    held = {"state": backend.load_pretrained()}

    def step() -> float:
        grads, metrics = backend.forward_backward(held["state"], batch, ppo_clip())
        held["state"], updated = backend.apply_update(held["state"], grads)
        assert metrics["loss"].value == metrics["loss"].value and updated["perf/residency_copies"].value == 0
        return updated["grad_norm"].value

    return step


def in_place(folder: str, batch: Batch, device: str) -> Step:
    """One update of the loop by hand a call; returns the norm of its gradient."""
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

    def step() -> float:
        total = 0.0
        for part in split_by_tokens(batch, workload.BUDGET):
            staged = Staged.of(part, torch.device(device))
            loss_of_part = skeleton(lambda model, s=staged: compute(model, s))
            loss_of_part.backward()
            total = total + loss_of_part.detach()
        norm = nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert float(total) == float(total)
        return float(norm.full_tensor())  # type: ignore[attr-defined]

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


def alone(make: Callable[[], Step], device: str) -> tuple[Step, dict[str, float]]:
    """A variant, with the norm of its first gradient and the most bytes that it holds by itself in an update."""
    before = _held(device)
    step = make()
    norm = step()
    most = measure.peak_bytes(step, device)
    return step, {"grad_norm": norm, "peak": most + _held(device) - before}


def _held(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def variants(args: Any, folder: str, batch: Batch) -> dict[str, Callable[[], Step]]:
    """Makes the two variants of a backend."""
    if args.backend == "fsdp":
        return {
            "ours": lambda: ours(folder, batch, args.device),
            "in_place": lambda: in_place(folder, batch, args.device),
        }
    made = {"ours": megatron_loop.Ours, "in_place": megatron_loop.InPlace}

    def maker(cls: Any) -> Callable[[], Step]:
        def make() -> Step:
            one = cls(folder, args.device, dict(args.sizes), dict(args.provider))
            return lambda: one.update(batch)

        return make

    return {name: maker(cls) for name, cls in made.items()}


def compare(args: Any, folder: str) -> dict[str, Any]:
    """Measures the variants in turns; all ranks call it together."""
    vocab = workload.vocabulary(args.shape)
    batch = _with_old_log_probs(workload.batch(vocab), vocab)
    if args.rows:
        batch = aggregate(batch.take(torch.arange(args.rows)), "token-mean")
    made = {name: alone(make, args.device) for name, make in variants(args, folder, batch).items()}
    steps = {name: step for name, (step, _) in made.items()}
    seconds = measure.interleave(steps | {"control": steps["in_place"]}, args.rounds, args.device)
    time, control = (measure.ratio(seconds[name], seconds["in_place"]) for name in ("ours", "control"))
    (_, mine), (_, theirs) = made["ours"], made["in_place"]
    gap = abs(mine["grad_norm"] / theirs["grad_norm"] - 1)
    memory = mine["peak"] / theirs["peak"]
    held = time["median"] <= BARS["time"] and memory <= BARS["memory"] and gap <= BARS["grad_norm"]
    ranks = dist.get_world_size()
    return {
        "shape": args.shape, "backend": args.backend, "ranks": ranks, "sizes": dict(args.sizes), "bars": BARS,
        "time": time, "control": control, "memory": memory, "held": held, "tokens": batch.num_tokens,
        "peak_gib": {name: made["peak"] / 2**30 for name, (_, made) in made.items()},
        "grad_norm": {name: made["grad_norm"] for name, (_, made) in made.items()},
        "tokens_a_second_a_gpu": {
            name: round(batch.num_tokens / statistics.median(seconds[name]) / ranks) for name in steps
        },
        "seconds": seconds,
    }  # fmt: skip


def option(text: str) -> tuple[str, Any]:
    """A name and its value, in JSON.

    Example:
        >>> option("tp=2"), option("sp=true")
        (('tp', 2), ('sp', True))
    """
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench residency``: a line on the screen; exit status 1 where a bar is missed."""
    parser = measure.parser("residency", __doc__)
    parser.add_argument("--backend", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=measure.count, default=20, help="interleaved pairs")
    parser.add_argument("--rows", type=measure.count, help="rows of the batch; by default all of the workload")
    parser.add_argument(
        "--sizes", nargs="+", type=option, default=[], help="megatron: tp=2 pp=2 sp=true and the like"
    )
    parser.add_argument(
        "--provider", nargs="+", type=option, default=[], help="megatron: fields of Bridge's provider, as NAME=JSON"
    )
    args = parser.parse_args(argv)
    one_rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in one_rank.items():
        os.environ.setdefault(name, value)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    first = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        folder = Path(names[0]) / "model"
        if first:
            workload.write_model(folder, args.shape, args.device)
        dist.barrier()
        result = compare(args, str(folder))
        dist.barrier()
    dist.destroy_process_group()
    if first:
        measure.write(args.json, "residency", args.device, result)
        _print(result)
    return 0 if result["held"] else 1


def _print(result: dict[str, Any]) -> None:
    time, control = result["time"], result["control"]
    speeds, norms = result["tokens_a_second_a_gpu"], result["grad_norm"]
    print(
        f"{result['backend']} {result['shape']}: time {time['median']:.3f} [{time['low']:.3f}, {time['high']:.3f}] "
        f"of the loop in place, the loop against itself {control['median']:.3f}, memory {result['memory']:.3f}, "
        f"{speeds['ours']:,} and {speeds['in_place']:,} tok/s a GPU, gradient norms {norms['ours']:.5f} and "
        f"{norms['in_place']:.5f}: {'held' if result['held'] else 'MISSED'}"
    )


def _with_old_log_probs(batch: Batch, vocab: int) -> Batch:
    """Near a random model's log-probs, so that some tokens clip."""
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    return batch.with_tokens(old_log_probs=0.2 * noise - math.log(vocab))
