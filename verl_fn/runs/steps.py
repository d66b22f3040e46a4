"""The steps of a run: experience is drawn, at once or some steps ahead, and learned from.

Experience is drawn in rounds. A round begins when at most the experience of the next step waits: the engines get the
weights of that step, and are asked for the experience of the ``max_lag`` steps after it. So the version that draws
experience depends on the number of its step alone, never on how long anything takes, and no engine gets weights while
it draws.

With updates in flight, every step publishes its weights and asks for the experience of the step ``max_lag`` steps
later, while engines draw what was asked for before. Which token is the first of the new weights depends on time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from verl_fn.algorithms import Algorithm, Clock, Experience, Report, Workers
from verl_fn.algorithms.experience import publish
from verl_fn.algorithms.workers import get_here
from verl_fn.config import Plan
from verl_fn.data.tasks import Problem, Source
from verl_fn.driver import ranks
from verl_fn.state import Key, pack

from .ledger import before_update, counts_of, ledger, without_failures
from .recorder import Drawn, Waiting, ask, draw
from .state import RunState

RANKS = "perf/ranks"
ROWS_WAITING = "rollout/rows_waiting"
NOT_RETURNED = "rollout/rows_dropped/engine"


@attrs.frozen
class Pace:
    """How many problems a step takes, and how far sampling runs ahead of learning.

    Attributes:
        batch_size: the problems of a step.
        steps: the steps of the whole run; nothing is drawn for later ones.
        max_lag: the maximum staleness of a sample, in steps: weights that learn minus weights that drew; with
            0, each step samples and then learns.
        in_flight: whether engines get weights while they draw.
    """

    batch_size: int
    steps: int
    max_lag: int = 0
    in_flight: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Pace:
        """Returns the pace that a plan asks for."""
        return cls(
            plan.data.train_batch_size,
            plan.trainer.total_training_steps,
            plan.driver.max_lag,
            plan.rollout.in_flight_weight_updates,
        )


def advance(
    algorithm: Algorithm[Any], state: RunState, source: Source, w: Workers, pace: Pace
) -> tuple[RunState, Report, Drawn]:
    """Takes one step: learns from the experience that has waited longest, after asking for more if it is time.

    Over Ray, the engines draw what was asked for while the training ranks learn.

    Returns:
        The next state, the step's metrics, and the experience that the step learned from.
    """
    clock = Clock(w.get)
    first, *waiting = _asked(algorithm, state, source, w, pace, clock)
    drawn: Drawn = clock.run("wait_prev_gen", get_here, first.drawn) if pace.max_lag else w.get(first.drawn)
    experience = drawn.experience
    if pace.max_lag:
        experience = attrs.evolve(experience, seconds=clock.seconds)
    after, report = algorithm.learn(state.algorithm, experience, w)
    report |= rows_of(drawn, waiting, state.step, w)
    for kind in ("rows", "tokens"):
        # What learn itself has left out reached it, but was not learned from.
        if (learned := f"rollout/{kind}_learned") in report:
            report[learned] -= report.get(f"rollout/{kind}_dropped/learn", 0)
    if pace.in_flight:
        report |= before_update(experience.batch)
    # The config does not hold torchrun's number of processes, and a replay with another number rounds differently.
    size = ranks.torchrun_size()
    report |= {RANKS: size} if size > 1 else {}
    return RunState(after, state.cursor + drawn.problems, tuple(waiting)), report, drawn


def _asked(
    algorithm: Algorithm[Any], state: RunState, source: Source, w: Workers, pace: Pace, clock: Clock
) -> tuple[Waiting, ...]:
    """Returns the experience that waits, with that of a new round if one is due."""
    step, waiting = state.step, state.waiting
    wanted = range(step + len(waiting), min(step + pace.max_lag + 1, pace.steps))
    if not wanted or (len(waiting) > 1 and not pace.in_flight):
        return waiting
    if pace.max_lag:
        if not pace.in_flight:
            clock.run("wait_prev_gen", get_here, [one.drawn for one in waiting])
        clock.run("update_weights", publish, w, state.role("actor"), step)
        w = attrs.evolve(w, version=step)
    key, start = state.key.fold_in("data"), state.cursor + sum(one.problems for one in waiting)
    for number in wanted:
        more = _following(source, key, start)
        one = _ask(algorithm, state, more(pace.batch_size), attrs.evolve(w, more=more), number, pace.max_lag > 0)
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


def _ask(
    algorithm: Algorithm[Any], state: RunState, problems: Sequence[Problem], w: Workers, step: int, ahead: bool
) -> Waiting:
    """Asks for the experience of a step, with the weights of ``state``.

    Args:
        algorithm, state, problems, w: as for ``Algorithm.sample``.
        step: the step that will learn from it.
        ahead: return when the engines draw, instead of waiting for the experience.
    """
    of_step = attrs.evolve(state.algorithm, step=step) if step != state.step else state.algorithm

    def sample(w: Workers) -> Experience:
        return algorithm.sample(of_step, problems, w)

    if ahead:
        return ask(sample, len(problems), w)
    drawn = draw(sample, len(problems), w)
    return Waiting(drawn.problems, drawn.asked, drawn)


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
