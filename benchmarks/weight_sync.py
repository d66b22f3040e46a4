"""Publishing weights from training actors to a rollout engine over Ray.

Timed in the driver, from the call to the moment at which the engine holds the version. A colocated engine, on the GPU
of the first training actor, is compared with one copy of the published bytes on that device. An engine apart is
compared with the time that NCCL takes to send the same bytes in buckets of the same size between two processes. The
two take turns. With ``--ranks N``, N actors hold a part of the model each, on a GPU of their own, and send it at the
same time. The memory that a publication adds is measured in the first actor and in the engine.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn import build
from verl_fn.backends.fsdp import Fsdp
from verl_fn.backends.hf.skeleton import dtype_of
from verl_fn.backends.local import Local
from verl_fn.backends.protocol import BUCKET_BYTES
from verl_fn.backends.vllm import Vllm
from verl_fn.config.plan import RolloutPlan, make_plan
from verl_fn.config.schema import DriverConfig, RayConfig
from verl_fn.runs.memory import model_sizes
from verl_fn.state import Key
from verl_fn.steps import frozen

from . import measure, workload
from .together import free_port

# An engine may take this many copies of the bytes, and this much besides.
COPIES, SECONDS = {"colocated": 3.0, "apart": 1.5}, 0.05


def trainer(folder: str, device: str, ranks: int = 1) -> Local | Fsdp:
    """A backend that only holds weights, in shards where there are several ranks."""
    return (Local if ranks == 1 else Fsdp)(folder, frozen(), device=device)


def rollout_plan(
    folder: str, engine: str, dtype: str, placement: str, slots: int = 64, prompt: int = 512, response: int = 16
) -> RolloutPlan:
    """The plan of an engine with room for so many rows, of so many tokens."""
    from verl_fn.config import load

    settings = {
        "model.path": folder,
        "driver.kind": "ray",
        "rollout.name": engine,
        "rollout.dtype": dtype,
        "rollout.placement": placement,
        "rollout.gpu_memory_utilization": 0.3,
        "rollout.slots": slots,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
    }
    return make_plan(load(overrides=[f"{key}={value}" for key, value in settings.items()])).rollout


def copy_seconds(nbytes: int, device: str) -> float:
    """Seconds that one copy of so many bytes takes on a device, the second time."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = 0.0
    for _ in range(2):
        _synchronize(source)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(source)
        seconds = time.perf_counter() - began
    return seconds


def _synchronize(t: torch.Tensor) -> None:
    if t.is_cuda:
        torch.cuda.synchronize(t.device)


def in_engine(engine: Any, fn: Callable[..., int], device: str) -> int:
    """Calls a function in the process in which an engine computes; vLLM has one of its own."""
    value: int = engine._engine.call(fn, device)[0] if isinstance(engine, Vllm) else fn(engine, device)
    return value


def measure_peak(one: Any, device: str) -> int:
    """Begins to measure the peak of this process's memory on the GPU, and returns what it holds now."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_memory(one: Any, device: str) -> int:
    """Returns the most memory on the GPU since ``measure_peak``."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def compare(shape: str, placement: str, args: Any) -> dict[str, Any]:
    """Seconds of both, and what was sent."""
    from verl_fn.driver.cluster import Cluster
    from verl_fn.driver.group import Group
    from verl_fn.driver.host import Component
    from verl_fn.driver.ray import ROOM, connected
    from verl_fn.driver.remote import RemoteRollout, RemoteTrain

    device, ranks, apart = args.device, args.ranks, placement == "apart"
    bundle = {"CPU": ROOM, "GPU": 1.0} if device == "cuda" else {"CPU": ROOM}
    cluster = Cluster(600.0)
    with tempfile.TemporaryDirectory() as name, connected(RayConfig()):
        folder = str(workload.write_model(Path(name), shape, device))
        try:
            cluster.reserve([bundle] * (ranks + apart), "PACK")
            cluster.start(_placements(ranks, device, apart), DriverConfig(device=device), ranks)
            if ranks > 1:
                cluster.join(cluster.groups["trainer"], device)
            cluster.build(("trainer", "actor", trainer, folder, device, ranks))
            plan = rollout_plan(folder, args.engine, args.dtype, placement)
            cluster.build(("rollout", "rollout", build.rollout, plan, device))
            backend = RemoteTrain(cluster, cluster.groups["trainer"], "actor")
            rollout = RemoteRollout(cluster, cluster.groups["rollout"], "rollout")
            state = backend.load_pretrained(folder, Key.from_seed(0))

            def publish(version: int) -> float:
                began = time.perf_counter()
                cluster.get(rollout.publish(version, backend.weights(state.params)))
                return time.perf_counter() - began

            def copy() -> float:
                seconds: float = cluster.get(backend.map(copy_seconds, nbytes, device))
                return seconds

            nbytes = model_sizes(folder, "lm").total * dtype_of(args.dtype, "dtype").itemsize

            def in_both(fn: Callable[..., int]) -> dict[str, int]:
                first, engine = (Group(name, cluster.groups[name].members[:1]) for name in ("trainer", "rollout"))
                return {
                    "trainer": cluster.get(first.run("map", fn, None, None, device)),
                    "rollout": cluster.get(engine.run("map", in_engine, None, Component("rollout"), fn, device)),
                }

            before = in_both(measure_peak)
            first, _ = publish(0), publish(1)
            peaks = in_both(peak_memory)
            # The copies that follow allocate memory of their own.
            result = _rounds(
                publish, copy if not apart else lambda: sent_seconds(nbytes, device), args.rounds, placement
            )
            added = {name: peaks[name] - before[name] for name in peaks}
            if args.engine == "sampler":
                added["rollout"] -= nbytes
            return result | {"first": first, "bytes": nbytes} | _memory(added, device, apart)
        finally:
            cluster.stop()


def _placements(ranks: int, device: str, apart: bool) -> dict[str, list[Any]]:
    """Where the training ranks and the engine are; a colocated engine shares the first rank's GPU."""
    from verl_fn.driver.group import Placement
    from verl_fn.driver.ray import ROLLOUT_SHARE, TRAINER_SHARE

    gpu = float(device == "cuda")
    shares = [gpu if apart or rank else TRAINER_SHARE * gpu for rank in range(ranks)]
    return {
        "trainer": [Placement(rank, share) for rank, share in enumerate(shares)],
        "rollout": [Placement(ranks, gpu) if apart else Placement(0, ROLLOUT_SHARE * gpu)],
    }


def _rounds(
    publish: Callable[[int], float], copy: Callable[[], float], rounds: int, placement: str
) -> dict[str, Any]:
    """Times both in turn."""
    seconds: dict[str, list[float]] = {"publish": [], "copy": []}
    for i in range(rounds):
        seconds["publish"].append(publish(2 + i))
        # Two more processes for NCCL take long to start, and send several times.
        if placement == "colocated" or i == 0:
            seconds["copy"].append(copy())
    allowed = COPIES[placement] * statistics.median(seconds["copy"]) + SECONDS
    taken = statistics.median(seconds["publish"])
    return {"seconds": seconds, "allowed": allowed, "taken": taken, "held": taken <= allowed}


def _memory(added: dict[str, int], device: str, apart: bool) -> dict[str, Any]:
    """What publication adds in each process, and whether a GPU has at most one bucket of it; empty on a CPU."""
    if device != "cuda":
        return {}
    most = max(added.values()) if apart else sum(added.values())
    return {"added_bytes": added, "bucket_bytes": BUCKET_BYTES, "memory_held": most <= BUCKET_BYTES}


def sent_seconds(nbytes: int, device: str) -> float:
    """Seconds that a process takes to send bytes to another, in buckets, once both have sent before."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=_send, args=(rank, port, nbytes, device, theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    seconds: float = ours.recv()
    for process in processes:
        process.join()
    return seconds


def _send(rank: int, port: int, nbytes: int, device: str, pipe: Any) -> None:
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    bucket = torch.empty(min(nbytes, BUCKET_BYTES), dtype=torch.uint8, device=device)
    seconds = 0.0
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        for start in range(0, nbytes, len(bucket)):
            part = bucket[: min(len(bucket), nbytes - start)]
            dist.send(part, 1) if rank == 0 else dist.recv(part, 0)
        _synchronize(bucket)
        seconds = time.perf_counter() - began
    if rank == 1:
        pipe.send(seconds)
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench weight-sync``: a line a shape and placement; exit status 1 where a bar is missed on a GPU."""
    parser = measure.parser("weight-sync", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(workload.SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--engine", choices=("sampler", "vllm"), default="vllm")
    parser.add_argument("--placements", nargs="+", choices=tuple(COPIES), default=["colocated"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the engine")
    parser.add_argument("--ranks", type=measure.count, default=1, help="training actors that share the model")
    parser.add_argument("--rounds", type=measure.count, default=20)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    held = True
    for shape in args.shapes:
        for placement in args.placements:
            r = compare(shape, placement, args)
            results[f"{shape} {placement}"] = r
            held = held and r["held"] and r.get("memory_held", True)
            copy = statistics.median(r["seconds"]["copy"])
            print(
                f"{shape} {placement}: {r['bytes'] / 2**20:,.4g} MiB published in {1e3 * r['taken']:.1f} ms (the "
                f"first time {1e3 * r['first']:.0f} ms); {'a copy' if placement == 'colocated' else 'NCCL'} takes "
                f"{1e3 * copy:.2f} ms; allowed {1e3 * r['allowed']:.1f} ms: {'held' if r['held'] else 'MISSED'}",
                flush=True,
            )
            if "added_bytes" in r:
                trainer_mib, engine_mib = (r["added_bytes"][name] / 2**20 for name in ("trainer", "rollout"))
                print(
                    f"  memory added by publication: {trainer_mib:,.0f} MiB in the first training actor, "
                    f"{engine_mib:,.0f} MiB in the engine; allowed on a GPU is one bucket of "
                    f"{BUCKET_BYTES / 2**20:,.0f} MiB: "
                    f"{'held' if r['memory_held'] else 'MISSED'}",
                    flush=True,
                )
    about = {
        "bar": {"copies": COPIES, "seconds": SECONDS},
        "engine": args.engine, "dtype": args.dtype, "ranks": args.ranks,
    }  # fmt: skip
    measure.write(args.json, "weight-sync", args.device, about | {"results": results})
    return 0 if args.device == "cpu" or held else 1
