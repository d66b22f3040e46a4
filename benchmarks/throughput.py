"""Tokens a second of an actor update and of a log-prob pass with entropy, ours and verl's, interleaved on one GPU.

Both train a Qwen2.5 shape with random weights by PPO on the same 64 ragged rows, with bf16 compute, fp32 masters,
AdamW, clipping at 1.0, packed rows, micro-batches of at most 16,384 tokens. Each engine is a process of its own;
while one runs, the other waits with its memory held. The peer runs in its best configuration: FSDP2, Liger, no
reshard after forward. The time is that of the whole call, from a batch on the CPU to metrics on the CPU.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.steps import adamw, chain, clip_by_global_norm, constant, ppo_clip

from . import measure, workload

LR = 1e-6
BARS = {"update": 1.0, "logprobs": 1.2}  # our tokens a second over the peer's
WARM_UPS = 2


class Ours:
    """``Fsdp`` on one rank, its layers compiled."""

    def __init__(self, folder: str, shape: str, checkpointing: bool, device: str) -> None:
        import torch.distributed as dist

        from verl_fn.backends.fsdp import Fsdp

        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        self.backend = Fsdp(
            folder, chain(clip_by_global_norm(1.0), adamw(constant(LR))), max_tokens=workload.BUDGET, device=device,
            compute_dtype="bfloat16", checkpointing=checkpointing, compile=True, reshard_after_forward=False,
        )  # fmt: skip
        self.state = self.backend.load_pretrained()
        self.batch = workload.batch(workload.vocabulary(shape))
        self.logprobs()

    def logprobs(self) -> dict[str, float]:
        outputs = self.backend.forward(self.state.params, self.batch, ("logprobs", "entropy"))
        self.batch = self.batch.with_tokens(old_log_probs=outputs.by_name["logprobs"])
        return {"mean": float(outputs.by_name["logprobs"].sum() / self.batch["response_mask"].sum())}

    def update(self) -> dict[str, float]:
        grads, _ = self.backend.forward_backward(self.state, self.batch, ppo_clip())
        self.state, metrics = self.backend.apply_update(self.state, grads)
        return {"grad_norm": metrics["grad_norm"].value, "copies": metrics["perf/residency_copies"].value}


def peer(folder: str, shape: str, checkpointing: bool, device: str) -> Any:
    """verl's engine."""
    from .peer_verl import Verl

    _, rows = workload.rows(workload.vocabulary(shape))
    return Verl(folder, rows, workload.PROMPT, checkpointing)


ENGINES: dict[str, Callable[..., Any]] = {"ours": Ours, "verl": peer}


def _serve(pipe: Any, name: str, port: int, device: str, arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    try:
        engine = ENGINES[name](*arguments, device)
        pipe.send({})
        while (asked := pipe.recv()) is not None:
            pipe.send(_timed(getattr(engine, asked), device))
    except Exception:
        pipe.send({"error": traceback.format_exc()})


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
    """An engine in a process of its own."""

    def __init__(self, name: str, device: str, *arguments: Any) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, port, device, arguments), daemon=True)
        self.process.start()
        self._receive()

    def call(self, what: str) -> dict[str, float]:
        """Returns what the engine reports of one ``update`` or ``logprobs``.

        Raises:
            RuntimeError: it failed; its traceback is in the message.
        """
        self.pipe.send(what)
        return self._receive()

    def stop(self) -> None:
        """End the process."""
        self.pipe.send(None)
        self.process.join(20)
        self.process.kill()

    def _receive(self) -> dict[str, float]:
        reply = self.pipe.recv()
        if "error" in reply:
            raise RuntimeError(f"the engine {self.name} failed\n{reply['error']}")
        return reply


def measured(shape: str, names: Sequence[str], checkpointing: bool, device: str, rounds: int) -> dict[str, Any]:
    """Seconds, memory and check values of every engine, call by call, its turn changing from round to round."""
    calls: dict[str, Any] = {name: {"update": [], "logprobs": []} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        workload.write_model(Path(folder), shape, device)
        engines = {name: Process(name, device, folder, shape, checkpointing) for name in names}
        for what in ("logprobs", "update"):
            for i in range(-WARM_UPS, rounds):
                order = list(names) if i % 2 else list(reversed(names))
                for name in order:
                    result = engines[name].call(what)
                    if i >= 0 or (what == "update" and i == -WARM_UPS):
                        calls[name][what].append(result)
        for engine in engines.values():
            engine.stop()
    return calls


def summary(shape: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second, MFU and memory of each engine, and our ratios to the other."""
    parameters, tokens = _sizes(shape)
    result: dict[str, Any] = {"parameters": parameters, "tokens": tokens}
    for name, by_kind in measured.items():
        # The first update is kept for its gradient norm alone.
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
    parser.add_argument("--shapes", nargs="+", choices=tuple(workload.SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=["ours", "verl"])
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass, in both")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if args.device != "cuda":
        parser.error("there is no CUDA device; on a CPU these shapes would take hours")
    if "verl" in args.engines and importlib.util.find_spec("verl") is None:
        parser.error(
            "verl is not installed: install verl==0.9.1, liger-kernel and flash-attn, or give --engines ours"
        )
    results, held = {}, True
    print(
        f"{'shape':<7}{'engine':<8}{'update':>16}{'MFU':>7}{'peak':>11}{'log-probs':>18}{'MFU':>7}{'grad norm':>11}"
    )
    for shape in args.shapes:
        of_shape = summary(shape, measured(shape, args.engines, args.checkpointing, args.device, args.rounds))
        for name in args.engines:
            result = of_shape[name]
            update, logprobs = result["update"], result["logprobs"]
            print(
                f"{shape:<7}{name:<8}{update['tokens_a_second']:>10,} tok/s{update['mfu']:>7.1%}"
                f"{update['peak_gib']:>7.1f} GiB"
                f"{logprobs['tokens_a_second']:>12,} tok/s{logprobs['mfu']:>7.1%}{result['first_grad_norm']:>11.5f}"
            )
        if len(args.engines) > 1:
            ours, theirs = (of_shape[name] for name in args.engines[:2])
            of_shape["ratios"] = {
                what: measure.ratio(theirs[what]["seconds"], ours[what]["seconds"]) for what in ("update", "logprobs")
            }
            of_shape["memory_ratio"] = ours["update"]["peak_gib"] / max(theirs["update"]["peak_gib"], 1e-9)
            ratios, memory = of_shape["ratios"], of_shape["memory_ratio"]
            fine = memory <= 1.0 and all(ratios[what]["median"] >= bar for what, bar in BARS.items())
            held = held and fine
            print(
                f"{shape:<7}ratio   {ratios['update']['median']:.3f} of its speed in updates, "
                f"{ratios['logprobs']['median']:.3f} in log-probs, {memory:.3f} of its memory: "
                f"{'held' if fine else 'MISSED'}",
                flush=True,
            )
        results[shape] = of_shape
    about = {"bars": BARS, "peer": _peer(), "checkpointing": args.checkpointing, "budget": workload.BUDGET}
    measure.write(args.json, "throughput", args.device, {**about, "results": results})
    return 0 if held else 1


def _peer() -> dict[str, str]:
    versions = {}
    for package in ("verl", "liger-kernel", "flash-attn", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
