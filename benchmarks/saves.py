"""Saving and restoring a training state, compared with a plain copy of the same files on the same disk.

A save is timed as a run makes it: written, on the disk, with a checksum of each file. A restore compares the
checksums and reads the state. A save that ends later (``trainer.async_save``) is timed until the run goes on. The
plain copy is ``shutil.copyfile`` with an fsync of each file. The state has no moments, so that it and both folders
fit in memory: then neither a copy nor a restore waits for a disk to be read.

With ``--lora RANK`` it measures instead what a checkpoint of adapters writes, beside the bytes of the adapters and
their moments.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from . import measure, workload

BAR = 0.6  # of the rate of the plain copy
BAR_OF_ADAPTERS = 2.0  # times the bytes of the adapters and their moments


def copy(source: Path, target: Path) -> None:
    """Copies a folder's files and waits until they are on the disk."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        fd = os.open(target / file.name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def measured(work: Path, shape: str, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Returns the bytes of a saved state, and the seconds of each way in each round."""
    import verl_fn as vf
    from verl_fn.atomic import crc_of

    measure.say(f"a model of shape {shape}")
    workload.write_model(work / "model", shape, "cpu")
    backend = vf.Local(work / "model", vf.sgd(lambda count: 1e-3))
    held = [backend.load_pretrained()]
    saved, copied, begun = work / "saved", work / "copied", work / "begun"

    def check() -> None:
        for file in saved.iterdir():
            crc_of(file)

    def save() -> None:
        backend.save(held[0], saved)
        check()

    def restore() -> None:
        check()
        held.clear()  # no two states at a time, since the rest of the memory keeps the files
        held.append(backend.restore(saved))

    def without(*folders: Path) -> Callable[[], None]:
        def prepare() -> None:
            backend.saved()
            for folder in (*folders, begun):
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()

        return prepare

    seconds = measure.interleave(
        {
            "save": save,
            "copy": lambda: copy(saved, copied),
            "restore": restore,
            "begin": lambda: backend.save(held[0], begun, later=True),
        },
        rounds,
        "cpu",
        {
            "save": without(saved, copied),
            "copy": without(copied),
            "restore": without(copied),
            "begin": without(copied),
        },
    )
    backend.saved()
    return sum(file.stat().st_size for file in saved.iterdir()), seconds


def of_adapters(work: Path, shape: str, rank: int) -> dict[str, Any]:
    """Returns the bytes and seconds of the first and second save of adapters, and whether the state is restored."""
    import torch

    import verl_fn as vf
    from verl_fn.backends.hf.lora import Lora
    from verl_fn.state import tree

    workload.write_model(work / "model", shape, "cpu")
    backend = vf.Local(work / "model", vf.adamw(1e-3), lora=Lora(rank))
    state = backend.load_pretrained()
    seconds = []
    for name in ("first", "second"):
        began = time.perf_counter()
        backend.save(state, work / name)
        seconds.append(time.perf_counter() - began)
    trained = [state.params[name] for name in state.params.trained()]
    moments = [t for t in tree.paths(state.optimizer).values() if isinstance(t, torch.Tensor)]
    return {
        "written": sum(file.stat().st_size for file in (work / "first").iterdir()),
        "adapters and moments": sum(t.nbytes for t in [*moments, *trained]),
        "all parameters": sum(t.nbytes for t in state.params.values()),
        "seconds": seconds,
        "restored": tree.equal(backend.restore(work / "first"), state),
    }


def main(argv: Sequence[str]) -> int:
    """Runs ``verl-fn bench saves``: a line a way; exit status 1 if a rate misses the bar."""
    parser = measure.parser("saves", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=measure.count, default=10)
    parser.add_argument("--folder", help="a folder on the disk to measure")
    parser.add_argument("--lora", type=measure.count, metavar="RANK", help="measure a checkpoint of adapters")
    args = parser.parse_args(argv)
    if args.lora:
        with tempfile.TemporaryDirectory(dir=args.folder) as work:
            found = of_adapters(Path(work), args.shape, args.lora)
        ratio = found["written"] / found["adapters and moments"]
        held = found["restored"] and ratio <= BAR_OF_ADAPTERS
        print(
            f"{args.shape}, adapters of rank {args.lora}: {found['written'] / 1e6:.1f} MB written, {ratio:.2f} times "
            f"the adapters and moments (at most {BAR_OF_ADAPTERS:g}); all parameters "
            f"{found['all parameters'] / 1e6:.0f} MB; saves took "
            f"{' and '.join(f'{each:.2f}' for each in found['seconds'])} s; restored "
            f"{'bitwise' if found['restored'] else 'WRONG'}: {'held' if held else 'MISSED'}"
        )
        measure.write(args.json, "saves", "cpu", {"shape": args.shape, "rank": args.lora, "ratio": ratio, **found})
        return 0 if held else 1
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        size, seconds = measured(Path(work), args.shape, args.rounds)
    rates = {way: measure.ratio(seconds["copy"], seconds[way]) for way in ("save", "restore")}
    for way, rate in rates.items():
        print(
            f"{args.shape} {way}: {size / 1e9:.2f} GB in {median(seconds[way]):.2f} s, {rate['median']:.2f} "
            f"[{rate['low']:.2f}, {rate['high']:.2f}] of the rate of a plain copy ({median(seconds['copy']):.2f} s); "
            f"at least {BAR}: {'held' if rate['median'] >= BAR else 'MISSED'}"
        )
    print(f"{args.shape} begin: a save that ends later returns after {median(seconds['begin']):.2f} s")
    about = {"shape": args.shape, "bytes": size, "bar": BAR, "of the copy's rate": rates, "seconds": seconds}
    measure.write(args.json, "saves", "cpu", about)
    return 0 if all(rate["median"] >= BAR for rate in rates.values()) else 1
