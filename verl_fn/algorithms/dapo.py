"""DAPO: GRPO on groups whose rewards differ, with a penalty on long responses (Yu et al. 2025, arXiv 2503.14476)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from verl_fn.config import ConfigError
from verl_fn.config.algorithms import DAPO, FilterGroups
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.state import Batch
from verl_fn.state.batch import concatenate
from verl_fn.steps import penalize_overlong
from verl_fn.steps.advantages.rows import Groups, groups_of

from .algorithm import Algorithm
from .contract import Experience
from .experience import publish, respond
from .grpo import GRPOState, without_critic
from .policy import actor_outputs, estimator
from .workers import Clock, Workers


class NoSignal(UserError, RuntimeError):
    """Raised for a step in which no group of responses has different rewards, so that there is nothing to learn."""


def dapo(options: DAPO) -> Algorithm[GRPOState]:
    """Makes DAPO: GRPO with a wider upper clip range, dynamic sampling, and a penalty on overlong responses.

    In dynamic sampling, a group whose responses all have the same reward is dropped, for the reason
    ``equal_rewards``, and a new problem takes its place.

    Example:
        >>> dapo(DAPO()).outline.min_n
        2

    Source:
        Yu et al. 2025, arXiv 2503.14476.
    """
    groups, buffer = options.filter_groups, options.overlong_buffer
    sample = functools.partial(sample_with_signal, options=groups) if groups.enable else None
    shape = None
    if buffer.len:
        shape = functools.partial(penalize_overlong, buffer=buffer.len, factor=buffer.penalty_factor)
    return without_critic(options, estimator(options), sample, outputs=actor_outputs(options), shape=shape)


def sample_with_signal(
    state: GRPOState, problems: Sequence[Problem], w: Workers, *, options: FilterGroups
) -> Experience:
    """Draws as many groups with different rewards as there are problems, or as many as the limit of calls allows.

    Args:
        state: the algorithm's state.
        problems: the step's training problems, of which some may be replaced.
        w: the workers; ``w.more`` gives the problems that take their places.
        options: what is compared, and the limit.

    Raises:
        NoSignal: the limit is reached without any such group.
    """
    clock, key, step = Clock(w.get), state.key.fold_in(state.step).fold_in("rollout"), state.step
    version = clock.run("update_weights", publish, w, state.actor, step)
    kept: list[Batch] = []
    dropped: list[Batch] = []
    groups = asked = calls = 0
    while groups < len(problems) and calls < options.max_num_gen_batches:
        drawn = problems if calls == 0 else w.more(len(problems) - groups)
        scored = respond(drawn, w.sampling, w, key, version, clock)
        calls, asked = calls + 1, asked + len(drawn)
        differing, equal, count = split_by_signal(scored, options.metric)
        kept, dropped, groups = [*kept, differing], [*dropped, equal], groups + count
    if not groups:
        raise NoSignal(
            f"step {step + 1}: in each of {asked} groups of responses, in {calls} calls for samples, all have the "
            f"same {options.metric}, so there is nothing to learn; take problems that the model gets right now and "
            "then, raise rollout.n or algorithm.filter_groups.max_num_gen_batches, or give partial credit in the "
            "reward"
        )
    report = {"train/num_gen_batches": float(calls), "train/groups_kept": groups / asked}
    return Experience(joined(*kept), groups, clock.seconds, report, {"equal_rewards": joined(*dropped)})


def split_by_signal(batch: Batch, metric: str = "score") -> tuple[Batch, Batch, int]:
    """Splits a batch into the groups whose rows differ in ``metric`` and all others; also the number of the former.

    Rows without a response token, and rows that lack ``metric``, have no vote.

    Args:
        batch: rows with ``group``, ``response_mask`` and ``metric``.
        metric: ``score`` or ``acc``.

    Raises:
        ConfigError: the reward gives no ``acc``.

    Example:
        >>> fields = {"group": [4, 4, 9, 9], "score": [0.0, 1.0, 0.5, 0.5]}
        >>> batch = Batch.from_rows([[1], [2], [3], [4]], {"response_mask": [[1.0]] * 4}, fields)
        >>> different, equal, groups = split_by_signal(batch)
        >>> different.tokens.tolist(), equal.tokens.tolist(), groups
        ([1, 2], [3, 4], 1)
    """
    if metric not in batch:
        raise ConfigError(
            f"algorithm.filter_groups.metric is {metric}, which the reward functions do not return; return it "
            '({"score": ..., "acc": ...}), or set algorithm.filter_groups.metric=score'
        )
    groups, values = groups_of(batch), batch[metric]
    groups = Groups(groups.of, groups.counts & ~values.isnan())
    differs = -groups.max(-values) < groups.max(values)
    return batch.take(differs), batch.take(~differs), len(groups.of[differs].unique())


def joined(*batches: Batch) -> Batch:
    """Returns the rows of all batches; a batch without rows need not have the fields of the others.

    Numbers that reward functions returned for some of the batches only are missing in the others: nan.

    Example:
        >>> some, other = Batch.from_rows([[1]], per_row={"reward/length": [3.0]}), Batch.from_rows([[2], [3]])
        >>> joined(some, other)["reward/length"].tolist()
        [3.0, nan, nan]
    """
    with_rows = [batch for batch in batches if len(batch)]
    names = {name for batch in with_rows for name in batch.per_row if name == "acc" or name.startswith("reward/")}
    full = [
        batch.with_rows(**{name: torch.full((len(batch),), torch.nan) for name in names if name not in batch})
        for batch in with_rows
    ]
    return concatenate(full) if full else batches[0]
