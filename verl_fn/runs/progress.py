"""Progress on the screen: a live line on a terminal, plain lines elsewhere, and sentences about odd steps.

Before the first step, a line tells of each part that takes long.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from verl_fn.algorithms import Report
from verl_fn.backends.memory import RUNNING
from verl_fn.config import Plan

Say = Callable[[str], None]
LONG = 30.0  # seconds of a step between two lines about it
PATIENCE = 5.0  # seconds until the first line about a load or a save; each further line takes twice as long

NUMBERS = (
    ("critic/score/mean", "reward", ".3f"),
    ("train/loss", "loss", ".3f"),
    # ppo_kl compares with the policy that sampled. The other two compare with the reference policy.
    ("actor/ppo_kl", "ppo_kl", "z.3g"),
    ("actor/kl_loss", "ref_kl", ".3g"),
    ("actor/reward_kl_penalty", "ref_kl", ".3g"),
    ("actor/grad_norm", "grad", ".3g"),
    ("train/grad_norm", "grad", ".3g"),
    ("response_length/mean", "length", ",.0f"),
    ("response_length/clip_ratio", "cut off", ".0%"),
    ("perf/time_per_step", "s/step", ",.3g"),
    ("perf/throughput", "tok/s", ",.0f"),
)
PREFIX = "timing_s/start/"
# The parts in their order, with what a run says of them.
PARTS = {
    "imports": "imports",
    "check": "checks of config, data and models",
    "processes": "processes",
    "load": "models",
    "evaluate": "evaluation",
    "save": "first save",
}
LONG_PART = 5.0  # seconds


def numbers(report: Mapping[str, float], hidden: Sequence[str] = ()) -> str:
    """Formats the most important metrics of a step's report, but for hidden ones.

    Example:
        >>> numbers({"critic/score/mean": 0.51234, "perf/throughput": 12345.6})
        'reward 0.512  tok/s 12,346'
        >>> numbers({"actor/grad_norm": float("nan"), "actor/update_skipped": 1.0})
        'grad nan  updates skipped'
        >>> numbers({"actor/kl_loss": 0.25, "actor/reward_kl_penalty": 0.5})
        'ref_kl 0.25'
        >>> numbers({"actor/ppo_kl": -1e-6})
        'ppo_kl -1e-06'
    """
    shown: dict[str, str] = {}
    for name, label, form in NUMBERS:
        if name in report and name not in hidden:
            shown.setdefault(label, f"{label} {report[name]:{form}}")
    skipped = any(name.endswith("/update_skipped") and value for name, value in report.items())
    return "  ".join([*shown.values(), *["updates skipped"] * skipped])


def duration(seconds: float) -> str:
    """Formats a duration.

    Example:
        >>> duration(75), duration(7260)
        ('1m15s', '2h01m')
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def always_zero(plan: Plan) -> tuple[str, ...]:
    """Returns the metrics that are 0 in every step: ``actor/ppo_kl`` where each batch is a single update."""
    several = getattr(plan.options, "ppo_mini_batch_size", 0) or plan.data.train_batch_size
    updates_more = several < plan.data.train_batch_size or getattr(plan.options, "ppo_epochs", 1) > 1
    return () if updates_more else ("actor/ppo_kl",)


@contextlib.contextmanager
def waiting(say: Say, what: str, share: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
    """Says how long the body has run, after ``PATIENCE`` seconds and then ever more rarely.

    Args:
        say: prints a line; another thread calls it.
        share: returns how much of it is done, from 0 to 1; lines tell it if it is above 0.
    """
    ended = threading.Event()
    began = time.perf_counter()

    def tell() -> None:
        seconds = PATIENCE
        while not ended.wait(began + seconds - time.perf_counter()):
            done = share()
            say(f"{what}: {duration(seconds)} so far" + (f", {done:.0%} done" if done > 0 else ""))
            seconds *= 2

    thread = threading.Thread(target=tell, name="verl_fn waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Pulse:
    """Says what a long step is doing: its phase, how much of that is done, and the time that is left.

    Shares and times are judged by the step before; the first step only tells its phase and its age. A thread calls
    ``beat`` while the pulse is open.

    Args:
        start: the steps that are done.
        total: the steps of the run.
        every: seconds between two lines.
        tell: gets a line.
    """

    def __init__(self, start: int, total: int, every: float, tell: Say) -> None:
        self._first, self._total, self._every, self._tell = start, total, every, tell
        self._before: Mapping[str, float] = {}
        self.done(start, {})
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl_fn progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def done(self, step: int, report: Mapping[str, float]) -> None:
        """Notes that a step has ended."""
        now = time.perf_counter()
        self._before = report or self._before
        self._step, self._began, self._told = step, now, now
        self._phase, self._entered = "", now

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._every)):
            self.beat(time.perf_counter())

    def beat(self, now: float) -> None:
        """Tells a line if it is time; ``now`` is a time of ``time.perf_counter``."""
        phase = RUNNING[0] if RUNNING else ""
        if phase != self._phase:
            self._phase, self._entered = phase, now
        if now - self._told < self._every or not phase or self._step >= self._total:
            return
        self._told = now
        self._tell(f"step {self._step + 1}/{self._total}  {self._doing(now)}")

    def _doing(self, now: float) -> str:
        age = now - self._began
        expected = self._before.get(f"timing_s/{self._phase}", 0.0)
        if expected <= 0:
            return f"{self._phase} for {duration(now - self._entered)}, {duration(age)} into the step"
        share = min((now - self._entered) / expected, 0.99)
        left = max(self._before.get("timing_s/step", 0.0) - age, 0.0)
        return f"{self._phase} {share:.0%}, about {duration(left)} left of the step"


class Lines(Pulse):
    """Prints a line every few steps, and one for every evaluation."""

    def __init__(self, start: int, total: int, freq: int, say: Say, hidden: Sequence[str] = ()) -> None:
        super().__init__(start, total, LONG, say)
        self._freq, self._hidden, self._opened = freq, hidden, time.perf_counter()

    def show(self, step: int, report: Mapping[str, float], evaluation: str) -> None:
        """Prints a line for every ``freq``-th step, for the last one, and for steps with an evaluation."""
        self.done(step, report)
        if step % self._freq and step != self._total and not evaluation:
            return
        per_step = (time.perf_counter() - self._opened) / (step - self._first)
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}", numbers(report, self._hidden)]
        parts.append(f"left {duration(per_step * (self._total - step))}")
        self._tell("  ".join(part for part in (*parts, evaluation) if part))


class Live(Pulse):
    """Shows one line with a bar and the remaining time, redrawn after every step; evaluations stay above it."""

    def __init__(self, start: int, total: int, hidden: Sequence[str] = ()) -> None:
        from rich import progress

        super().__init__(start, total, 1.0, lambda line: self._bar.update(self._task, doing=line.partition("  ")[2]))
        self._hidden = hidden
        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TextColumn("{task.fields[doing]}"),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(compact=True),
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="", doing="")

    def show(self, step: int, report: Mapping[str, float], evaluation: str) -> None:
        """Redraws the line after a step."""
        self.done(step, report)
        self._bar.update(self._task, completed=step, numbers=numbers(report, self._hidden), doing="")
        if evaluation:
            self._bar.print(f"step {step}  {evaluation}", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._bar.stop()


def equal_rewards(step: int, report: Report) -> str:
    """Returns a sentence about a step whose rewards are all equal, and not all of its advantages 0; or nothing.

    Example:
        >>> scores = {"critic/score/min": 0.5, "critic/score/max": 0.5}
        >>> equal_rewards(3, scores | {"critic/advantages/min": -1.0, "critic/advantages/max": 1.0})
        'all rewards of step 3 are 0.5'
        >>> equal_rewards(3, scores | {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0})
        ''
    """
    lowest, highest = _scores(report)
    learned_from = "critic/advantages/min" in report and not _idle(report)
    return f"all rewards of step {step} are {lowest:g}" if lowest == highest and learned_from else ""


def without_advantages(step: int, report: Report) -> str:
    """Returns a sentence about a step whose advantages are all 0; or nothing.

    Example:
        >>> names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
        >>> without_advantages(3, dict.fromkeys(names, 0.0))
        'all rewards of step 3 are 0, and all advantages are 0: the policy learns nothing from it'
        >>> without_advantages(3, dict(zip(names, (0.0, 1.0, -1.0, 1.0))))
        ''
    """
    lowest, highest = _scores(report)
    if not _idle(report) or math.isnan(lowest):
        return ""
    if lowest == highest:
        return (
            f"all rewards of step {step} are {lowest:g}, and all advantages are 0: the policy learns nothing from it"
        )
    # Rewards are kept in float32, whose error is about a ten-millionth of the value.
    largest = max(abs(lowest), abs(highest))
    rounded = largest >= 1e6 * min(1.0, highest - lowest)
    return (
        f"all advantages of step {step} are 0, although rewards go from {lowest:g} to {highest:g}: they differ "
        f"between prompts only{', or are so large that their differences are rounded away' if rounded else ''}"
    )


def _idle(report: Report) -> bool:
    return report.get("critic/advantages/min") == 0.0 and report.get("critic/advantages/max") == 0.0


def _scores(report: Report) -> tuple[float, float]:
    return report.get("critic/score/min", math.nan), report.get("critic/score/max", math.nan)


def few_groups(step: int, report: Report) -> str:
    """Returns a sentence about a step with too few groups of different rewards for a whole batch; or nothing.

    Example:
        >>> names = ("train/groups_missing", "train/groups_kept", "train/num_gen_batches")
        >>> few_groups(3, dict(zip(names, (14.0, 0.0125, 10.0))))[:56]
        'in step 3 the batch lacks 14 of data.train_batch_size gr'
        >>> few_groups(3, dict(zip(names, (0.0, 0.5, 2.0))))
        ''
    """
    missing = report.get("train/groups_missing", 0.0)
    if not missing:
        return ""
    kept, calls = report["train/groups_kept"], report["train/num_gen_batches"]
    return (
        f"in step {step} the batch lacks {missing:.0f} of data.train_batch_size groups: with the last call that "
        f"algorithm.filter_groups.max_num_gen_batches allows ({calls:.0f}), {kept:.1%} of the groups have different "
        "rewards. Rewards and tok/s are those of the groups kept; take problems that the model gets right now and "
        "then, or raise rollout.n"
    )


def without_gradient(step: int, report: Report) -> str:
    """Returns a sentence about a step whose gradient is 0; or nothing.

    It is none about a step of which ``without_advantages`` tells.

    Example:
        >>> without_gradient(3, {"actor/grad_norm": 0.0, "rollout/rows_dropped/learn": 256})
        'the gradient of step 3 is 0, so the model learns nothing from it: learn left out 256 rows of samples'
        >>> without_gradient(3, {"train/grad_norm": 0.0}), without_gradient(3, {"actor/grad_norm": 0.5})
        ('the gradient of step 3 is 0, so the model learns nothing from it', '')
    """
    norms = (report.get(f"{family}/grad_norm") for family in ("actor", "train"))
    if 0.0 not in norms or without_advantages(step, report):
        return ""
    dropped = report.get("rollout/rows_dropped/learn", 0)
    why = f": learn left out {dropped:.0f} rows of samples" if dropped else ""
    return f"the gradient of step {step} is 0, so the model learns nothing from it{why}"


# KL(engine || trainer) per token, in nats. For the same weights in bf16 it is about 0.002 (SmolLM2 on an H200).
GAP = 0.02


def wide_gap(step: int, report: Report) -> str:
    """Returns a sentence about a step whose samples came from another distribution than the trainer's; or nothing.

    Example:
        >>> wide_gap(3, {"rollout_corr/k3_kl": 0.5})[:76]
        "in step 3 the engine's log-probs differ from the trainer's: KL 0.5 per token"
        >>> wide_gap(3, {"rollout_corr/k3_kl": 1e-4})
        ''
    """
    kl = report.get("rollout_corr/k3_kl", 0.0)
    if kl <= GAP:
        return ""
    return (
        f"in step {step} the engine's log-probs differ from the trainer's: KL {kl:.2g} per token. Likely causes: "
        "rollout.dtype differs from actor.dtype; the model's kernels round differently in the engine; samples are "
        "older than the weights (driver.max_lag); or the engine computes this model otherwise, if a run with "
        "rollout.name=sampler has no such gap. algorithm.rollout_is corrects for the difference"
    )


SETTLED = 0.01  # nats a token


def settled(step: int, report: Report) -> str:
    """Returns a sentence about a policy that hardly tries other answers, although some get more reward; or nothing.

    Example:
        >>> names = ("actor/entropy", "critic/score/mean", "critic/score/max")
        >>> settled(3, dict(zip(names, (0.001, 0.3, 1.0))))[:60]
        "in step 3 the policy's entropy is 0.001 nats a token, and th"
        >>> settled(3, dict(zip(names, (0.001, 0.99, 1.0)))), settled(3, dict(zip(names, (0.5, 0.3, 1.0))))
        ('', '')
    """
    names = ("actor/entropy", "critic/score/mean", "critic/score/max")
    if any(name not in report for name in names):
        return ""
    entropy, mean, most = (report[name] for name in names)
    if entropy >= SETTLED or most - mean <= 0.1 * abs(most):
        return ""
    return (
        f"in step {step} the policy's entropy is {entropy:.2g} nats a token, and the mean reward {mean:.3g} of "
        f"{most:.3g} at most: it hardly tries other answers any more. Look at some (trainer.rollout_data_dir); a "
        "lower actor.optim.lr, algorithm.entropy_coeff or a reward without such a plateau helps"
    )


MOST = 0.5


def cut_off(step: int, report: Report) -> str:
    """Returns a sentence about a step in which most responses or conversations were cut off; or nothing.

    Example:
        >>> cut_off(3, {"response_length/clip_ratio": 0.75})[:64]
        'in step 3 75% of the responses were cut off at data.max_response'
        >>> cut_off(3, {"env/ended/turn_limit": 0.5, "env/ended/length": 0.25})[:56]
        'in step 3 75% of the conversations were cut off: 50% at '
        >>> cut_off(3, {"response_length/clip_ratio": 0.25})
        ''
    """
    turns, length = (report.get(f"env/ended/{reason}") for reason in ("turn_limit", "length"))
    if turns is not None and length is not None:
        if turns + length <= MOST:
            return ""
        return (
            f"in step {step} {turns + length:.0%} of the conversations were cut off: {turns:.0%} at env.max_turns, "
            f"{length:.0%} at env.max_turn_length or data.max_response_length. The environment gives "
            "them 0, and if it gives others less, the policy learns to be cut off. Raise these keys, or look at some "
            "conversations (generations.jsonl, and the files of trainer.rollout_data_dir)"
        )
    share = report.get("response_length/clip_ratio", 0.0)
    if share <= MOST:
        return ""
    return (
        f"in step {step} {share:.0%} of the responses were cut off at data.max_response_length; raise it, or let the "
        "model end earlier"
    )


def held_out_cut_off(report: Mapping[str, float], step: int | None = None) -> str:
    """Returns a sentence about an evaluation in which most responses were cut off, all sources alike; or nothing.

    Example:
        >>> held_out_cut_off({"val-aux/x/response_length/clip_ratio": 1.0, "val-aux/y/z/reward/mean@1": 0.5}, 7)[:68]
        'in the evaluation after step 7 100% of the responses were cut off at'
    """
    limits = {
        "response_length/clip_ratio": "data.max_response_length",
        "env/ended/turn_limit": "env.max_turns",
        "env/ended/length": "env.max_turn_length or data.max_response_length",
    }
    means = dict[str, float]()
    for name in limits:
        shares = [value for key, value in report.items() if key.startswith("val-aux/") and key.endswith(f"/{name}")]
        means |= {name: sum(shares) / len(shares)} if shares else {}
    if sum(means.values()) <= MOST:
        return ""
    what = "responses" if "response_length/clip_ratio" in means else "conversations"
    at = ", ".join(
        f"{share:.0%} of the {what} were cut off at {limits[name]}" for name, share in means.items() if share
    )
    return f"in the evaluation{'' if step is None else f' after step {step}'} {at}; raise the limit"


class Start:
    """The start of a run, from the command to the first step.

    Args:
        began: ``time.monotonic()`` of the command; None if the imports are not known.

    Attributes:
        seconds: of each part of ``PARTS`` that has ended.

    Example:
        >>> start = Start(print)
        >>> with start.part("load"):
        ...     pass
        >>> sorted(start.report())
        ['timing_s/start/load', 'timing_s/start/total']
    """

    def __init__(self, say: Say, began: float | None = None) -> None:
        now = time.monotonic()
        self._say = say
        self._began = now if began is None else began
        self.seconds: dict[str, float] = {} if began is None else {"imports": now - began}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures one part, and says of a long one how long it has taken; parts of one name add up."""
        began = time.monotonic()
        try:
            # A save tells more of itself.
            with contextlib.nullcontext() if name == "save" else waiting(self._say, PARTS[name]):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def report(self) -> Report:
        """Returns the seconds of each part, and of all from the command to now, as metrics."""
        total = time.monotonic() - self._began
        return {f"{PREFIX}{name}": seconds for name, seconds in self.seconds.items()} | {f"{PREFIX}total": total}

    def announce(self) -> None:
        """Says how long the start took and what for, if it took long."""
        total = time.monotonic() - self._began
        if total >= LONG_PART:
            named = ", ".join(f"{PARTS[name]} {seconds:.1f}" for name, seconds in self.seconds.items())
            self._say(f"started in {total:.1f} s: {named}")


# Each is said once in a run.
NOTICES = (equal_rewards, few_groups, without_advantages, without_gradient, wide_gap, cut_off, settled)
