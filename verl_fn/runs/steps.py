"""The steps of a run: experience is drawn, at once or some steps ahead, and learned from.

Experience is drawn in rounds. A round begins when at most the experience of the next step waits: the engines get the
weights of that step, and are asked for the experience of the ``max_lag`` steps after it. So the version that draws
experience depends on the number of its step alone, never on how long anything takes, and no engine gets weights while
it draws.

With updates in flight, every step publishes its weights and asks for the experience of the step ``max_lag`` steps
later, while engines draw what was asked for before. Which token is the first of the new weights depends on time.

A ledger tells what becomes of the rows that a step asks the rollout engine for: each is learned from, or dropped for
a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from verl_fn.algorithms import Algorithm, Clock, Report, Workers
from verl_fn.algorithms.experience import publish
from verl_fn.algorithms.workers import get_here
from verl_fn.config import Plan
from verl_fn.data.tasks import Problem, Source
from verl_fn.driver import ranks
from verl_fn.state import END_REASONS, FAILURES, Batch, Key, conversations, pack

from .recorder import Drawn, Waiting, ask
from .state import RunState

RANKS = "perf/ranks"
ROWS_WAITING = "rollout/rows_waiting"
NOT_RETURNED = "rollout/rows_dropped/engine"


def advance(
    algorithm: Algorithm[Any], state: RunState, source: Source, w: Workers, plan: Plan
) -> tuple[RunState, Report, Drawn]:
    """Takes one step: learns from the experience that has waited longest, after asking for more if it is time.

    Over Ray, the engines draw what was asked for while the training ranks learn.

    Returns:
        The next state, the step's metrics, and the experience that the step learned from.
    """
    clock = Clock(w.get)
    first, *waiting = _asked(algorithm, state, source, w, plan, clock)
    drawn: Drawn = clock.run("wait_prev_gen", get_here, first.drawn) if plan.driver.max_lag else w.get(first.drawn)
    experience = drawn.experience
    if plan.driver.max_lag:
        experience = attrs.evolve(experience, seconds=clock.seconds)
    after, report = algorithm.learn(state.algorithm, experience, w)
    report |= rows_of(drawn, waiting, state.step, w)
    for kind in ("rows", "tokens"):
        # What learn itself has left out reached it, but was not learned from.
        if (learned := f"rollout/{kind}_learned") in report:
            report[learned] -= report.get(f"rollout/{kind}_dropped/learn", 0)
    if plan.rollout.in_flight_weight_updates:
        report |= before_update(experience.batch)
    # The config does not hold torchrun's number of processes, and a replay with another number rounds differently.
    size = ranks.torchrun_size()
    report |= {RANKS: size} if size > 1 else {}
    return RunState(after, state.cursor + drawn.problems, tuple(waiting)), report, drawn


def _asked(
    algorithm: Algorithm[Any], state: RunState, source: Source, w: Workers, plan: Plan, clock: Clock
) -> tuple[Waiting, ...]:
    """Returns the experience that waits, with a new round's if one is due."""
    step, waiting = state.step, state.waiting
    max_lag, in_flight = plan.driver.max_lag, plan.rollout.in_flight_weight_updates
    wanted = range(step + len(waiting), min(step + max_lag + 1, plan.trainer.total_training_steps))
    if not wanted or (len(waiting) > 1 and not in_flight):
        return waiting
    if max_lag:
        if not in_flight:
            clock.run("wait_prev_gen", get_here, [one.drawn for one in waiting])
        clock.run("update_weights", publish, w, state.role("actor"), step)
        w = attrs.evolve(w, version=step)
    key, start = state.key.fold_in("data"), state.cursor + sum(one.problems for one in waiting)
    for number in wanted:
        more = _following(source, key, start)
        problems = more(plan.data.train_batch_size)
        of_step = attrs.evolve(state.algorithm, step=number) if number != step else state.algorithm
        sample = partial(algorithm.sample, of_step, problems)
        one = ask(sample, problems, attrs.evolve(w, more=more), ahead=max_lag > 0)
        start += one.problems
        waiting += (one,)
    return waiting


def _following(source: Source, key: Key, start: int) -> Callable[[int], Sequence[Problem]]:
    """Returns a function that gives the next problems of a stream with each call."""

    def more(count: int) -> Sequence[Problem]:
        nonlocal start
        problems = source.train(key, start, count)
        start += len(problems)
        return problems

    return more


def rows_of(drawn: Drawn, waiting: Sequence[Waiting], step: int, w: Workers) -> Report:
    """Returns the counts of rows that were asked for, and what became of them; empty where nothing was sampled."""
    if not drawn.samples:
        return {}
    dropped = {reason: counts_of(rest) for reason, rest in drawn.experience.dropped.items()}

    def report_of(returned: Sequence[Counter[str]]) -> Report:
        return ledger(returned, drawn.experience.batch, step, drawn.asked, dropped)

    scored = [counts_of(batch) for batch in drawn.scored]
    report = report_of(scored) if scored else {}
    if not scored or report.get(NOT_RETURNED):
        # Batches with scores exist already. Where rows lack, the samples tell the engine's from the reward's.
        returned = [counts_of(pack(samples)) for samples in w.get(drawn.samples)]
        if len(scored) == len(returned) and (left_out := without_failures(returned) - without_failures(scored)):
            dropped["reward"] = dropped.get("reward", Counter()) + left_out
        report = report_of(returned)
    return report | {"rollout/rows_asked": drawn.asked, ROWS_WAITING: sum(other.asked for other in waiting)}


def counts_of(batch: Batch) -> Counter[str]:
    """Returns the numbers of rows and of sampled tokens; with an environment, also of conversations.

    Example:
        >>> sorted(counts_of(Batch.from_rows([[1, 2], [3]], {"response_mask": [[0.0, 1.0], [1.0]]})).items())
        [('rows', 2), ('tokens', 2)]
    """
    mask = batch["response_mask"].bool()
    counts = Counter(rows=len(batch), tokens=int(mask.sum()))
    if "conversation" in batch:
        last = batch.take(conversations(batch)[1])
        counts["conversations"] = len(last)
        counts["turns"] = int(last["env_turns"].sum())
        for number, reason in enumerate(END_REASONS):
            counts[f"ended/{reason}"] = int((last["env_end"] == number).sum())
        for reason in FAILURES:
            failed = batch["env_end"] == END_REASONS.index(reason)
            counts[f"rows/{reason}"] = int(failed.sum())
            counts[f"tokens/{reason}"] = int((mask & batch.spread(failed.float()).bool()).sum())
    return counts


def without_failures(counts: Sequence[Counter[str]]) -> Counter[str]:
    """Returns the numbers of rows and of sampled tokens without the conversations whose environment failed.

    Example:
        >>> without_failures([Counter({"rows": 3, "tokens": 9, "rows/env_crashed": 1, "tokens/env_crashed": 2})])
        Counter({'tokens': 7, 'rows': 2})
    """
    whole: Counter[str] = sum(counts, Counter())
    return Counter({k: whole[k] - sum(whole[f"{k}/{reason}"] for reason in FAILURES) for k in ("rows", "tokens")})


def ledger(
    returned: Sequence[Counter[str]],
    learned: Batch,
    step: int,
    asked: int,
    dropped: Mapping[str, Counter[str]] | None = None,
) -> Report:
    """Compares the rows that engine and reward returned with the rows that a step learns from.

    Args:
        returned: the counts of the rows that each call returned.
        learned: the rows that the step learns from.
        step: the version of the weights that learn.
        asked: how many rows the engine was asked for, or conversations.
        dropped: the counts of the rows that the algorithm left out, by reason.

    Returns:
        Rows and sampled tokens that were learned from or dropped, and by how many steps the weights that drew the
        tokens are older than the weights that learn; empty if the step learns from other data than rows of samples.

    Example:
        >>> batch = Batch.from_rows([[5, 6, 7]], {"response_mask": [[0.0, 1.0, 1.0]], "versions": [[-1, 3, 4]]})
        >>> report = ledger([counts_of(batch)], batch, step=4, asked=2)
        >>> report["rollout/rows_dropped/engine"], report["training/rollout_lag/mean"]
        (1, 0.5)
    """
    if not isinstance(learned, Batch) or "versions" not in learned:
        # An algorithm of the user may learn from other data.
        return {}
    whole, used, dropped = sum(returned, Counter()), counts_of(learned), dict(dropped or {})
    rest = whole - used
    for reason in FAILURES if "conversations" in whole else ():
        # Of failed environments' rows, an algorithm of the user may learn from some.
        dropped[reason] = Counter({kind: rest[f"{kind}/{reason}"] for kind in ("rows", "tokens")})
    named = sum(dropped.values(), Counter())
    split = whole["rows"] - whole["conversations"] if "conversations" in whole else 0
    report: Report = {NOT_RETURNED: asked - (whole["rows"] - split)}
    for kind in ("rows", "tokens"):
        report[f"rollout/{kind}_learned"] = used[kind]
        report[f"rollout/{kind}_dropped/algorithm"] = whole[kind] - used[kind] - named[kind]
        report |= {f"rollout/{kind}_dropped/{name}": counts[kind] for name, counts in dropped.items()}
    if "conversations" in whole:
        talks = max(1, whole["conversations"])
        report |= {"rollout/rows_split": split, "env/turns/mean": whole["turns"] / talks}
        report |= {f"env/ended/{reason}": whole[f"ended/{reason}"] / talks for reason in END_REASONS}
    if used["tokens"]:
        lags = (step - learned["versions"])[learned["response_mask"].bool()].double()
        lag = {"mean": lags.mean(), "min": lags.min(), "max": lags.max()}
        report |= {f"training/rollout_lag/{name}": float(value) for name, value in lag.items()}
    return report


def before_update(learned: Batch) -> Report:
    """Returns the share of sampled tokens that are of older weights than the last one of their row.

    Example:
        >>> fields = {"response_mask": [[0.0, 1.0, 1.0], [1.0]], "versions": [[-1, 3, 4], [3]]}
        >>> before_update(Batch.from_rows([[5, 6, 7], [8]], fields))
        {'training/rollout_before_update': 0.3333333333333333}
    """
    if not isinstance(learned, Batch) or "versions" not in learned:
        return {}
    rows = zip(learned.rows("versions"), learned.rows("response_mask"), strict=True)
    drawn = [versions[mask.bool()] for versions, mask in rows]
    older = sum(int((versions < versions[-1]).sum()) for versions in drawn if len(versions))
    return {"training/rollout_before_update": older / max(1, sum(map(len, drawn)))}
