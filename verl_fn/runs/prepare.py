"""Preparation of a run: its model folder, its problems, and its workers."""

from __future__ import annotations

import contextlib

from verl_fn.algorithms import Workers
from verl_fn.backends.hf.folder import read_config
from verl_fn.backends.hf.tokenizer import read_tokenizer
from verl_fn.config import Plan
from verl_fn.data.files import file_data
from verl_fn.data.tasks import TASKS, Source
from verl_fn.driver import build

from .checks import check
from .progress import Say


def prepare(plan: Plan, say: Say) -> Source:
    """Makes the model's folder if the plan asks for one, reads the problems, and checks plan, models and data.

    Raises:
        UserError: something cannot be used; the message names it and the key.
    """
    build.make_model_folder(plan)
    read_config(plan.model)
    from_files = plan.data.train_files or plan.data.val_files
    tokenizer = read_tokenizer(plan.model)
    answers = plan.algorithm == "sft" and any(role.optim is not None for role in plan.roles.values())
    source: Source = file_data(plan.data, tokenizer, say, answers=answers) if from_files else TASKS[plan.data.task]
    check(plan, source, tokenizer)
    return source


def workers(plan: Plan) -> contextlib.AbstractContextManager[Workers]:
    """Returns the workers of a run: in this process or in Ray actors, as ``driver.kind`` asks."""
    if plan.driver.kind == "ray":
        from verl_fn.driver.ray import ray_workers

        return ray_workers(plan)
    from verl_fn.driver.local import local_workers

    return local_workers(plan)
