"""Curves of runs as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .runs import read_metrics


def reward_curves(
    folders: Sequence[str | Path], out: str | Path, *, title: str = "", labels: Sequence[str] = ()
) -> Path:
    """Training reward and held-out exact match of runs, one colour a run, into the file ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    names = labels or [Path(folder).name for folder in folders]
    for i, (folder, name) in enumerate(zip(folders, names, strict=True)):
        rows, color = read_metrics(folder), f"C{i}"
        reward = [(r["step"], r["critic/score/mean"]) for r in rows if r.get("critic/score/mean") is not None]
        axes.plot(*zip(*reward, strict=True), color=color, lw=1, alpha=0.5, label=f"{name}: training reward")
        held = [(r["step"], v) for r in rows for k, v in r.items() if k.startswith("val-core/") and "/acc/" in k]
        axes.plot(
            *zip(*held, strict=True), color=color, lw=1.8, marker="o", ms=4, label=f"{name}: held-out exact match"
        )
    axes.set(xlabel="step", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    figure.savefig(out)
    pyplot.close(figure)
    return Path(out)
