"""What all benchmarks share: interleaved repetitions, ratios with an interval, peak memory, the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numpy", "ray", "megatron-core", "megatron-bridge", "transformer-engine")


def say(what: str) -> None:
    """Prints on the error stream what comes next, since a model of a real size takes minutes until the first line."""
    print(time.strftime("%X"), what, file=sys.stderr, flush=True)


def interleave(
    variants: dict[str, Callable[[], Any]],
    rounds: int,
    device: str,
    before: dict[str, Callable[[], Any]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round; the order within a round turns from round to round.

    ``before`` holds what to do before each call of a variant, outside the measured time.
    """
    names: list[str] = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    prepare = before or {name: lambda: None for name in names}
    for name in names:
        prepare[name]()
        variants[name]()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            prepare[name]()
            _synchronize(device)
            start = time.perf_counter()
            variants[name]()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The median of paired ratios and its 95 % interval by bootstrap over the pairs.

    Example:
        >>> result = ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
        >>> result["median"], result["low"], result["high"]
        (2.0, 2.0, 2.0)
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"median": statistics.median(pairs), "low": medians[49], "high": medians[1949], "pairs": len(pairs)}


def peak_bytes(fn: Callable[[], Any], device: str) -> int:
    """The most memory that torch held during ``fn`` beyond what it held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, acc_events=True, activities=activities) as profile:
        fn()
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine(device: str) -> dict[str, Any]:
    """Where and with what a result was measured."""
    about: dict[str, Any] = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    about["device"] = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores, {_cpu()}"
    for package in PACKAGES:
        try:
            about[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return about


def write(path: str | None, name: str, device: str, result: dict[str, Any]) -> None:
    """Write a result with its machine and command, if a path was given."""
    if path is None:
        return
    files = ("--json", "--png")
    options = [a for i, a in enumerate(sys.argv) if i > 2 and a not in files and sys.argv[i - 1] not in files]
    command = " ".join(["verl-fn bench", name, *options])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"command": command, "machine": machine(device), **result}, indent=1) + "\n")


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(prog=f"verl-fn bench {name}", description=doc)
    made.add_argument("--json", metavar="F", help="also write the result here")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", type=_device, choices=("cpu", "cuda"), default=default)
    return made


def count(text: str) -> int:
    """A number above 0, for an option.

    Example:
        >>> count("3")
        3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number from 1 on, not {text}")
    return int(text)


def _device(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no GPU here")
    return text


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
