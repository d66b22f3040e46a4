"""The chart of ``verl-fn bench first-step``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(
    results: list[dict[str, Any]], bars: Mapping[str, Mapping[str, float]], dtypes: dict[str, str], out: Path
) -> None:
    """Draws the errors of every layout and loss on a log axis, with the bars.

    Args:
        results: one for each layout and loss.
        bars: the largest errors allowed, by dtype and kind.
        dtypes: the dtype of each layout.
        out: the file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds, least = list(bars["float32"]), 1e-10
    layouts = list(dict.fromkeys(r["layout"] for r in results))
    losses = list(dict.fromkeys(r["loss"] for r in results))
    size = (3.0 * len(kinds) + 2, 0.36 * len(layouts) + 1.5)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=size, dpi=150, layout="constrained", sharey=True)
    for axis, kind in zip(axes, kinds, strict=True):
        for i, loss in enumerate(losses):
            rows = [r for r in results if r["loss"] == loss]
            at = [layouts.index(r["layout"]) + 0.24 * (i - (len(losses) - 1) / 2) for r in rows]
            # At the right edge: 1 and more, and what is not finite.
            shown = [max(r["errors"][kind], least) if r["errors"][kind] < 1 else 1 for r in rows]
            axis.plot(shown, at, f"C{i}o", ms=5, label=loss, clip_on=False)
        for dtype in set(dtypes.values()):
            if (bar := bars[dtype].get(kind)) is not None:
                axis.axvline(bar, color="C3", lw=1.2, ls="-" if dtype == "float32" else "--", label=f"bar, {dtype}")
        axis.set(xscale="log", xlim=(least / 3, 1), title=kind.replace("_", " "), xlabel="relative error")
        axis.set_xticks([least, 1e-8, 1e-6, 1e-4, 1e-2, 1], ["≤1e-10", "1e-8", "1e-6", "1e-4", "1e-2", "≥1"])
        axis.minorticks_off()
        axis.grid(axis="x", alpha=0.25)
        for line in range(len(layouts) - 1):
            axis.axhline(line + 0.5, color="0.85", lw=0.6)
    axes[0].set_yticks(range(len(layouts)), layouts)
    axes[0].set_ylim(len(layouts) - 0.5, -0.5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(out)
    pyplot.close(figure)
