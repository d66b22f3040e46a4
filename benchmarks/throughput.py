"""Tokens a second of an actor update and of a log-prob pass with entropy, ours and verl's, interleaved on one GPU.

Both train a Qwen2.5 shape with random weights by PPO on the same 64 ragged rows, with bf16 compute, fp32 masters,
AdamW, clipping at 1.0, packed rows, micro-batches of at most 16,384 tokens. Each engine is a process of its own;
while one runs, the other waits with its memory held. The peer runs in its best configuration: FSDP2, Liger, no
reshard after forward. The time is taken of the whole call, from a batch on the CPU to metrics on the CPU.

``--backend megatron`` measures ``Megatron`` beside verl's Megatron engine, whose log-probs come from whole logits
(``verl``) or from its kernel (``verl-fused``); both use transformer-engine with the same kernels. Engines then give
unused memory back after each turn, since the activations of two do not fit, and make a call first that is not timed.

``ours-deterministic`` uses only repeatable kernels, as runs do by default; the other engines do not.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, ppo_clip

from . import measure, megatron_loop, workload
from .together import Group

LR = 1e-6
# Our tokens a second over the peer's.
BARS = {"fsdp": {"update": 1.0, "logprobs": 1.2}, "megatron": {"update": 1.1}}
NORMS = 0.01  # how far gradient norms of the same work may differ, relative to one another
WARM_UPS = 2
OURS = {"ours", "ours-deterministic"}
RELEASE = "release"  # asks a process to give the memory back that it does not use


class Ours:
    """``Fsdp`` on one rank, its layers compiled."""

    def __init__(
        self, folder: str, shape: str, checkpointing: bool, device: str, deterministic: bool = False
    ) -> None:
        import torch.distributed as dist

        if deterministic:
            # cuBLAS reads this variable when it is first used.
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        self.backend, self.state = self.made(folder, checkpointing, device, deterministic)
        self.batch = workload.batch(workload.vocabulary(shape))
        self.logprobs()

    def made(self, folder: str, checkpointing: bool, device: str, deterministic: bool) -> tuple[Any, Any]:
        """The backend, and its state with the folder's weights."""
        from verl_fn.backends.fsdp import Fsdp

        backend = Fsdp(
            folder, chain(clip_by_global_norm(1.0), adamw(constant(LR))), max_tokens=workload.BUDGET, device=device,
            dtype="bfloat16", checkpointing=checkpointing, compile=device == "cuda",
            reshard_after_forward=False, deterministic=deterministic,
        )  # fmt: skip
        return backend, backend.load_pretrained()

    def logprobs(self) -> dict[str, float]:
        outputs = self.backend.forward(self.state.params, self.batch, ("logprobs", "entropy"))
        self.batch = self.batch.with_tokens(old_log_probs=outputs.by_name["logprobs"])
        return {"mean": float(outputs.by_name["logprobs"].sum() / self.batch["response_mask"].sum())}

    def update(self) -> dict[str, float]:
        grads, _ = self.backend.forward_backward(self.state, self.batch, ppo_clip())
        self.state, metrics = self.backend.apply_update(self.state, grads)
        return {"grad_norm": metrics["grad_norm"].value, "copies": metrics["perf/residency_copies"].value}


class OursOnMegatron(Ours):
    """``Megatron`` on one rank."""

    def made(self, folder: str, checkpointing: bool, device: str, deterministic: bool) -> tuple[Any, Any]:
        sizes = {"deterministic": deterministic}
        one = megatron_loop.Ours(folder, device, sizes, checkpointing=checkpointing)
        return one.backend, one.state


def peer(folder: str, shape: str, checkpointing: bool, device: str, name: str = "Verl") -> Any:
    """verl's engine of this name."""
    from . import peer_verl

    _, rows = workload.rows(workload.vocabulary(shape))
    return getattr(peer_verl, name)(folder, rows, workload.PROMPT, checkpointing, device)


ENGINES: dict[str, dict[str, Callable[..., Any]]] = {
    "fsdp": {"ours": Ours, "ours-deterministic": functools.partial(Ours, deterministic=True), "verl": peer},
    "megatron": {
        "ours": OursOnMegatron,
        "ours-deterministic": functools.partial(OursOnMegatron, deterministic=True),
        "verl": functools.partial(peer, name="VerlMegatron"),
        "verl-fused": functools.partial(peer, name="VerlMegatronFused"),
    },
}


def _serve(
    rank: int, calls: Iterator[str], backend: str, name: str, device: str, arguments: tuple[Any, ...]
) -> Iterator[dict[str, float]]:
    engine = ENGINES[backend][name](*arguments, device)
    yield {}
    for call in calls:
        if call == RELEASE:
            torch.cuda.empty_cache()
            yield {}
        else:
            yield _timed(getattr(engine, call), device)


def _timed(call: Callable[[], dict[str, float]], device: str) -> dict[str, float]:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    result["seconds"] = time.perf_counter() - began
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return result


class Process:
    """An engine in a process of its own; it starts while others do, until ``wait``."""

    def __init__(self, backend: str, name: str, device: str, *arguments: Any) -> None:
        self.name, self.release = name, backend != "fsdp"
        self._group = Group(_serve, 1, f"the engine {name}", backend, name, device, arguments)
        self.stop = self._group.stop

    def wait(self) -> Process:
        """Returns it when its engine is made.

        Raises:
            RuntimeError: that failed; its traceback is in the message.
        """
        self._group.reports()
        return self

    def turn(self, what: str) -> tuple[dict[str, float], dict[str, float]]:
        """Returns what the engine reports of the first and of the last ``update`` or ``logprobs`` of its turn.

        Raises:
            RuntimeError: it failed; its traceback is in the message.
        """
        first = last = self._group.ask(what)[0]
        if self.release:
            (last,) = self._group.ask(what)
            self._group.ask(RELEASE)
        return first, last


def measured(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Seconds, memory and check values of every engine, call by call, its turn changing from round to round."""
    calls: dict[str, Any] = {name: {"update": [], "logprobs": []} for name in args.engines}
    with tempfile.TemporaryDirectory() as folder:
        workload.write_model(Path(folder), shape, args.device)
        started = [
            Process(args.backend, name, args.device, folder, shape, args.checkpointing) for name in args.engines
        ]
        engines = {one.name: one.wait() for one in started}
        for what in ("logprobs", "update"):
            for i in range(-WARM_UPS, args.rounds):
                for name in args.engines if i % 2 else args.engines[::-1]:
                    first, last = engines[name].turn(what)
                    if i >= 0:
                        calls[name][what].append(last)
                    elif what == "update" and i == -WARM_UPS:
                        calls[name][what].append(first)
        for engine in engines.values():
            engine.stop()
    return calls


def summary(shape: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second, MFU and memory of each engine, and our ratios to the other."""
    parameters, tokens = _sizes(shape)
    result: dict[str, Any] = {"parameters": parameters, "tokens": tokens}
    for name, by_kind in measured.items():
        # The first update is kept only for its gradient norm.
        first, *updates = by_kind["update"]
        engine: dict[str, Any] = {"first_grad_norm": first["grad_norm"]}
        for what, calls, factor in (("update", updates, 6), ("logprobs", by_kind["logprobs"], 2)):
            seconds = [call["seconds"] for call in calls]
            speed = tokens / statistics.median(seconds)
            engine[what] = {
                "tokens_a_second": round(speed), "mfu": factor * parameters * speed / workload.H200_FLOPS,
                "peak_gib": max(call["peak_gib"] for call in calls), "seconds": seconds,
            }  # fmt: skip
        result[name] = engine
    return result


def _sizes(shape: str) -> tuple[int, int]:
    lengths, _ = workload.rows(4)
    s = workload.SHAPES[shape]
    if "vocab_size" not in s:
        return 0, sum(lengths) + workload.PROMPT * workload.ROWS
    width, inner, kv = s["hidden_size"], s["intermediate_size"], s["num_key_value_heads"]
    side = width // s["num_attention_heads"] * kv
    attention = 2 * width * width + 2 * width * side + width + 2 * side
    layer = attention + 3 * width * inner + 2 * width
    total = s["vocab_size"] * width + s["num_hidden_layers"] * layer + width
    return total, sum(lengths) + workload.PROMPT * workload.ROWS


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench throughput``: a table; exit status 1 where a bar is missed."""
    parser = measure.parser("throughput", __doc__)
    parser.add_argument("--backend", choices=tuple(ENGINES), default="fsdp")
    parser.add_argument("--shapes", nargs="+", choices=tuple(workload.SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--engines", nargs="+", help="one of ours first; by default ours and verl")
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass, in both")
    parser.add_argument("--rounds", type=measure.count, default=5)
    args = parser.parse_args(argv)
    args.engines = args.engines or ["ours", "verl"]
    if unknown := set(args.engines) - ENGINES[args.backend].keys():
        parser.error(f"--backend {args.backend} has the engines {', '.join(ENGINES[args.backend])}, not {unknown}")
    if args.device != "cuda" and args.shapes != ["tiny"]:
        parser.error("there is no CUDA device; on a CPU these shapes would take hours, except --shapes tiny")
    if not OURS.issuperset(args.engines) and importlib.util.find_spec("verl") is None:
        parser.error("verl is not installed: install verl==0.9.1 and what it imports, or give --engines ours")
    results, held = {}, True
    print(
        f"{'shape':<7}{'engine':<11}{'update':>16}{'MFU':>7}{'peak':>11}{'log-probs':>18}{'MFU':>7}{'grad norm':>11}"
    )
    for shape in args.shapes:
        results[shape] = summary(shape, measured(args, shape))
        for name in args.engines:
            result = results[shape][name]
            update, logprobs = result["update"], result["logprobs"]
            print(
                f"{shape:<7}{name:<11}{update['tokens_a_second']:>10,} tok/s{update['mfu']:>7.1%}"
                f"{update['peak_gib']:>7.1f} GiB"
                f"{logprobs['tokens_a_second']:>12,} tok/s{logprobs['mfu']:>7.1%}{result['first_grad_norm']:>11.5f}"
            )
        ours, *peers = args.engines
        results[shape]["ratios"] = {
            peer: beside(results[shape][ours], results[shape][peer], BARS[args.backend]) for peer in peers
        }
        for peer, ratios in results[shape]["ratios"].items():
            # Bars are only for the ratios to another library.
            passed = ratios["held"] or peer in OURS
            held = held and passed
            verdict = "" if peer in OURS else f": {'held' if passed else 'MISSED'}"
            print(
                f"{shape:<7}ratio      {ratios['update']['median']:.3f} of the speed of {peer} in updates, "
                f"{ratios['logprobs']['median']:.3f} in log-probs, {ratios['memory']:.3f} of its memory, gradient "
                f"norms differ by {ratios['grad_norm']:.1e}{verdict}",
                flush=True,
            )
    about = {"bars": BARS[args.backend], "backend": args.backend, "peer": _peer()}
    about |= {"checkpointing": args.checkpointing, "budget": workload.BUDGET}
    measure.write(args.json, "throughput", args.device, {**about, "results": results})
    return 0 if held else 1


def beside(ours: dict[str, Any], theirs: dict[str, Any], bars: dict[str, float]) -> dict[str, Any]:
    """Our speed, memory and gradient norm beside a peer's, and whether the bars hold.

    Example:
        >>> def engine(seconds, norm):
        ...     return {"update": {"seconds": [seconds], "peak_gib": 8.0}, "logprobs": {"seconds": [1.0]},
        ...             "first_grad_norm": norm}
        >>> result = beside(engine(1.0, 0.999), engine(1.2, 1.0), {"update": 1.1})
        >>> result["update"]["median"], result["memory"], result["held"]
        (1.2, 1.0, True)
        >>> beside(engine(1.0, 0.9), engine(1.2, 1.0), {"update": 1.1})["held"]
        False
    """
    result: dict[str, Any] = {
        what: measure.ratio(theirs[what]["seconds"], ours[what]["seconds"]) for what in ("update", "logprobs")
    }
    fast = all(result[what]["median"] >= bar for what, bar in bars.items())
    result["memory"] = ours["update"]["peak_gib"] / max(theirs["update"]["peak_gib"], 1e-9)
    result["grad_norm"] = abs(ours["first_grad_norm"] / theirs["first_grad_norm"] - 1)
    result["held"] = fast and result["memory"] <= 1.0 and result["grad_norm"] <= NORMS
    return result


def _peer() -> dict[str, str]:
    versions = {}
    for package in (
        "verl",
        "liger-kernel",
        "flash-attn",
        "triton",
        "transformer-engine",
        "megatron-core",
        "megatron-bridge",
    ):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
