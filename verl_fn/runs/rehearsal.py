"""One step of the user's own algorithm on mocks, before any model is loaded: ``verl-fn train ... --check``.

The step has problems of the run's data, samples, rewards, gradients and updates. Models are tables over a few tokens,
and responses and rewards are drawn at random, so its numbers mean nothing. It shows whether the functions of the
algorithm get and return what they should.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import torch

from verl_fn import build, user_files
from verl_fn.algorithms import Workers
from verl_fn.algorithms.experience import with_model_score
from verl_fn.backends.mock import Mock, MockRollout, Response
from verl_fn.backends.mock.rollout import Turn
from verl_fn.config import Plan
from verl_fn.config.names import is_reference
from verl_fn.config.plan import RolePlan
from verl_fn.data.tasks import Source
from verl_fn.errors import UserError
from verl_fn.state import Batch, Key, Metrics, Params, TokenOutputs, TrainState
from verl_fn.steps import Loss

from .state import algorithm_of

# Tokens of the tables, of a response at most, and problems of the step.
TOKENS, LONGEST, PROBLEMS = 16, 8, 4
# Outputs that only models have.
OF_MODELS = ("candidate_logprobs", "routed_experts")


class Folded(Mock):
    """A mock for the tokens of any vocabulary: it takes a token for the remainder of its id."""

    def forward(self, params: Params, batch: Batch, needs: Any = ("logprobs",)) -> TokenOutputs:
        """Returns outputs of the table; see ``Mock``."""
        return super().forward(params, _folded(batch), needs)

    def forward_backward(self, state: TrainState, batch: Batch, loss: Loss) -> tuple[Any, Metrics]:
        """Returns gradients and metrics of the table; see ``Mock``."""
        return super().forward_backward(state, _folded(batch), loss)


def _folded(batch: Batch) -> Batch:
    return attrs.evolve(batch, tokens=batch.tokens % TOKENS)


def rehearse(plan: Plan, source: Source) -> str | None:
    """Takes a step of an algorithm of the user on mocks.

    Args:
        plan: the plan. Steps of built-in algorithms, with environments, or with adapters whose base is the reference,
            are not taken.
        source: its problems.

    Returns:
        A sentence about what went wrong, or nothing; None if no step was taken.
    """
    if not is_reference(plan.algorithm) or plan.env.name or plan.copies or plan.rollout.exact != "off":
        return None
    key = Key.from_seed(plan.trainer.seed)
    trainers: dict[str, Any] = {
        name: Folded(TOKENS, build.optimizer(role.optim if role.trained else None, role.total_updates))
        for name, role in plan.roles.items()
    }

    def answer(turn: Turn) -> Response:
        dice = random.Random(turn.key.seed())
        tokens = [dice.randrange(TOKENS) for _ in range(dice.randint(1, LONGEST))]
        return Response(tokens, [-1.0] * len(tokens))

    def score(batch: Batch, problems: Any) -> Batch:
        return with_model_score(
            batch, TokenOutputs({"row_values": torch.rand(len(batch), generator=key.generator())})
        )

    w = Workers(
        trainers=trainers,
        rollout=MockRollout(answer),
        reward=score,
        more=lambda count: source.train(key.fold_in("more"), PROBLEMS, count),
        tokenizer=build.policy_tokenizer(plan.rollout),
        sampling=build.sampling(plan.rollout, LONGEST),
        gives_likeliest=False,
    )
    try:
        algorithm = algorithm_of(plan)
        state = algorithm.init({name: trainer.init(key.fold_in(name)) for name, trainer in trainers.items()}, key)
        problems = source.train(key.fold_in("data"), 0, min(PROBLEMS, plan.data.train_batch_size))
        after, _ = algorithm.step(state, problems, w)
    except Exception as error:  # an algorithm of the user may raise anything
        if any(output in str(error) for output in OF_MODELS):
            return None
        place = user_files.place_of(error, __file__)
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}{place}"
        return f"a step of {plan.algorithm} on mocks fails: {what}"
    sentences = (
        unplanned(role, plan, getattr(after, name).scheduler, algorithm.outline.updates(name, len(problems), 1), 1)
        for name, role in plan.roles.items()
    )
    return next(filter(None, sentences), "")


def unplanned(role: RolePlan, plan: Plan, made: int, planned: int, steps: int) -> str:
    """Returns a sentence about a role with more updates than its algorithm's outline counts, whose rate ends early.

    Args:
        role: the role.
        plan: the plan.
        made: its updates so far.
        planned: the updates that the outline counts for ``steps`` steps.
        steps: the steps so far.
    """
    if not role.falls or made <= planned:
        return ""
    return (
        f"the {role.name} had {made} updates up to step {steps}, and the algorithm's outline counts {planned}: its "
        f"learning rate falls over {role.total_updates} updates, and so reaches its end before step "
        f"{plan.trainer.total_training_steps}. Count them: Outline(updates=lambda role, prompts, steps: "
        f"{-(-made // steps)} * steps)"
    )
