"""The most memory that a rank needs to load a model, beside the shard that it keeps.

Ranks on the CPU load one folder of random weights, bf16 on disk, into fp32 shards. Each reports the most memory that
its process ever had (``VmHWM``) and what it had before anything was loaded, when all libraries were imported.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import measure, workload
from .together import Group

GIB = 2**30
BAR = {"of the shard": 1.3, "gib": 1.0}
WAYS = ("load_pretrained", "init")


def memory(field: str) -> int:
    """Returns a field of this process's status, in bytes: ``VmHWM`` is the most memory it had, ``VmRSS`` what it has.

    Example:
        >>> memory("VmHWM") >= memory("VmRSS") > 0
        True
    """
    line = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert line is not None
    return 1024 * int(line[1])


def _loaded(rank: int, calls: Iterator[str], folder: str, way: str) -> Iterator[dict[str, float]]:
    import torch
    import torch.distributed as dist
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  part of the baseline, as all imports are

    from verl_fn.backends.fsdp import Fsdp
    from verl_fn.backends.fsdp.torch_private import local_of
    from verl_fn.state import Key
    from verl_fn.steps import frozen

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = memory("VmHWM")
    backend, began = Fsdp(folder, frozen()), time.perf_counter()
    state = backend.load_pretrained() if way == "load_pretrained" else backend.init(Key.from_seed(0))
    seconds = time.perf_counter() - began
    shard = sum(local_of(t).nbytes for t in state.params.values())
    dist.barrier()
    peak = memory("VmHWM")
    dist.destroy_process_group()
    yield {"imports": before, "peak": peak, "shard": shard, "seconds": seconds}


def measured(folder: str, ranks: int, way: str) -> list[dict[str, float]]:
    """Returns what each rank reports, by rank.

    Raises:
        RuntimeError: a rank failed; its traceback is in the message.
    """
    group = Group(_loaded, ranks, "a rank", folder, way)
    try:
        return group.reports()
    finally:
        group.stop()


def main(argv: Sequence[str]) -> int:
    """Runs ``verl-fn bench loading``: a line a way; exit status 1 where the bar is missed."""
    parser = measure.parser("loading", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="1.5b")
    parser.add_argument("--ranks", type=measure.count, default=4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["load_pretrained"])
    parser.add_argument("--folder", help="a folder with the model, written if it is not there")
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    held = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.folder or name) / "model"
        if not (folder / "config.json").is_file():
            workload.write_model(folder, args.shape, "cpu")
        for way in args.ways:
            reports = measured(str(folder), args.ranks, way)
            results[way] = reports
            # Only the first rank makes random weights, whole; the bar is for the others.
            others = reports if way == "load_pretrained" else reports[1:]
            worst = max(others, key=lambda report: report["peak"])
            most = BAR["of the shard"] * worst["shard"] + BAR["gib"] * GIB
            fine = worst["peak"] - worst["imports"] <= most
            held = held and fine
            print(
                f"{args.shape} {way} on {args.ranks} ranks: shard {worst['shard'] / GIB:.2f} GiB, peak "
                f"{worst['peak'] / GIB:.2f} GiB, of which imports {worst['imports'] / GIB:.2f} GiB, in "
                f"{worst['seconds']:.1f} s; at most {most / GIB:.2f} GiB beside imports: "
                f"{'held' if fine else 'MISSED'}"
            )
    about = {"shape": args.shape, "ranks": args.ranks, "bar": BAR, "results": results}
    measure.write(args.json, "loading", "cpu", about)
    return 0 if held else 1
