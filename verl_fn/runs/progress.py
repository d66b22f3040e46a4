"""Progress on the screen: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Say = Callable[[str], None]

NUMBERS = (
    ("critic/score/mean", "reward", ".3f"),
    ("train/loss", "loss", ".3f"),
    # ppo_kl compares with the policy that sampled: it is 0 where a batch is one update. The other two compare with
    # the reference policy.
    ("actor/ppo_kl", "ppo_kl", ".4f"),
    ("actor/kl_loss", "ref_kl", ".4f"),
    ("actor/reward_kl_penalty", "ref_kl", ".4f"),
    ("actor/grad_norm", "grad", ".2f"),
    ("perf/throughput", "tok/s", ",.0f"),
)


def numbers(report: Mapping[str, float]) -> str:
    """Formats the most important metrics of a step's report.

    Example:
        >>> numbers({"critic/score/mean": 0.51234, "perf/throughput": 12345.6})
        'reward 0.512  tok/s 12,346'
        >>> numbers({"actor/grad_norm": float("nan"), "actor/update_skipped": 1.0})
        'grad nan  updates skipped'
    """
    parts = [f"{label} {report[name]:{form}}" for name, label, form in NUMBERS if name in report]
    skipped = any(name.endswith("/update_skipped") and value for name, value in report.items())
    return "  ".join([*parts, *["updates skipped"] * skipped])


def duration(seconds: float) -> str:
    """Formats a duration.

    Example:
        >>> duration(75), duration(7260)
        ('1m15s', '2h01m')
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class Progress(Protocol):
    """Shows the progress of a run while it is open."""

    def show(self, step: int, report: Mapping[str, float], evaluation: str) -> None:
        """Shows a finished step; ``evaluation`` is empty for a step without one."""
        ...

    def __enter__(self) -> Progress: ...

    def __exit__(self, *error: Any) -> None: ...


class Lines:
    """Prints a line every few steps, and one for every evaluation."""

    def __init__(self, start: int, total: int, every: int, say: Say) -> None:
        self._first, self._total, self._every, self._say = start, total, every, say
        self._began = time.perf_counter()

    def show(self, step: int, report: Mapping[str, float], evaluation: str) -> None:
        """Prints a line for every ``every``-th step, for the last one, and for steps with an evaluation."""
        if step % self._every and step != self._total and not evaluation:
            return
        per_step = (time.perf_counter() - self._began) / (step - self._first)
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}", numbers(report)]
        parts.append(f"left {duration(per_step * (self._total - step))}")
        self._say("  ".join(part for part in (*parts, evaluation) if part))

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Live:
    """Shows one line with a bar and the remaining time, redrawn after every step; evaluations stay above it."""

    def __init__(self, start: int, total: int) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(compact=True),
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="")

    def show(self, step: int, report: Mapping[str, float], evaluation: str) -> None:
        """Redraws the line after a step."""
        self._bar.update(self._task, completed=step, numbers=numbers(report))
        if evaluation:
            self._bar.print(f"step {step}  {evaluation}", highlight=False)

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()
