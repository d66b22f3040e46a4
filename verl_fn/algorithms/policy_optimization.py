"""Policy optimization: PPO with a critic, and group-relative policy optimization and its relatives without one.

PPO is from Schulman et al. 2017 (arXiv 1707.06347), GRPO from Shao et al. 2024 (arXiv 2402.03300).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from verl_fn import steps
from verl_fn.config import ConfigError
from verl_fn.config.algorithms import DAPO, GRPO, PPO, RLOO, FilterGroups, PolicyOptimization, ReMax
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.state import Batch, Key, Node, node
from verl_fn.state.batch import concatenate
from verl_fn.steps import AdaptiveKL, FixedKL, Loss, penalize_overlong, value_clip
from verl_fn.steps.advantages.columns import Groups, groups_of

from .algorithm import Algorithm
from .experience import (
    annotate,
    batch_of,
    batch_report,
    check_of_updates,
    kl_controller,
    kl_in_reward,
    publish,
    requests_of,
    respond,
    score_by_model,
    selecting,
    timing_report,
    update,
    update_batches,
    update_report,
)
from .policy import actor_outputs, by_conversation, corrected, estimator, policy_loss
from .workers import Clock, Experience, Report, Workers


@node
class PolicyState(Node):
    """The state of a run of PPO or a relative; saving it saves everything that a resumed run needs.

    Attributes:
        actor, critic, reference: training states, or handles to them. Only PPO has a critic. ``reference`` is None
            without a KL term, and with LoRA, where the actor's frozen base is the reference.
        kl: the controller of the KL penalty in the reward.
        key: the run's key; each step derives a key of its own from it and ``step``.
        reward_model: the training state of a reward model, or a handle to it; None where others give the reward.
    """

    actor: Any
    critic: Any
    reference: Any
    kl: FixedKL | AdaptiveKL
    key: Key
    step: int
    reward_model: Any = None


def ppo(options: PPO) -> Algorithm[PolicyState]:
    """Makes PPO: a step samples, estimates advantages, and updates critic and actor.

    Example:
        >>> ppo(PPO(lam=0.95, critic_warmup=20)).outline.updates("actor", 256, 100)
        80

    Source:
        Schulman et al. 2017, arXiv 1707.06347.
    """
    return policy_optimization(
        options, estimator(options), critic_loss=value_clip(options.cliprange_value), warmup=options.critic_warmup
    )


def grpo(options: GRPO) -> Algorithm[PolicyState]:
    """Makes GRPO: a step samples groups of responses, compares rewards within each group, and updates the actor.

    Example:
        >>> grpo(GRPO(adv_estimator="rloo")).outline.min_n
        2

    Source:
        Shao et al. 2024, arXiv 2402.03300.
    """
    return policy_optimization(options, estimator(options), outputs=actor_outputs(options))


def rloo(options: RLOO) -> Algorithm[PolicyState]:
    """Makes RLOO: GRPO in which the baseline of a response is the mean reward of the others in its group.

    Example:
        >>> rloo(RLOO()).outline.min_n
        2

    Source:
        Ahmadian et al. 2024, arXiv 2402.14740.
    """
    return policy_optimization(options, corrected(functools.partial(by_conversation, estimate=steps.rloo), options))


def policy_optimization(
    options: PolicyOptimization,
    advantages: Callable[[Batch], Batch],
    sample: Callable[[Any, Sequence[Problem], Workers], Experience] | None = None,
    *,
    outputs: tuple[str, ...] = ("logprobs", "entropy"),
    shape: Callable[[Batch, int], Batch] | None = None,
    critic_loss: Loss | None = None,
    warmup: int = 0,
) -> Algorithm[PolicyState]:
    """Makes an algorithm that updates the actor, and a critic if there is a loss for it.

    Args:
        advantages: the estimator.
        sample: draws the experience of a step; by default as every ``Algorithm`` does.
        outputs: the actor's outputs that the step reads; see ``annotate``.
        shape: changes the rewards of a scored batch, given the longest response allowed; by default they stay.
        warmup: the steps in which only the critic learns.
    """
    loss, outline = policy_loss(options), options.outline

    def init(states: Mapping[str, Any], key: Key) -> PolicyState:
        actor, critic, reference = states["actor"], states.get("critic"), states.get("reference")
        return PolicyState(actor, critic, reference, kl_controller(options), key, 0, states.get("reward_model"))

    def learn(state: PolicyState, experience: Experience, w: Workers) -> tuple[PolicyState, Report]:
        clock, key = Clock(w.get, experience.seconds), state.key.fold_in(state.step)
        batch, warm = experience.batch, state.step >= warmup
        if state.reward_model is not None:
            batch = score_by_model(batch, state.reward_model, w, clock)
        if shape is not None:
            batch = shape(batch, w.sampling.max_tokens)
        asked = {"reference": "reference" in outline.roles, "critic": critic_loss is not None}
        batch = annotate(batch, state, w, clock, **asked, updated=warm, outputs=outputs)
        batch, kl, report = kl_in_reward(batch, state.kl, options)
        batch = clock.run("adv", advantages, batch)
        batches: Any = update_batches(w, batch, experience.problems, options, key.fold_in("minibatches"), loss)
        updates: dict[str, Callable[[], Any]] = {}
        if critic_loss is not None:
            batches = list(batches)  # both roles learn from them
            updates["critic"] = lambda: update(w.trainers["critic"], state.critic, batches, critic_loss)
        if warm:
            select, check = selecting(w.trainers["actor"], options, w, key.fold_in("selection")), check_of_updates(w)
            updates["actor"] = lambda: update(w.trainers["actor"], state.actor, batches, loss, select, check)
        results = clock.run_all({f"update_{role}": run for role, run in updates.items()})
        after = {role: results[f"update_{role}"] for role in updates}
        for role, (_, metrics) in after.items():
            report |= update_report(role, metrics)

        report |= experience.report | batch_report(batch, compares=outline.min_n > 1, exact=w.exact != "off")
        report |= timing_report(clock, report["perf/total_num_tokens"])
        trained = {role: new for role, (new, _) in after.items()}
        return attrs.evolve(state, **trained, kl=kl, step=state.step + 1), report

    given: dict[str, Any] = {} if sample is None else {"sample": sample}
    return Algorithm(init=init, learn=learn, outline=outline, **given)


def remax(options: ReMax) -> Algorithm[PolicyState]:
    """Makes ReMax: a step samples responses, and for each prompt the greedy one, whose reward is the baseline.

    The greedy responses are not learned from; they count as dropped for the reason ``baseline``. Responses to a
    problem whose greedy conversation failed are not learned from either.

    Example:
        >>> remax(ReMax()).outline.min_n
        1

    Source:
        Li et al. 2023, arXiv 2310.10505.
    """
    return policy_optimization(options, corrected(steps.remax, options), sample_with_baseline)


def sample_with_baseline(state: PolicyState, problems: Sequence[Problem], w: Workers) -> Experience:
    """Draws responses to ``problems`` and, with a second request at temperature 0, the greedy one to each."""
    clock, key = Clock(w.get), state.key.fold_in(state.step)
    version = clock.run("update_weights", publish, w, state.actor, state.step)
    likeliest = attrs.evolve(w.sampling, n=1, temperature=0.0)
    requests = {
        "gen": requests_of(problems, w, w.sampling, key.fold_in("rollout")),
        "gen_max": requests_of(problems, w, likeliest, key.fold_in("greedy")),
    }
    generate = functools.partial(w.rollout.generate, version=version)
    samples = clock.run_all({phase: functools.partial(generate, asked) for phase, asked in requests.items()})
    batch, greedy = (batch_of(drawn, problems, w, clock) for drawn in samples.values())
    # A greedy conversation whose environment failed leaves its problem without a baseline.
    rows = torch.isin(batch["group"], greedy["group"]).nonzero()[:, 0]
    if not len(rows):
        raise UserError(
            "remax: no problem has both a greedy and a sampled conversation whose environment did not fail"
        )
    batch = batch.take(rows)
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
            f"there is no greedy response to problem {lacking[0]}, so its responses have no baseline; leave them out"
        )
    values = torch.tensor([baselines[group] for group in groups], dtype=greedy["score"].dtype)
    return batch.with_rows(reward_baselines=values)


class NoSignal(UserError, RuntimeError):
    """Raised for a step in which no group of responses has different rewards, so that there is nothing to learn."""


def dapo(options: DAPO) -> Algorithm[PolicyState]:
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
    return policy_optimization(options, estimator(options), sample, outputs=actor_outputs(options), shape=shape)


def sample_with_signal(
    state: PolicyState, problems: Sequence[Problem], w: Workers, *, options: FilterGroups
) -> Experience:
    """Draws as many groups with different rewards as there are problems, or as many as the limit of calls allows.

    Args:
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
        scored = respond(drawn, w, key, version, clock)
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
    missing = float(len(problems) - groups)
    report = {
        "train/num_gen_batches": float(calls), "train/groups_kept": groups / asked, "train/groups_missing": missing
    }  # fmt: skip
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
