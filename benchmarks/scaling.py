"""Weak scaling of sharded training on the GPUs of one host: every rank has as many rows, so it should be as fast.

On each number of ranks the rows of the throughput workload are repeated once a rank, with parameters sharded over all
of them; layers are compiled and stay gathered for the call. Tokens a second a GPU are compared with one GPU's,
which runs the same code. The groups of ranks stay in memory and take turns, round by round; the smaller groups share
as few GPUs as possible, so that each keeps the memory that it has allocated, as training does.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.state import Batch, concatenate
from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, ppo_clip

from . import measure, workload
from .together import Group

BAR = 0.92
CALLS = ("logprobs", "update")
WARM_UPS = 1


class Engine:
    """One rank of a group: ``Fsdp`` over all of its ranks, its layers compiled and not resharded."""

    def __init__(self, folder: str, shape: str, ranks: int, device: str, rows: int) -> None:
        from verl_fn.backends.fsdp import Fsdp

        # A tiny model on the CPU would only wait for its compiler.
        self.backend = Fsdp(
            folder,
            chain(clip_by_global_norm(1.0), adamw(constant(1e-6))),
            max_tokens=workload.BUDGET,
            device=device,
            dtype="bfloat16",
            compile=device == "cuda",
            reshard_after_forward=False,
        )
        self.state = self.backend.load_pretrained()
        self.batch = repeated(workload.vocabulary(shape), ranks, rows)
        self.logprobs()

    def logprobs(self) -> None:
        outputs = self.backend.forward(self.state.params, self.batch, ("logprobs", "entropy"))
        self.batch = self.batch.with_tokens(old_log_probs=outputs.by_name["logprobs"])

    def update(self) -> None:
        grads, _ = self.backend.forward_backward(self.state, self.batch, ppo_clip())
        self.state, updated = self.backend.apply_update(self.state, grads)
        assert updated["perf/residency_copies"].value == 0


def repeated(vocab: int, ranks: int, rows: int) -> Batch:
    """Returns the first ``rows`` of the workload, once a rank.

    Example:
        >>> one, two = (repeated(64, ranks, 3) for ranks in (1, 2))
        >>> len(one), len(two), two.num_tokens == 2 * one.num_tokens
        (3, 6, True)
    """
    return concatenate([workload.batch(vocab).take(list(range(rows)))] * ranks)


def _serve(
    rank: int, calls: Iterator[str], device: str, first: int, arguments: tuple[Any, ...]
) -> Iterator[dict[str, float]]:
    """Answers calls of a rank, on the GPU ``first + rank``."""
    import torch.distributed as dist

    # The GPUs compute. More threads of one process only take the cores from the others, at a time that varies.
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(first + rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    engine = Engine(*arguments)
    yield {}
    for call in calls:
        yield _timed(getattr(engine, call), device)
    dist.destroy_process_group()


def _timed(call: Callable[[], None], device: str) -> dict[str, float]:
    import torch.distributed as dist

    gc.collect()
    # A GPU that waited for its turn computes more slowly at first; in training calls follow one another.
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - began}


def measured(
    shape: str, sizes: Sequence[int], device: str, rounds: int, rows: int
) -> dict[str, dict[int, list[float]]]:
    """Returns the seconds of every call, by what was called and the number of ranks; the sizes take turns."""
    seconds: dict[str, dict[int, list[float]]] = {call: {size: [] for size in sizes} for call in CALLS}
    with tempfile.TemporaryDirectory() as folder:
        workload.write_model(Path(folder), shape, device)
        firsts = first_gpus(sizes)
        groups: dict[int, Group] = {}
        for size in sizes:
            arguments = (folder, shape, size, device, rows)
            groups[size] = Group(_serve, size, "a rank", device, firsts[size], arguments)
            groups[size].reports()
        try:
            for call in CALLS:
                for i in range(-WARM_UPS, rounds):
                    for size in list(sizes) if i % 2 else list(reversed(sizes)):
                        took = max(report["seconds"] for report in groups[size].ask(call))
                        if i >= 0:
                            seconds[call][size].append(took)
        finally:
            for group in groups.values():
                group.stop()
    return seconds


def first_gpus(sizes: Sequence[int]) -> dict[int, int]:
    """Returns the first GPU of each group: the one after the last GPU of the group before it, if there are enough.

    Example:
        >>> first_gpus([1, 2, 4]), first_gpus([1, 2]), first_gpus([1, 2, 3])
        ({1: 0, 2: 1, 4: 0}, {1: 0, 2: 0}, {1: 0, 2: 1, 3: 0})
    """
    firsts, following = {}, 0
    for size in sorted(sizes):
        firsts[size] = following if following + size <= max(sizes) else 0
        following = firsts[size] + size
    return firsts


def summary(seconds: dict[str, dict[int, list[float]]], tokens: int) -> dict[str, Any]:
    """Returns tokens a second a rank, and the efficiency of each size against one rank, round by round.

    Example:
        >>> result = summary({"update": {1: [1.0, 1.0], 2: [1.25, 1.25]}}, tokens=100)
        >>> result["update"]["2"]["tokens_a_second_a_rank"], result["update"]["2"]["efficiency"]["median"]
        (80, 0.8)
    """
    result: dict[str, Any] = {}
    for call, by_size in seconds.items():
        result[call] = {
            str(size): {
                "tokens_a_second_a_rank": round(tokens / statistics.median(took)),
                "efficiency": measure.ratio(by_size[min(by_size)], took),
                "seconds": took,
            }
            for size, took in by_size.items()
        }
    return result


def main(argv: Sequence[str]) -> int:
    """Runs ``verl-fn bench scaling``: a table; exit status 1 where the bar is missed."""
    parser = measure.parser("scaling", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(workload.SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument(
        "--ranks", nargs="+", type=measure.count, default=[1, 2, 4], help="group sizes; the first is one rank"
    )
    parser.add_argument("--rounds", type=measure.count, default=7)
    parser.add_argument(
        "--rows", type=measure.count, default=workload.ROWS, help="rows a rank; by default %(default)s"
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and max(args.ranks) > torch.cuda.device_count():
        parser.error(f"--ranks {max(args.ranks)} needs as many GPUs; there are {torch.cuda.device_count()}")
    results, held = {}, True
    print(f"{'shape':<7}{'ranks':>6}{'call':>10}{'tok/s a rank':>15}{'of one rank':>13}")
    for shape in args.shapes:
        tokens = repeated(workload.vocabulary(shape), 1, args.rows).num_tokens
        results[shape] = summary(measured(shape, sorted(args.ranks), args.device, args.rounds, args.rows), tokens)
        for call, by_size in results[shape].items():
            for size, row in by_size.items():
                efficiency = row["efficiency"]["median"]
                held = held and efficiency >= BAR
                speed = row["tokens_a_second_a_rank"]
                print(f"{shape:<7}{size:>6}{call:>10}{speed:>15,}{efficiency:>13.3f}", flush=True)
    measure.write(args.json, "scaling", args.device, {"bar": BAR, "rows": args.rows, "results": results})
    print("held" if held else f"MISSED: below {BAR} of one rank's speed")
    return 0 if held else 1
