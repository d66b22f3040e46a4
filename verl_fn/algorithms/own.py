"""Algorithms and parts of the user in a run: what they read and return is checked, and metrics are completed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias, cast

import attrs
import torch

from verl_fn import user_files
from verl_fn.backends.hf.outputs import check_needs
from verl_fn.backends.protocol import TrainBackend
from verl_fn.config import ConfigError
from verl_fn.config.algorithms import GRPO, PPO, PolicyOptimization
from verl_fn.config.names import is_reference
from verl_fn.errors import UserError, closest, kind_of, place_of, raised_as
from verl_fn.state import PER_ROW, Batch, DonatedError, TokenOutputs, read_only, tree
from verl_fn.state.batch import MissingField
from verl_fn.state.metrics import Metric
from verl_fn.steps import Loss, LossError
from verl_fn.steps.losses.contract import check_shape

from .algorithm import Algorithm
from .experience import sample_report, timing_report
from .policy import EstimatorError, averages_rows, estimator, own_loss, policy_loss
from .workers import AlgorithmError, Clock, Experience, Report, Workers

ROW = "row_of_experience"
# Fields of the batches of every run, beside response_mask and versions.
TOKEN_FIELDS = (
    "old_log_probs", "rollout_log_probs", "entropys", "token_level_scores", "token_level_rewards", "advantages",
    "returns", "loss_weight",
)  # fmt: skip
ROW_FIELDS = ("score", "acc", "pred", "finished", "temperature", "env_score", "env_acc", "row_weight")
ROW_NUMBERS = ("group", "prompt_length", "conversation", "version", "near_ties", "env_end", "env_turns")
# Fields that only built-in parts ask for, and fields that are not written before the estimator.
OF_BUILT_IN_PARTS = frozenset(("sum_pi_squared", "rollout_is_weights", "reward_baselines", "cov_selected"))
OF_LATER_STEPS = frozenset(("advantages", "returns", "loss_weight", "row_weight"))
# Calls of a training backend that show nothing of what is learned from.
HIDDEN = ("map", "loss_fn")
Pass: TypeAlias = tuple[list[int] | None, int]
"""The rows of a pass that weigh, None if they are not known, and how many of its advantages are not finite."""


def check_fields(options: Any, rewards: Collection[str] | None = None) -> dict[str, str]:
    """Tries a loss and an estimator of the user on a small batch with the fields of a run with these options.

    Numbers of a made-up batch are no reason to refuse one, and neither is an error that is raised in it.

    Args:
        rewards: fields ``reward/NAME`` that the run's reward functions write, of which other answers may get more;
            empty if there are no such functions, and None if that is not known.

    Returns:
        A sentence about each that raises an error of its own, since a batch of the run may raise it too, by its key.

    Raises:
        ConfigError: one of them reads a field that the run's batches lack, writes in place, returns what no loss or
            no estimator returns, or uses a name that exists nowhere; or the loss needs an output that no model gives.
    """
    if not isinstance(options, PolicyOptimization):
        return {}
    roles = options.outline.roles
    written = {"ref_log_prob": "reference" in roles, "values": "critic" in roles}
    lacking = OF_BUILT_IN_PARTS | {name for name, found in written.items() if not found}
    batch = _small_batch(written)
    batch = batch.with_rows(**dict.fromkeys(rewards or (), batch["score"]))
    parts: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    if is_reference(options.policy_loss):
        loss = policy_loss(options)
        with raised_as(ConfigError, f"algorithm.policy_loss: the needs of {options.policy_loss}", ValueError):
            check_needs("lm", loss.needs)
        parts["policy_loss"] = functools.partial(_try_loss, loss, batch)
    if isinstance(options, PPO | GRPO) and is_reference(options.adv_estimator):
        lacking |= OF_LATER_STEPS
        estimate = estimator(options)
        parts["adv_estimator"] = lambda: estimate(batch.without(*OF_LATER_STEPS))
    for name, attempt in parts.items():
        try:
            attempt()
        except MissingField as error:
            # Rewards and environments may write fields that this batch lacks.
            none = rewards is not None and not rewards and error.name.startswith("reward/")
            if none or error.name in lacking or closest(error.name, error.args[1], 0.8):
                raise ConfigError(f"algorithm.{name}: {getattr(options, name)}: {error}") from error
        except LossError as error:
            raise ConfigError(f"algorithm.{name}: {error}") from error
        except EstimatorError:
            raise
        except UserError:  # about the numbers of a made-up batch
            continue
        except Exception as error:  # a function may not suit them
            whose = f"algorithm.{name}: {getattr(options, name)}"
            notes[f"algorithm.{name}"] = _failure(whose, error, batch.num_tokens)
    return notes


def _failure(whose: str, error: Exception, tokens: int) -> str:
    """Returns a sentence about an error that a batch of the run may not raise.

    Raises:
        ConfigError: the function reads an output beside its needs, or a name that exists nowhere.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, TokenOutputs):
        raise ConfigError(f"{whose}: {error}") from error
    what = f"{type(error).__name__}: {error}{user_files.place_of(error, __file__)}"
    # A variable may be unset, or of another kind, for these rows only.
    missing = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType | torch.Tensor | Batch)
    if missing or type(error) is NameError:
        raise ConfigError(f"{whose} fails with {what}") from error
    return (
        f"{whose} fails on a made-up batch of two rows: {what}. The tokens of all rows lie end to end, here {tokens}"
        ", and a field has one axis; if it only needs more rows or other numbers than these, this says nothing"
    )


def hints(options: Any, prompts: int, lag: int) -> Iterator[str]:
    """Yields sentences about options that a loss of the user makes useless.

    Args:
        prompts: the prompts of a step.
        lag: how many steps older the weights may be that have drawn its rows.
    """
    if not isinstance(options, PolicyOptimization) or not is_reference(name := options.policy_loss):
        return
    if options.loss_agg_mode != GRPO().loss_agg_mode and averages_rows(options):
        has = "algorithm.loss_agg_mode has no effect"
        yield f'{has} with algorithm.policy_loss = "{name}", which averages over responses'
    if not lag and options.ppo_epochs * options.minibatches(prompts) == 1 and _reads_ratios(options):
        yield (
            f"a step has one update (algorithm.ppo_mini_batch_size = {options.ppo_mini_batch_size} of {prompts} "
            f"prompts), in which all ratios are 1: if {name} clips them, its clip does nothing"
        )


def _reads_ratios(options: PolicyOptimization) -> bool:
    """Returns whether the user's loss fails on a batch that lacks the log-probs before the update."""
    batch = _small_batch({"ref_log_prob": True, "values": True})
    try:
        _try_loss(own_loss(options), batch, batch.without("old_log_probs"))
    except MissingField as error:
        return error.name == "old_log_probs"
    except Exception:  # the loss may fail on any made-up batch
        return False
    return False


def _try_loss(loss: Loss, made: Batch, batch: Batch | None = None) -> None:
    """Calls each function of a loss with outputs from a made-up batch; raises LossError for what no loss returns.

    Args:
        batch: what the functions get; by default the made-up batch.
    """
    batch = batch or made
    values_of = {name: made["score" if name in PER_ROW else "old_log_probs"] for name in loss.needs}
    outputs = TokenOutputs({name: values.clone() for name, values in values_of.items()})
    for term in loss.terms:
        values, _ = term.values(outputs, batch)
        if "candidate_logprobs" not in term.needs:  # a vector for each token, which is not made up
            check_shape(values, batch, term)


def _small_batch(more: Mapping[str, bool]) -> Batch:
    """Returns two rows with the fields of every run's batches, and each field of ``more`` that is true.

    They have 19 tokens: a size that no function chooses by itself, so that an error with it is about this batch.
    """
    mask = torch.tensor([0.0] * 4 + [1.0] * 7 + [0.0] * 3 + [1.0] * 5)
    per_token = [*TOKEN_FIELDS, *(name for name, found in more.items() if found)]
    batch = Batch.from_rows([[1] * 11, [1] * 8]).with_tokens(**dict.fromkeys(per_token, -0.5 * mask))
    rows = dict.fromkeys(ROW_FIELDS, torch.tensor([1.0, 0.0])) | dict.fromkeys(ROW_NUMBERS, torch.tensor([1, 1]))
    return batch.with_tokens(response_mask=mask, versions=mask.long()).with_rows(**rows)


def in_run(algorithm: Any, name: str) -> Algorithm[Any]:
    """Returns an algorithm of the user as a run executes it.

    Its metrics get what built-in algorithms' metrics have: the family ``actor/`` where they have none, the times of
    the phases, scores and lengths of the samples, and the rows that ``learn`` left out.

    Args:
        algorithm: the value that the user's function returned.
        name: the reference to that function, for errors.

    Raises:
        AlgorithmError: it is no algorithm; in its functions: they return something else than they should.
    """
    if not isinstance(algorithm, Algorithm):
        raise AlgorithmError(f"{name} returns {kind_of(algorithm)}; it must return a verl_fn.algorithms.Algorithm")
    return attrs.evolve(
        algorithm,
        sample=functools.partial(_sample, sample=algorithm.sample),
        learn=functools.partial(_learn, learn=algorithm.learn),
    )


def _sample(state: Any, problems: Any, w: Workers, *, sample: Callable[..., Any]) -> Experience:
    with contextlib.ExitStack() as stack:

        def reward(batch: Any, problems: Any) -> Any:
            scored = w.reward(batch, problems)
            stack.enter_context(_kept(sample, scored))
            return scored

        experience = sample(state, problems, attrs.evolve(w, reward=reward))
    if not isinstance(experience, Experience):
        raise AlgorithmError(
            f"{place_of(sample)} returns {kind_of(experience)}; sample returns a verl_fn.algorithms.Experience"
        )
    return experience


def _kept(function: Callable[..., Any], batch: Any) -> contextlib.AbstractContextManager[None]:
    """Raises an error if the block, a call of the user's function, writes in place into a batch."""
    return (
        read_only(place_of(function), AlgorithmError, batch) if isinstance(batch, Batch) else contextlib.nullcontext()
    )


def _learn(state: Any, experience: Experience, w: Workers, *, learn: Callable[..., Any]) -> tuple[Any, Report]:
    clock = Clock(w.get, experience.seconds)
    passes: list[Pass] = []
    trainers = {role: cast(TrainBackend, _Watched(trainer, passes)) for role, trainer in w.trainers.items()}
    numbered = attrs.evolve(experience, batch=_numbered(experience.batch))
    after: list[Any] = []

    def run() -> Report:
        with _kept(learn, experience.batch):
            returned = learn(state, numbered, attrs.evolve(w, trainers=trainers))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise AlgorithmError(
                f"{place_of(learn)} returns {kind_of(returned)}; learn returns the next state and a report, a dict "
                "of numbers by name"
            )
        after.append(returned[0])
        return _numbers(w.get(returned[1]), learn)

    report = experience.report | clock.run("learn", run)
    if (step := getattr(after[0], "step", None)) != state.step + 1:
        raise AlgorithmError(
            f"{place_of(learn)} returns a state of step {step} after step {state.step}; it must add 1 to step"
        )
    _check_roles(after[0], w, learn)
    _check_leaves(state, after[0], w, learn)
    samples = sample_report(experience.batch) if isinstance(experience.batch, Batch) else {}
    report = samples | timing_report(clock, samples.get("perf/total_num_tokens", 0.0)) | report
    return after[0], report | _left_out(passes, experience.batch, learn)


def _check_roles(after: Any, w: Workers, learn: Callable[..., Any]) -> None:
    """Raises an error if a role's training state is one that an update has taken over.

    Raises:
        AlgorithmError: it was donated, on this process or on its ranks.
    """
    for role in w.trainers:
        try:
            fate = getattr(getattr(after, role, None), "fate", None)  # of a handle; a donated node has no field
        except DonatedError as error:
            fate = str(error)
        if fate:
            raise AlgorithmError(
                f"{place_of(learn)} returns a state whose {role} cannot be used: {fate} The next state has the new "
                f"one: attrs.evolve(state, {role}=..., step=state.step + 1)"
            )


def _check_leaves(before: Any, after: Any, w: Workers, learn: Callable[..., Any]) -> None:
    """Raises an error if a checkpoint of the state could not be restored into the state that ``init`` makes.

    Raises:
        AlgorithmError: the state has other leaves outside its roles than before, or leaves of other kinds.
    """
    old, new = (
        {path: _shape(leaf) for path, leaf in tree.paths(_without_roles(state, w)).items()}
        for state in (before, after)
    )
    changed = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    if changed:
        path = changed[0]
        was, now = old.get(path) or "nothing", new.get(path) or "nothing"
        raise AlgorithmError(
            f"{place_of(learn)} returns a state whose {path} is {now} and was {was}, so no checkpoint of it could be "
            "restored; give every field its final structure in init: a number instead of None, a tensor of full size "
            "instead of a list or dict that grows"
        )


def _without_roles(state: Any, w: Workers) -> Any:
    roles = {f.name for f in attrs.fields(type(state))} & set(w.trainers)
    return attrs.evolve(state, **dict.fromkeys(roles))


def _shape(leaf: Any) -> str:
    """Returns what a restored leaf has in common with the saved one."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype} and shape {tuple(leaf.shape)}"
    number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    return "" if leaf is None else "a number" if number else kind_of(leaf)


def _numbers(report: Any, learn: Callable[..., Any]) -> Report:
    """Returns the report of ``learn`` as numbers, with a family for each name."""
    if not isinstance(report, Mapping):
        raise AlgorithmError(
            f"{place_of(learn)} returns {kind_of(report)} as its report; it is a dict of numbers by name"
        )
    numbers: Report = {}
    for name, value in report.items():
        value = value.value if isinstance(value, Metric) else value
        try:
            numbers[name if "/" in name else f"actor/{name}"] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise AlgorithmError(
                f"{place_of(learn)} reports {kind_of(value)} as {name!r}; a report has one number for each name"
            ) from error
    return numbers


def _numbered(batch: Any) -> Any:
    """Returns a batch whose rows know their numbers."""
    return batch.with_rows(**{ROW: torch.arange(len(batch))}) if isinstance(batch, Batch) else batch


def _left_out(passes: Sequence[Pass], batch: Any, learn: Callable[..., Any]) -> Report:
    """Returns the counts of the rows of a batch that no pass of ``learn`` had, and of their sampled tokens.

    They are empty where there are none, or where ``learn`` computes gradients by other calls or of other rows.

    Raises:
        AlgorithmError: an advantage is not finite.
    """
    if bad := next((bad for _, bad in passes if bad), 0):
        raise AlgorithmError(
            f"{place_of(learn)} learns from advantages that are not finite, on {bad} tokens of a batch; look for "
            "a division by the spread of equal rewards"
        )
    if not isinstance(batch, Batch) or "response_mask" not in batch or any(rows is None for rows, _ in passes):
        return {}
    kept = {row for rows, _ in passes for row in rows or ()}
    left = torch.tensor([row not in kept for row in range(len(batch))], dtype=torch.bool)
    if not left.any():
        return {}
    tokens = int(batch.sum_rows((batch["response_mask"] != 0).float())[left].sum())
    return {"rollout/rows_dropped/learn": int(left.sum()), "rollout/tokens_dropped/learn": tokens}


def _pass(batch: Batch) -> Pass:
    """Returns the numbers of the rows of a pass that weigh, and the count of tokens whose advantage is not finite."""
    rows = batch[ROW].tolist() if ROW in batch.per_row else None
    if rows is not None and "loss_weight" in batch.per_token:
        weighs = (batch.sum_rows(batch["loss_weight"].abs()) != 0).tolist()
        rows = [row for row, one in zip(rows, weighs, strict=True) if one]
    if "advantages" not in batch.per_token or "response_mask" not in batch:
        return rows, 0
    return rows, int((~batch["advantages"].isfinite() & (batch["response_mask"] != 0)).sum())


class _Watched:
    """A training backend that notes which rows it computes gradients of."""

    def __init__(self, inner: TrainBackend, passes: list[Pass]) -> None:
        self._inner, self._passes = inner, passes

    def forward_backward(self, state: Any, batch: Any, loss: Any) -> Any:
        self._passes.append(_pass(batch))
        return self._inner.forward_backward(state, batch, loss)

    def __getattr__(self, name: str) -> Any:
        if name in HIDDEN:
            self._passes.append((None, 0))
        return getattr(self._inner, name)
