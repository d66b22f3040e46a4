"""Checks that the parts of a plan can be made, in the order of what they cost."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_fn.algorithms import make
from verl_fn.algorithms.experience import conversations_of
from verl_fn.backends.hf.config import compute_dtype
from verl_fn.backends.hf.folder import check_weights
from verl_fn.backends.mock import MockRollout
from verl_fn.config import ConfigError, Plan
from verl_fn.config.schema import TrainerConfig
from verl_fn.data.tasks import Source
from verl_fn.driver import build, ranks
from verl_fn.environments.rendering import Renderer
from verl_fn.errors import install
from verl_fn.state import Key

# The screen, on which a run prints whether it is asked for or not.
CONSOLE = "console"


def check_parts(plan: Plan, tokenizer: Any, ends: Sequence[int]) -> None:
    """Checks loggers, chat template, rollout engine and cluster, none of which is started.

    Args:
        plan: the plan.
        tokenizer: of the model.
        ends: the tokens that end an answer.

    Raises:
        UserError: one of them cannot be had or used; the message names the key.
    """
    check_loggers(plan.trainer)
    if plan.env.name:
        Renderer(tokenizer, ends)
    # Nodes of a cluster that runs already may have what this machine lacks.
    if plan.rollout.name == "vllm" and not plan.ray.address:
        _check_vllm(plan)
    if plan.driver.kind == "ray":
        from verl_fn.driver.ray import check_before_start

        check_before_start(plan)


def check_code(plan: Plan) -> None:
    """Checks that the files of the user's own code exist, and that the algorithm can be made of its objects.

    Raises:
        ConfigError: a file or an object in it does not exist, or is none that the key takes.
    """
    keys = dict.fromkeys(plan.reward.functions, "reward.functions") | {plan.env.name: "env.name"}
    for reference, key in keys.items():
        file = Path(reference.rpartition(":")[0])
        # A cluster that runs already may have files that this machine lacks.
        if file.suffix == ".py" and not file.is_file() and not plan.ray.address:
            raise ConfigError(f"{key}: there is no file {file}")
    make(plan.algorithm, plan.options)


def check_loggers(trainer: TrainerConfig) -> None:
    """Checks that the packages of ``trainer.logger`` are installed.

    Raises:
        ConfigError: one is not.
    """
    for name in trainer.logger:
        if name != CONSOLE and sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise ConfigError(f"trainer.logger asks for {name}, which is not installed: {install(name)}")


def check_all_weights(plan: Plan) -> None:
    """Checks that model folders have the weights of their models, whose files are not read to the end.

    Raises:
        ModelError: one has not.
    """
    for model in dict.fromkeys((role.folder, role.head, role.row_layout) for role in plan.roles.values()):
        check_weights(*model)


def check_processes(plan: Plan, source: Source) -> Iterator[str]:
    """Starts what runs the user's reward functions and environment, as a run does, and begins a conversation.

    Yields:
        Sentences about what a run would survive.

    Raises:
        UserError: they cannot be used.
    """
    if not any(_elsewhere(plan, name) for name in plan.reward.functions):
        build.reward(plan.reward, plan.model, env=plan.env.name, replies=plan.trainer.dir)
    if plan.env.name and not _elsewhere(plan, plan.env.name):
        # A conversation begins before the engine draws anything.
        conversing = build.conversations(plan.rollout, plan.env, lambda: MockRollout({}))
        sampled = source.train(Key.from_seed(0), 0, 1) if plan.learns_from == "samples" else ()
        for part, problems in (("training", sampled), ("held-out", source.held_out(1))):
            for request in conversations_of(problems, build.sampling(plan.rollout), Key.from_seed(0)):
                if (failure := conversing.begin(request)) is not None:
                    yield f"of the {part} problems, {failure}"


def _elsewhere(plan: Plan, reference: str) -> bool:
    """Returns whether a reference is to a file that only the nodes of a running cluster have."""
    file = Path(reference.rpartition(":")[0])
    return bool(plan.ray.address) and file.suffix == ".py" and not file.is_file()


def _check_vllm(plan: Plan) -> None:
    from verl_fn.backends.vllm.arguments import check_heads, check_names, check_version, engine_arguments

    r, device = plan.rollout, ranks.device(plan.driver)
    check_version()
    check_names(
        engine_arguments(
            Path(r.folder),
            device=device,
            dtype=compute_dtype(r.dtype, r.folder, device),
            slots=r.slots,
            max_length=r.max_prompt_length + r.max_response_length,
            tensor_parallel_size=r.tensor_parallel_size,
            gpu_memory_utilization=r.gpu_memory_utilization,
            enforce_eager=r.enforce_eager,
            engine_kwargs=r.engine_kwargs,
        )
    )
    check_heads(Path(r.folder), device)
