"""ReMax: policy gradients with the reward of the greedy response as baseline (Li et al. 2023, arXiv 2310.10505)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import torch

from verl_fn import steps
from verl_fn.config.algorithms import ReMax
from verl_fn.data.tasks import Problem
from verl_fn.state import Batch

from .algorithm import Algorithm
from .contract import Experience
from .experience import batch_of, publish, requests_of
from .grpo import GRPOState, without_critic
from .policy import corrected
from .workers import Clock, Workers


def remax(options: ReMax) -> Algorithm[GRPOState]:
    """Makes ReMax: a step samples responses, and for each prompt the greedy one, whose reward is the baseline.

    The greedy responses are not learned from; they count as dropped for the reason ``baseline``.

    Example:
        >>> remax(ReMax()).outline.min_n
        1

    Source:
        Li et al. 2023, arXiv 2310.10505.
    """
    return without_critic(options, corrected(steps.remax, options), sample_with_baseline)


def sample_with_baseline(state: GRPOState, problems: Sequence[Problem], w: Workers) -> Experience:
    """Draws responses to ``problems`` and, with a second request at temperature 0, the greedy one to each."""
    clock, key = Clock(w.get), state.key.fold_in(state.step)
    version = clock.run("update_weights", publish, w, state.actor, state.step)
    likeliest = attrs.evolve(w.sampling, n=1, temperature=0.0, top_k=-1, top_p=1.0)
    requests = {
        "gen": requests_of(problems, w, w.sampling, key.fold_in("rollout")),
        "gen_max": requests_of(problems, w, likeliest, key.fold_in("greedy")),
    }
    generate = functools.partial(w.rollout.generate, version=version)
    samples = clock.run_all({phase: functools.partial(generate, asked) for phase, asked in requests.items()})
    batch, greedy = (batch_of(drawn, problems, w, clock) for drawn in samples.values())
    return Experience(with_baselines(batch, greedy), len(problems), clock.seconds, dropped={"baseline": greedy})


def with_baselines(batch: Batch, greedy: Batch) -> Batch:
    """Writes ``reward_baselines``: the score of the greedy response to each row's prompt.

    Args:
        batch: rows with ``group``.
        greedy: a row with ``score`` for each group.

    Raises:
        ValueError: a group has no greedy response.

    Example:
        >>> rows = Batch.from_rows([[1], [2], [3]], per_row={"group": [7, 7, 4]})
        >>> greedy = Batch.from_rows([[1], [2]], per_row={"group": [4, 7], "score": [0.0, 0.5]})
        >>> with_baselines(rows, greedy)["reward_baselines"].tolist()
        [0.5, 0.5, 0.0]
    """
    baselines = dict(zip(greedy["group"].tolist(), greedy["score"].tolist(), strict=True))
    groups = batch["group"].tolist()
    if lacking := [group for group in groups if group not in baselines]:
        raise ValueError(
            f"there is no greedy response to problem {lacking[0]}, so its responses have no baseline: the rollout "
            "engine gave none, or its environment failed"
        )
    values = torch.tensor([baselines[group] for group in groups], dtype=greedy["score"].dtype)
    return batch.with_rows(reward_baselines=values)
