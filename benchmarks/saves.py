"""Saving and restoring a training state, compared with a plain copy of the same files on the same disk.

A save is timed as a run makes it: written, on the disk, with a checksum of each file. A restore compares the
checksums and reads the state. The plain copy is ``shutil.copyfile`` with an fsync of each file. Files are in the page
cache when they are restored or copied, so the rates are higher than those of a disk that is read for the first time.
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
    from verl_fn.runs.checkpoints import crcs_of

    measure.say(f"a model of shape {shape}, with Adam's moments")
    workload.write_model(work / "model", shape, "cpu")
    backend = vf.Local(work / "model", vf.adamw(1e-3))
    state = backend.load_pretrained()
    saved, copied = work / "saved", work / "copied"

    def save() -> None:
        backend.save(state, saved)
        crcs_of(saved.iterdir())

    def restore() -> None:
        crcs_of(saved.iterdir())
        backend.restore(saved)

    ways: dict[str, Callable[[], None]] = {
        "save": save,
        "copy": lambda: copy(saved, copied),
        "restore": restore,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # The first round is not counted: it makes the skeleton and fills the page cache.
    for number in range(rounds + 1):
        for name, way in ways.items():
            if name != "restore":
                shutil.rmtree(saved if name == "save" else copied, ignore_errors=True)
            os.sync()
            began = time.perf_counter()
            way()
            took = time.perf_counter() - began
            measure.say(f"round {number}: {name} took {took:.2f} s")
            if number:
                seconds[name].append(took)
    return sum(file.stat().st_size for file in saved.iterdir()), seconds


def main(argv: Sequence[str]) -> int:
    """Runs ``verl-fn bench saves``: a line a way; exit status 1 if a rate misses the bar."""
    parser = measure.parser("saves", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=measure.count, default=3)
    parser.add_argument("--folder", help="a folder on the disk to measure")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        size, seconds = measured(Path(work), args.shape, args.rounds)
    results: dict[str, Any] = {}
    held = True
    for name in ("save", "restore"):
        part = median(seconds["copy"]) / median(seconds[name])
        held = held and part >= BAR
        results[name] = {"seconds": seconds[name], "of the copy's rate": part}
        print(
            f"{args.shape} {name}: {size / 1e9:.2f} GB in {median(seconds[name]):.2f} s, {part:.0%} of the rate of a "
            f"plain copy ({median(seconds['copy']):.2f} s); at least {BAR:.0%}: {'held' if part >= BAR else 'MISSED'}"
        )
    results["copy"] = {"seconds": seconds["copy"]}
    about = {"shape": args.shape, "rounds": args.rounds, "bytes": size, "bar": BAR, "results": results}
    measure.write(args.json, "saves", "cpu", about)
    return 0 if held else 1
