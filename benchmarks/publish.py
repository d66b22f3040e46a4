"""Publishing weights from a training actor to the embedded sampler over Ray, both on one device.

Timed in the driver, from the call to the moment at which the engine holds the version, against one copy of the same
bytes on that device, timed in the training actor. The two take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.config.schema import DriverConfig, RayConfig
from verl_fn.state import Key, Params
from verl_fn.steps import frozen

from . import measure, workload

# An engine may take this many device copies, and this much besides.
COPIES, SECONDS = 3.0, 0.05


def trainer(folder: str, device: str) -> Local:
    """A backend that only holds weights."""
    return Local(folder, frozen(), device=device)


def copy_seconds(params: Params) -> float:
    """Seconds that one copy of these bytes takes where they lie."""
    sources = list(params.leaves.values())
    targets = [torch.empty_like(t) for t in sources]
    for wait in (True, False):
        _synchronize(sources[0])
        began = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        _synchronize(sources[0])
        if not wait:
            return time.perf_counter() - began
    raise AssertionError


def _synchronize(t: torch.Tensor) -> None:
    if t.is_cuda:
        torch.cuda.synchronize(t.device)


def compare(shape: str, device: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of both, and what was sent."""
    from verl_fn.driver.cluster import Cluster, Seat
    from verl_fn.driver.ray import ROLLOUT_SHARE, ROOM, TRAINER_SHARE, connected
    from verl_fn.driver.remote import RemoteRollout, RemoteTrain

    gpu = float(device == "cuda")
    cluster = Cluster(600.0)
    with tempfile.TemporaryDirectory() as name, connected(RayConfig()):
        folder = str(workload.write_model(Path(name), shape, device))
        try:
            cluster.reserve([{"CPU": ROOM, "GPU": 1.0} if gpu else {"CPU": ROOM}], "PACK")
            seats = {"trainer": [Seat(0, TRAINER_SHARE * gpu)], "rollout": [Seat(0, ROLLOUT_SHARE * gpu)]}
            cluster.start(seats, DriverConfig(device=device), 1)
            cluster.build("trainer", "actor", trainer, folder, device)
            cluster.build("rollout", "rollout", make_sampler, folder, device, dtype)
            backend = RemoteTrain(cluster, cluster.groups["trainer"], "actor")
            engine = RemoteRollout(cluster, cluster.groups["rollout"], "rollout")
            state = backend.load_pretrained(folder, Key.from_seed(0))

            def publish(version: int) -> float:
                began = time.perf_counter()
                cluster.get(engine.publish(version, backend.weights(state.params)))
                return time.perf_counter() - began

            return _rounds(publish, lambda: cluster.get(backend.map(copy_seconds, state.params)), rounds) | {
                "bytes": cluster.get(backend.map(total_bytes, state.params))
            }
        finally:
            cluster.stop()


def _rounds(publish: Callable[[int], float], copy: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Times both in turn; the first publication, which compares checksums and makes buffers, stands alone."""
    seconds: dict[str, list[float]] = {"publish": [], "copy": []}
    first = publish(0)
    publish(1)
    for i in range(rounds):
        for which in ("publish", "copy") if i % 2 else ("copy", "publish"):
            seconds[which].append(publish(2 + i) if which == "publish" else copy())
    allowed = COPIES * statistics.median(seconds["copy"]) + SECONDS
    taken = statistics.median(seconds["publish"])
    return {"first": first, "seconds": seconds, "allowed": allowed, "taken": taken, "held": taken <= allowed}


def make_sampler(folder: str, device: str, dtype: str) -> Sampler:
    """The engine."""
    return Sampler(folder, device=device, dtype=dtype)


def total_bytes(params: Params) -> int:
    """Bytes of all parameters."""
    return sum(t.nbytes for t in params.values())


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench publish``: a line a shape; exit status 1 where the bar is missed on a GPU."""
    parser = measure.parser("publish", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(workload.SHAPES), default=["0.5b"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the engine")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    results = {shape: compare(shape, args.device, args.dtype, args.rounds) for shape in args.shapes}
    about = {"bar": {"copies": COPIES, "seconds": SECONDS}, "dtype": args.dtype, "results": results}
    measure.write(args.json, "publish", args.device, about)
    for shape, r in results.items():
        copy = statistics.median(r["seconds"]["copy"])
        print(
            f"{shape}: {r['bytes'] / 2**20:,.0f} MiB published in {1e3 * r['taken']:.1f} ms (the first time "
            f"{1e3 * r['first']:.0f} ms); one device copy takes {1e3 * copy:.2f} ms; allowed "
            f"{1e3 * r['allowed']:.1f} ms: {'held' if r['held'] else 'MISSED'}"
        )
    return 0 if args.device == "cpu" or all(r["held"] for r in results.values()) else 1
