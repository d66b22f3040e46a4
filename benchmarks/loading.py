"""The most memory that a rank needs to load a model, beside the shard that it keeps.

Ranks on the CPU load one folder of random weights, bf16 on disk, into fp32 shards. Each reports the most memory that
its process ever had (``VmHWM``) and what it had before anything was loaded, when all libraries were imported.

``--disk ROUNDS`` compares times instead, in turns: loading files that no cache holds with a plain read of them, and a
checkpoint with a plain copy of it and an ``fsync`` of each file. The ranks hold frozen weights in bf16.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import measure, workload
from .saves import copy
from .together import Group

GIB = 2**30
BAR = {"of the shard": 1.3, "gib": 1.0}
BAR_OF_DISK = 0.6  # of the rate of a plain read or copy
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


def _timed(rank: int, calls: Iterator[str], folder: str, saved: str) -> Iterator[dict[str, float]]:
    """Answers ``load`` and ``save`` with their seconds."""
    import torch
    import torch.distributed as dist

    from verl_fn.backends.fsdp import Fsdp
    from verl_fn.steps import frozen

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    backend = Fsdp(folder, frozen(), dtype="bfloat16")
    # The first call also imports.
    state: Any = backend.load_pretrained()
    yield {}
    for call in calls:
        dist.barrier()
        began = time.perf_counter()
        if call == "load":
            state = None
            state = backend.load_pretrained()
        else:
            backend.save(state, saved)
        dist.barrier()
        yield {"seconds": time.perf_counter() - began}


def forget(folder: Path) -> None:
    """Drops a folder's files from the system's cache."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: Path) -> None:
    room = bytearray(16 << 20)
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(room):
                pass


def of_disk(work: Path, folder: Path, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each way in each round."""
    saved, copied = work / "saved", work / "copied"
    seconds: dict[str, list[float]] = {}
    group = Group(_timed, ranks, "a rank", str(folder), str(saved))

    def asked(call: str) -> None:
        group.ask(call)

    def measure_one(name: str, run: Callable[[], Any]) -> None:
        began = time.perf_counter()
        run()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    try:
        group.reports()
        for _ in range(rounds):
            forget(folder)
            measure_one("read", lambda: _read(folder))
            forget(folder)
            measure_one("load", lambda: asked("load"))
            measure_one("save", lambda: asked("save"))
            measure_one("copy", lambda: copy(saved, copied))
            for made in (saved, copied):
                shutil.rmtree(made)
    finally:
        group.stop()
    return seconds


def _main_of_disk(args: Any, work: Path, folder: Path) -> int:
    seconds = of_disk(work, folder, args.ranks, args.disk)
    rates = {
        name: measure.ratio(seconds[plain], seconds[name]) for name, plain in (("load", "read"), ("save", "copy"))
    }
    held = all(rate["median"] >= BAR_OF_DISK for rate in rates.values())
    size = sum(file.stat().st_size for file in folder.iterdir())
    for name, rate in rates.items():
        print(
            f"{args.shape} {name} on {args.ranks} ranks: {size / 1e9:.1f} GB, {rate['median']:.2f} "
            f"[{rate['low']:.2f}, {rate['high']:.2f}] of the plain rate, at least {BAR_OF_DISK}; seconds "
            + ", ".join(f"{one:.1f}" for one in seconds[name])
        )
    print("held" if held else "MISSED")
    about = {"shape": args.shape, "ranks": args.ranks, "bytes": size, "bar": BAR_OF_DISK, "seconds": seconds}
    measure.write(args.json, "loading", "cpu", {**about, "rates": rates})
    return 0 if held else 1


def main(argv: Sequence[str]) -> int:
    """Runs ``verl-fn bench loading``: a line a way; exit status 1 if the bar is missed."""
    parser = measure.parser("loading", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="1.5b")
    parser.add_argument("--ranks", type=measure.count, default=4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["load_pretrained"])
    parser.add_argument("--folder", help="a folder with the model, written if it is not there")
    parser.add_argument("--disk", type=measure.count, metavar="ROUNDS", help="compare with a plain read and copy")
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    held = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.folder or name) / "model"
        if not (folder / "config.json").is_file():
            workload.write_model(folder, args.shape, "cpu")
        if args.disk:
            return _main_of_disk(args, folder.parent, folder)
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
