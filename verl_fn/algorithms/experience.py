"""The parts that algorithms share: gathering experience, scoring and annotating it, updating one role, and metrics.

In a run with exact log-probs, a step also checks that what the trainer computes equals what the engine has sampled.
Metrics have verl's names.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import attrs
import torch

from verl_fn import steps
from verl_fn.backends.protocol import Ref, TrainBackend
from verl_fn.config.algorithms import Aggregation, PolicyOptimization
from verl_fn.data.files import encode_prompts, named
from verl_fn.data.images import seen_by, unplaced
from verl_fn.data.tasks import Problem
from verl_fn.errors import UserError
from verl_fn.state import (
    END_REASONS,
    FAILURES,
    Batch,
    Key,
    Max,
    Metric,
    Metrics,
    Min,
    Request,
    RowImages,
    Sample,
    Sampling,
    TokenOutputs,
    Weighted,
    pack,
    requests_for,
)
from verl_fn.steps import AdaptiveKL, FixedKL, Loss
from verl_fn.steps.advantages.columns import groups_of
from verl_fn.steps.aggregate import last_of_rows
from verl_fn.steps.correction import engine_log_probs

from .policy import aggregation, select_tokens, selected_by, whole_conversations
from .workers import AlgorithmError, Clock, Experience, Report, Workers

DIFFERING, LARGEST = "rollout/tokens_differing", "rollout/log_prob_diff_max"


def publish(w: Workers, actor: Any, step: int) -> int:
    """Gives the actor's weights to the rollout engine, unless it has them, and returns their version.

    The version is ``w.version``, and by default ``step``.
    """
    version = step if w.version is None else w.version
    if w.rollout.version != version:
        w.get(w.rollout.publish(version, w.trainers["actor"].weights(actor.params)))
    return version


def sample_and_score(
    actor: Any, problems: Sequence[Problem], w: Workers, key: Key, step: int, *, score: bool = True
) -> Experience:
    """Draws responses to ``problems`` from the actor's weights and scores them.

    Args:
        key: of this step; draws are a function of it and of the problems' ids.
        step: the step that learns; see ``publish``.
        score: ask the workers' reward; otherwise ``learn`` scores the rows, as with a reward model.

    Example:
        >>> from verl_fn import Local, Reward, Sampler, Sampling, new_model
        >>> from verl_fn.backends.hf.new_model import char_tokenizer
        >>> from verl_fn.data.tasks import Problem
        >>> from verl_fn.rewards import by_rules
        >>> from verl_fn.steps import adamw
        >>> import tempfile
        >>> folder, tokenizer = new_model(tempfile.mkdtemp(), chars="ab"), char_tokenizer("ab")
        >>> actor = Local(folder, adamw(1e-3))
        >>> parts = {"reward": Reward(by_rules, tokenizer), "tokenizer": tokenizer}
        >>> w = Workers({"actor": actor}, Sampler(folder), sampling=Sampling(max_tokens=4, n=3), **parts)
        >>> problems, state = [Problem("ab", "ba", id=0, data_source="reverse")], actor.init(Key.from_seed(0))
        >>> experience = sample_and_score(state, problems, w, Key.from_seed(1), step=0)
        >>> len(experience.batch), experience.problems, "score" in experience.batch
        (3, 1, True)
    """
    clock = Clock(w.get)
    version = clock.run("update_weights", publish, w, actor, step)
    batch = respond(problems, w, key.fold_in("rollout"), version, clock, score=score)
    return Experience(batch, len(problems), clock.seconds)


def draw(state: Any, problems: Sequence[Problem], w: Workers, *, score: bool = True) -> Experience:
    """Draws the experience of a step: responses to each problem, with their scores if these are asked for."""
    return sample_and_score(state.actor, problems, w, state.key.fold_in(state.step), state.step, score=score)


def respond(
    problems: Sequence[Problem],
    w: Workers,
    key: Key,
    version: int,
    clock: Clock,
    *,
    score: bool = True,
) -> Batch:
    """Returns the batch of the engine's responses to ``problems``.

    Conversations whose environment failed are left out.

    Args:
        key: draws are a function of it and of the problems' ids.
        version: of the engine's weights.
        clock: measures the time of ``gen`` and ``reward``.
        score: ask the workers' reward.
    """
    requests = requests_of(problems, w, w.sampling, key)
    samples = clock.run("gen", w.rollout.generate, requests, version=version)
    return batch_of(samples, problems, w, clock, score=score)


def batch_of(
    samples: Sequence[Sample], problems: Sequence[Problem], w: Workers, clock: Clock, *, score: bool = True
) -> Batch:
    """Returns the batch of an engine's samples as ``respond`` does."""
    batch = pack(samples)
    if score:
        batch = clock.run("reward", w.reward, batch, problems)
    return without_failures(batch) if w.converses else batch


def requests_of(problems: Sequence[Problem], w: Workers, sampling: Sampling, key: Key) -> list[Request]:
    """Returns the requests for responses to problems, or for conversations where there is an environment."""
    if w.converses:
        return conversations_of(problems, w.tokenizer, sampling, key)
    images: list[RowImages | None] = []
    prompts = encode_prompts(problems, w.tokenizer, w.max_prompt_length, w.truncation, images)
    return requests_for(prompts, sampling, key, [problem.id for problem in problems], images)


def conversations_of(problems: Sequence[Problem], tokenizer: Any, sampling: Sampling, key: Key) -> list[Request]:
    """Returns the requests for conversations about problems, each with the problem's images for its first messages.

    Raises:
        DataError: the model cannot read the images of a problem.
    """
    images = []
    for problem in problems:
        with named(problem):
            images.append(unplaced(seen_by(problem, tokenizer)))
    requests = requests_for([()] * len(problems), sampling, key, [problem.id for problem in problems], images)
    fields = ("prompt", "answer", "id", "data_source", "extra_info", "chat_template_kwargs")
    return [
        attrs.evolve(request, problem={name: getattr(problem, name) for name in fields})
        for request, problem in zip(requests, problems, strict=True)
    ]


def without_failures(batch: Batch) -> Batch:
    """Returns the rows of conversations whose environment did not fail, since the others have no reward.

    Example:
        >>> ends = [END_REASONS.index(reason) for reason in ("done", "env_crashed", "length")]
        >>> without_failures(Batch.from_rows([[1], [2], [3]], per_row={"env_end": ends})).tokens.tolist()
        [1, 3]
    """
    failures = torch.tensor([END_REASONS.index(reason) for reason in FAILURES])
    return batch.take((~torch.isin(batch["env_end"], failures)).nonzero()[:, 0])


def annotate(
    batch: Batch,
    state: Any,
    w: Workers,
    clock: Clock,
    *,
    reference: bool,
    critic: bool = False,
    updated: bool = True,
    outputs: tuple[str, ...] = ("logprobs", "entropy"),
) -> Batch:
    """Writes the actor's outputs, and if asked ``ref_log_prob`` and ``values``, into the batch.

    The forward passes of roles on workers of their own overlap. If ``w.exact`` is ``strict``, the engine's log-probs
    are the actor's, and ``update`` checks it, so the actor makes no pass if it gives nothing else that is needed.

    Args:
        state: has ``actor``, and ``critic`` and ``reference`` as asked for; without a reference of its own, the
            actor's frozen base stands for it.
        reference: whether ``ref_log_prob`` is asked for.
        critic: whether ``values`` are asked for.
        updated: whether ``update`` follows.
        outputs: the actor's outputs; ``logprobs`` is written as ``old_log_probs`` and ``entropy`` as ``entropys``.
            With ``w.router_replay``, ``routed_experts`` is written as well, or stays as the engine has given it.
    """
    actor, params = w.trainers["actor"], state.actor.params
    if w.router_replay:
        # A batch that has them already, since its engine recorded them, gets its own back.
        outputs = (*outputs, "routed_experts")
    passes: dict[str, Callable[[], Any]] = {"old_log_prob": lambda: actor.forward(params, batch, outputs)}
    if saves_pass := w.exact == "strict" and updated and set(outputs) <= {"logprobs", "entropy"}:
        del passes["old_log_prob"]
    if reference:
        passes["ref"] = lambda: reference_outputs(batch, state, w)
    if critic:
        passes["values"] = lambda: w.trainers["critic"].forward(state.critic.params, batch, ("values",))
    results = clock.run_all(passes)
    renamed = {"logprobs": "old_log_probs", "entropy": "entropys"}
    names = {
        "old_log_prob": {name: renamed.get(name, name) for name in outputs},
        "ref": {"logprobs": "ref_log_prob"},
        "values": {"values": "values"},
    }
    for phase, output in results.items():
        batch = with_outputs(batch, output, **names[phase])
    if saves_pass:
        log_probs = torch.where(batch["response_mask"] != 0, engine_log_probs(batch), 0.0)
        return batch.with_tokens(old_log_probs=log_probs)
    if w.exact == "strict":
        require_equal(state.actor, batch, steps.exact_gap(batch, batch["old_log_probs"]), w)
    return batch


def with_reference(batch: Batch, state: Any, w: Workers, role: str = "reference") -> Batch:
    """Writes the log-probs of a frozen copy of the actor into a batch, as ``ref_log_prob``.

    With LoRA, the actor's frozen base is that copy.

    Args:
        state: has ``actor`` and a field of the role's name.
        role: the name of a ``Role(trained=False, copy_of="actor")``.

    Example:
        >>> from types import SimpleNamespace
        >>> from verl_fn.steps import adamw
        >>> from verl_fn.testing import Mock, tiny_batch
        >>> backend = Mock(8, adamw(0.01))
        >>> w = Workers({"reference": backend}, None, None, None, None)
        >>> state = SimpleNamespace(actor=None, reference=backend.init(Key.from_seed(0)))
        >>> with_reference(tiny_batch(), state, w)["ref_log_prob"].shape == tiny_batch().tokens.shape
        True
    """
    outputs = w.get(reference_outputs(batch, state, w, role))
    return with_outputs(batch, outputs, logprobs="ref_log_prob")


def reference_outputs(batch: Batch, state: Any, w: Workers, role: str = "reference") -> Ref[TokenOutputs]:
    """Returns the log-probs of a frozen copy of the actor; with LoRA the actor's frozen base is that copy."""
    if not hasattr(state, role):
        raise AlgorithmError(
            f"{type(state).__name__} has no field {role!r}: give the outline a role, {role}: Role(trained=False, "
            'copy_of="actor"), and the algorithm a state with a field for it (docs/your_own.md)'
        )
    if (own := getattr(state, role)) is not None:
        return w.trainers[role].forward(own.params, batch, ("logprobs",))
    # The reference picks its own experts.
    free = batch.without("routed_experts") if w.router_replay else batch
    return w.trainers["actor"].forward(state.actor.params.base, free, ("logprobs",))


def with_outputs(batch: Batch, outputs: TokenOutputs, **names: str) -> Batch:
    """Writes outputs into a batch, each under the given name.

    Example:
        >>> batch = with_outputs(Batch.from_rows([[1]]), TokenOutputs({"values": torch.zeros(1)}), values="values")
        >>> "values" in batch
        True
    """
    return batch.with_tokens(**{new: outputs.by_name[old] for old, new in names.items()})


def kl_in_reward(
    batch: Batch, controller: FixedKL | AdaptiveKL, options: PolicyOptimization
) -> tuple[Batch, FixedKL | AdaptiveKL, dict[str, float]]:
    """Subtracts the KL penalty from the rewards where ``use_kl_in_reward`` asks for it; also the next controller."""
    if not options.use_kl_in_reward:
        return batch, controller, {}
    batch, controller, metrics = steps.apply_kl_in_reward(batch, controller, options.kl_penalty)
    return batch, controller, update_report("actor", [(metrics, {})])


def kl_controller(options: PolicyOptimization) -> FixedKL | AdaptiveKL:
    """Makes the controller that ``kl_ctrl`` asks for."""
    ctrl = options.kl_ctrl
    if ctrl.type == "fixed":
        return FixedKL(ctrl.kl_coef)
    return AdaptiveKL(ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)


def update(
    backend: TrainBackend,
    state: Any,
    batches: Iterable[Batch],
    loss: Loss,
    select: Callable[[Any, Batch, int], Batch] | None = None,
    check: Callable[[Any, Batch, Ref[Metrics]], None] | None = None,
) -> tuple[Any, list[tuple[Ref[Metrics], Ref[Metrics]]]]:
    """Applies one update a batch; also the metrics of each as a pair, of the gradient and of the update.

    Args:
        select: ``(state, batch, number) -> batch``, applied before the update of that number.
        check: ``(state, batch, metrics)``, called before the first update with the metrics of its gradient and of
            ``exactness``.

    Example:
        >>> from verl_fn.steps import adamw, aggregate, cross_entropy
        >>> from verl_fn.testing import Mock, tiny_batch
        >>> backend, batch = Mock(8, adamw(0.01)), aggregate(tiny_batch())
        >>> state, updates = update(backend, backend.init(Key.from_seed(0)), [batch, batch], cross_entropy())
        >>> state.step, update_report("actor", updates)["actor/lr"]
        (2, 0.01)
    """

    def one(state: Any, numbered: tuple[int, Batch]) -> tuple[Any, tuple[Ref[Metrics], Ref[Metrics]]]:
        number, batch = numbered
        if select is not None:
            batch = select(state, batch, number)
        first = check is not None and number == 0
        grads, of_gradient = backend.forward_backward(state, batch, loss + steps.exactness() if first else loss)
        if check is not None and first:
            check(state, batch, of_gradient)
        state, of_update = backend.apply_update(state, grads)
        return state, (of_gradient, of_update)

    return steps.scan(one, state, enumerate(batches))


def one_update(
    state: Any,
    batch: Batch,
    loss: Loss,
    experience: Experience,
    w: Workers,
    clock: Clock | None = None,
    family: str = "train",
) -> tuple[Any, Report]:
    """Takes the step of an algorithm in which the actor has one update; also the step's metrics.

    Args:
        batch: the whole update batch, with its weights.
        clock: has the times of the step's earlier phases, if it has any.
        family: of the update's metrics; fine-tuning has verl's ``train``, and ``train/global_tokens``.
    """
    clock = clock or Clock(w.get, experience.seconds)
    actor, metrics = clock.run("update_actor", update, w.trainers["actor"], state.actor, [batch], loss)
    tokens = float(experience.batch.num_tokens)
    total = "train/global_tokens" if family == "train" else "perf/total_num_tokens"
    report = update_report(family, metrics) | experience.report | {total: tokens}
    return attrs.evolve(state, actor=actor, step=state.step + 1), report | timing_report(clock, tokens)


def selecting(
    backend: TrainBackend, options: PolicyOptimization, w: Workers, key: Key
) -> Callable[[Any, Batch, int], Batch] | None:
    """Returns the function that selects tokens before an update, for ``update``; None if none are selected."""
    if not (needs := selected_by(options)):
        return None

    def selected(state: Any, batch: Batch, number: int) -> Batch:
        outputs = w.get(backend.forward(state.params, batch, needs))
        return select_tokens(batch, outputs, key.fold_in(number), options)

    return selected


def update_batches(
    w: Workers, batch: Batch, problems: int, options: PolicyOptimization, key: Key, loss: Loss
) -> Iterator[Batch]:
    """Yields the minibatches of a batch that answers so many problems, over all epochs, with the loss's weights.

    Problems may have different numbers of rows, so a minibatch has its share of the rows.
    """
    rows = Fraction(len(batch) * min(options.ppo_mini_batch_size, problems), problems)
    rows = max(Fraction(1), rows) if len(batch) else rows
    for part in steps.minibatches(batch, rows, epochs=options.ppo_epochs, shuffle=key if options.shuffle else None):
        part = weighted(part, options, w)
        yield steps.aggregate_rows(part) if "row" in loss.levels else part


def weighted(batch: Batch, options: Aggregation, w: Workers) -> Batch:
    """Writes ``loss_weight`` into a whole update batch, as the options ask for."""
    scale = options.loss_scale_factor or float(w.sampling.max_tokens)
    return steps.aggregate(batch, aggregation(options), loss_scale_factor=scale)


def score_by_model(batch: Batch, state: Any, w: Workers, clock: Clock) -> Batch:
    """Writes the scores of a reward model into a batch that was not scored yet.

    It is a part of ``learn``: the ranks that train would wait for samples that a later step has asked for.

    Args:
        state: the reward model's training state.
        w: the workers, with a trainer of the role ``reward_model``.
    """
    outputs = clock.run("reward", w.trainers["reward_model"].forward, state.params, batch, ("row_values",))
    return with_model_score(batch, outputs)


def with_model_score(batch: Batch, outputs: TokenOutputs) -> Batch:
    """Writes ``score`` and, on the last token of each response, ``token_level_scores`` and ``token_level_rewards``.

    Args:
        batch: rows with ``response_mask``.
        outputs: the reward model's ``row_values``.

    Example:
        >>> import torch
        >>> batch = Batch.from_rows([[5, 6, 2]], {"response_mask": [[0.0, 1.0, 1.0]]})
        >>> with_model_score(batch, TokenOutputs({"row_values": torch.tensor([0.5])}))["token_level_scores"].tolist()
        [0.0, 0.0, 0.5]
    """
    on_last = batch.spread(outputs.row_values) * last_of_rows(batch, batch["response_mask"])
    return batch.with_rows(score=outputs.row_values).with_tokens(
        token_level_scores=on_last, token_level_rewards=on_last
    )


class NotExact(UserError, RuntimeError):
    """With ``rollout.exact = "strict"``, log-probs of trainer and engine differ."""


def require_equal(state: Any, batch: Batch, measured: Metrics, w: Workers) -> None:
    """Raises an error if log-probs differ.

    Args:
        state: of the actor, with the weights that have drawn the tokens.
        measured: the metrics of ``exact_gap``.

    Raises:
        NotExact: they differ; the message names the first module of the model whose results do.
    """
    count = int(measured[DIFFERING].value)
    if count:
        sampled = int((batch["response_mask"] != 0).sum())
        raise NotExact(
            f"rollout.exact is strict, and the log-probs of {count} of {sampled} tokens differ, by up to "
            f"{measured[LARGEST].value:.3g} nats: {_place(state, batch, w)}. Set rollout.exact=audit to go on and "
            "count them; verl-fn bench exact FOLDER compares the two on a model's folder"
        )


def check_of_updates(w: Workers) -> Callable[[Any, Batch, Ref[Metrics]], None] | None:
    """Returns the check of ``experience.update``; None without ``strict``."""
    if w.exact != "strict":
        return None
    return lambda state, batch, measured: require_equal(state, batch, w.get(measured), w)


def _place(state: Any, batch: Batch, w: Workers) -> str:
    """Returns where trainer and engine part, in the first row that differs."""
    from verl_fn.backends.hf.exact import first_parting

    trainer: Any = w.trainers["actor"]
    of_trainer, of_engine = getattr(trainer, "activations", None), getattr(w.rollout, "activations", None)
    outputs: TokenOutputs = w.get(trainer.forward(state.params, batch, ("logprobs",)))
    differs = (outputs.logprobs != engine_log_probs(batch)) & (batch["response_mask"] != 0)
    if not bool(differs.any()):
        return "a forward pass after it gives the engine's, so the trainer does not repeat its results"
    row = int(batch.row_ids[differs][0])
    if of_trainer is None or of_engine is None:
        return f"the first one in row {row}"
    one = batch.take([row])
    parting = first_parting(of_trainer(state.params, one), of_engine(one))
    if parting is None:
        return (
            f"the first one in row {row}, which is equal if it is computed by itself and module by module: a kernel "
            "depends on the other rows of a call, or the engine's fused step differs from its modules"
        )
    return (
        f"they part in {parting.name}, for {parting.tokens} of {parting.compared} tokens of row {row}, by up to "
        f"{parting.largest:.3g}"
    )


def update_report(role: str, updates: Sequence[tuple[Metrics, Metrics]]) -> Report:
    """Returns the mean of every metric over a role's updates; of ``Max`` and ``Min`` the extreme of all updates.

    Args:
        role: the family of metrics without a family of their own, as in ``actor/grad_norm``.
        updates: the metrics of ``forward_backward`` and of ``apply_update`` for each update.

    Example:
        >>> updates = [({"kl": Weighted(value, 1.0), "longest": Max(value)}, {}) for value in (2.0, 4.0)]
        >>> update_report("actor", updates)
        {'actor/kl': 3.0, 'actor/longest': 4.0}
        >>> update_report("actor", [*updates, ({"kl": Weighted(0.0, 0.0)}, {})])["actor/kl"]
        3.0
    """
    by_name: dict[str, list[Metric]] = {}
    for pair in updates:
        for metrics in pair:
            for name, metric in metrics.items():
                if name.startswith("perf/"):
                    name = f"{name}/{role}"
                by_name.setdefault(name if "/" in name else f"{role}/{name}", []).append(metric)
    return {name: _over_updates(of_updates) for name, of_updates in by_name.items()}


def _over_updates(of_updates: Sequence[Metric]) -> float:
    if isinstance(of_updates[0], Max | Min):
        return functools.reduce(operator.add, of_updates).value
    # The mean of an update may be over no token at all.
    counted = [metric for metric in of_updates if not isinstance(metric, Weighted) or float(metric.weight)]
    return sum(metric.value for metric in counted) / len(counted) if counted else math.nan


def batch_report(batch: Batch, *, compares: bool = False, exact: bool = False) -> Report:
    """Returns the metrics of a batch of experience with outputs and advantages; it has ``sample_report``'s too.

    Args:
        compares: whether the advantages compare the rows of a group, so that a row by itself gets none.
        exact: whether to count the log-probs that differ from the engine's.
    """
    whole = whole_conversations(batch)
    mask = batch["response_mask"]
    answered = (whole.sum_rows(mask) > 0).float()
    metrics: Metrics = {}
    if "entropys" in batch:
        metrics["actor/entropy"] = Weighted.of(batch["entropys"], mask)
    metrics |= _spread_of("critic/advantages", batch["advantages"], mask)
    if "returns" in batch:
        metrics |= _spread_of("critic/returns", batch["returns"], mask)
    if "values" in batch:
        metrics |= _spread_of("critic/values", batch["values"], mask)
        metrics["critic/vf_explained_var"] = Weighted(
            explained_variance(batch["values"], batch["returns"], mask), 1.0
        )
    if "reward_baselines" in batch:
        metrics |= _spread_of("critic/baselines", whole["reward_baselines"], answered)
    metrics |= steps.rollout_gap(batch)
    if exact:
        metrics |= steps.exact_gap(batch, batch["old_log_probs"])
    report = sample_report(batch) | {name: metric.value for name, metric in metrics.items()}
    if compares:
        groups = groups_of(whole)
        report["rollout/rows_compared_with_none"] = float((groups.counts & ~groups.compared).sum())
    return report


def sample_report(batch: Batch) -> Report:
    """Returns the metrics of sampled rows: scores, rewards and lengths. A conversation of several rows counts once.

    Fields that the batch lacks have no metrics.
    """
    whole = whole_conversations(batch)
    metrics: Metrics = {}
    every = torch.ones(len(whole))
    answered = every
    if "response_mask" in batch:
        lengths = whole.sum_rows(batch["response_mask"])
        answered = (lengths > 0).float()
        metrics["response/aborted_ratio"] = Weighted.of(lengths == 0, every)
        metrics |= _spread_of("response_length", lengths, every)
        if "token_level_rewards" in batch:
            rewards = torch.where(whole["response_mask"] != 0, whole["token_level_rewards"], 0.0)
            metrics |= _spread_of("critic/rewards", whole.sum_rows(rewards), answered)
    if "finished" in batch:
        metrics["response_length/clip_ratio"] = Weighted.of(whole["finished"] == 0, every)
    if "near_ties" in batch:
        metrics["training/rollout_near_ties"] = Weighted.of(whole["near_ties"], every)
    for family, field, weights in (("critic/score", "score", answered), ("prompt_length", "prompt_length", every)):
        if field in batch:
            metrics |= _spread_of(family, whole[field], weights)
    report = {name: metric.value for name, metric in metrics.items()} | _judged_report(whole, answered)
    return report | {"perf/total_num_tokens": float(batch.num_tokens)}


def _judged_report(whole: Batch, answered: torch.Tensor) -> Report:
    """Returns the means of what rewards have returned beside the score, over the rows that have it.

    If some rows lack a number, it comes with the count of rows that have it.
    """
    report: Report = {}
    names = {name: f"{name}/mean" for name in whole.per_row if name.startswith("reward/")} | {"acc": "training/acc"}
    for name, metric in names.items():
        if name in whole:
            weights = answered * ~whole[name].isnan()
            if count := float(weights.sum()):
                report[metric] = Weighted.of(whole[name], weights).value
            if count < float(answered.sum()):
                report[f"{metric.removesuffix('/mean')}/count"] = count
    return report


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Returns 1 - Var[returns - values] / Var[returns] over the masked tokens, or 0 if the returns do not vary.

    Example:
        >>> explained_variance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]), torch.ones(2))
        1.0
    """
    chosen = mask.bool()
    returns, values = returns[chosen].double(), values[chosen].double()
    # The variance of equal returns is rounding and says nothing of the values.
    if not len(returns) or bool((returns == returns[0]).all()):
        return 0.0
    return float(1.0 - (returns - values).var(correction=0) / returns.var(correction=0))


def _spread_of(family: str, values: torch.Tensor, weights: torch.Tensor) -> Metrics:
    return {
        f"{family}/mean": Weighted.of(values, weights),
        f"{family}/max": Max.of(values, weights),
        f"{family}/min": Min.of(values, weights),
    }


def timing_report(clock: Clock, tokens: float) -> Report:
    """Returns the seconds of each phase and of the whole step, and the step's throughput in tokens per second."""
    step = clock.total()
    report = {f"timing_s/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return report | {"timing_s/step": step, "perf/time_per_step": step, "perf/throughput": tokens / max(step, 1e-9)}
