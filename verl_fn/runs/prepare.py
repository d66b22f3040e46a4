"""Preparation of a run: its model folder, its problems, and its workers."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from verl_fn import atomic, build
from verl_fn.algorithms import Workers
from verl_fn.backends.checkpoint import dtype_of_weights
from verl_fn.backends.hf.config import compute_dtype, is_classifier
from verl_fn.backends.hf.folder import ModelError, model_notices, read_config
from verl_fn.backends.hf.tokenizer import check_template, contradiction, end_tokens, read_tokenizer
from verl_fn.config import ConfigError, Plan
from verl_fn.config.algorithms import BUILT_IN
from verl_fn.config.names import reasoning_names, verifiers_name
from verl_fn.data import notices
from verl_fn.data.examples import Conversation
from verl_fn.data.files import FileData, label_of
from verl_fn.data.judged import Judged
from verl_fn.data.loading import check_files, converters, file_data, generated, read_files
from verl_fn.data.rendering import prompt_text
from verl_fn.data.rows import DataError
from verl_fn.data.tasks import TASKS, Problem, Source
from verl_fn.driver.ranks import torchrun_size
from verl_fn.environments.engine import environment_data
from verl_fn.rewards.reward import FORMS, rule_for, unattainable

from . import checks
from .checkpoints import check_model_folder
from .checks import sampled
from .history import run_around
from .progress import Say
from .state import check_blank

ONLY_ACC = (
    "trainer.stop_at is compared with reward, and this run's held-out rows have only acc; set trainer.stop_metric=acc"
)
NEEDS_MODEL = (
    "data from files needs model.path, since a random model knows only a task's characters: verl-fn prepare takes a "
    "model from the hub, and verl-fn new-model makes a tiny one for given --chars"
)


def prepare(plan: Plan, say: Say, gpus: int | None = None) -> Source:
    """Makes the model's folder if the plan asks for one, reads the problems, and checks plan, models and data.

    Data that is valid but probably a mistake is reported.

    Args:
        gpus: how many GPUs another machine has, for which the plan is only checked; None for a run on this one.

    Raises:
        UserError: something cannot be used; the message names it and the key.
    """
    for sentence in checks.check_code(plan):
        say(f"note: {sentence}")
    from_files = plan.data.train_files or plan.data.val_files
    if plan.new_model is not None:
        _check_random_model(plan)
    checks.check_model_folders(plan)
    make_model_folder(plan)
    for folder in dict.fromkeys((plan.model, *(role.folder for role in plan.roles.values()))):
        check_model_folder(folder)
    read_config(plan.model)
    _check_policies(plan)
    tokenizer = build.policy_tokenizer(plan.rollout)
    check_template(tokenizer)
    if not (ends := end_tokens(plan.model, tokenizer)):
        raise ModelError(
            f"{plan.model} names no token that ends an answer, so no response could end: set eos_token_id in its "
            f"generation_config.json"
        )
    if note := contradiction(plan.model, tokenizer):
        say(f"note: {note}")
    checks.check_parts(plan, tokenizer, ends, gpus)
    check_blank(plan)
    for notice in dict.fromkeys(_of_models(plan)):
        say(f"note: {notice}")
    learns_from = plan.learns_from
    answers = learns_from != "samples" and any(role.trained for role in plan.roles.values())
    taught = ends if answers else None
    source: Source
    if from_files:
        source = file_data(plan.data, tokenizer, say, learns_from=learns_from, end_tokens=taught)
    elif verifiers_name(plan.data.task) and learns_from == "samples":
        source = environment_data(plan.data, plan.env, tokenizer, say)
    else:
        source = generated(plan.data, tokenizer, learns_from)
    check_has_goal(plan, source)
    checks.check(plan, source, tokenizer, installed=gpus is None)
    for notice in _notices(source, plan, tokenizer, answers=learns_from == "answers" and answers):
        say(f"note: {notice}")
    return source


def _check_policies(plan: Plan) -> None:
    """Checks that no folder of a critic or a reward model stands for a language model.

    Where embeddings are tied, its weights would do for one.
    """
    for name, role in plan.roles.items():
        if role.head == "lm" and is_classifier(read_config(role.folder)):
            key = f"algorithm.{name}" if name in checks.OTHER_MODELS else "model.path"
            raise ConfigError(
                f"{key}: {role.folder} has a value head, as critics and reward models have, and {plan.algorithm} "
                "needs a language model there; set the folder of one, such as a checkpoint's actor"
            )


def check_has_goal(plan: Plan, source: Source) -> None:
    """Checks that a run with ``trainer.stop_at`` has held-out answers and judges them."""
    if plan.trainer.stop_at is None:
        return
    if not (held_out := source.held_out(plan.data.val_size)):
        raise ConfigError(
            "trainer.stop_at needs held-out problems; set data.val_files, or give the environment of data.task an "
            "eval_dataset"
        )
    # A reward model has an accuracy of its own and no reward; an algorithm of the user may have either.
    own = plan.roles["actor"].head == "value" and plan.trainer.stop_metric == "acc"
    if plan.algorithm in BUILT_IN and not own and not sampled(plan, held_out):
        raise ConfigError(unjudged(plan))


def unjudged(plan: Plan) -> str:
    """Says that a run without judged held-out answers cannot reach ``trainer.stop_at``, and what to do."""
    if plan.roles["actor"].head == "value":
        return ONLY_ACC
    return (
        f"trainer.stop_at is compared with the {plan.trainer.stop_metric} of held-out answers, and nothing judges "
        "answers in this run; set reward.functions, or leave trainer.stop_at out"
    )


def _check_random_model(plan: Plan) -> None:
    """Raises an error for data that a random model cannot learn from; errors of the data itself come first."""
    if plan.data.train_files or plan.data.val_files:
        check_files(plan.data)
        for files in (() if plan.data.stream else plan.data.train_files, plan.data.val_files):
            held_out = files is plan.data.val_files
            read_files(
                files,
                plan.learns_from,
                prompt_key=plan.data.prompt_key,
                held_out=held_out,
                convert=converters(plan.data),
            )
        raise ConfigError(NEEDS_MODEL)
    if reasoning_names(plan.data.task) or verifiers_name(plan.data.task):
        raise ConfigError(f"data.task = {plan.data.task} needs model.path: a random model knows no language")


def make_model_folder(plan: Plan) -> None:
    """Makes the random model of a plan without ``model.path``, unless its folder already holds the same model.

    Raises:
        ConfigError: the model cannot be written, or its architecture or sizes are not valid.
    """
    if plan.new_model is None:
        return
    from verl_fn.backends.hf.new_model import new_model, with_served_heads

    task = TASKS[plan.data.task]
    settings = with_served_heads(attrs.asdict(plan.new_model)) | {"chars": task.alphabet, "seed": plan.trainer.seed}
    if plan.env.name or task.dialogue is not None:
        settings |= {"chat_template": True}
    folder = Path(plan.model)
    record = folder / "made_from.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if json.loads(record.read_text()) == settings:
            return
    try:
        # The record comes last, so a folder without it is incomplete and made again.
        shutil.rmtree(folder, ignore_errors=True)
        new_model(folder, **settings)
        atomic.write(record, json.dumps(settings))
    except ModelError as error:
        raise ConfigError(f"model.new: {error}") from error
    except OSError as error:
        raise ConfigError(f"the random model cannot be written to {folder}: {error.strerror or error}") from error


def _of_models(plan: Plan) -> Iterator[str]:
    """Yields sentences about how the models of roles are run."""
    device = build.device(plan.driver)
    for role in plan.roles.values():
        warmup = role.optim.lr_warmup_steps if role.trained else 0
        if warmup >= max(1, role.total_updates):
            yield (
                f"{role.table}.optim.lr_warmup_steps is {warmup} updates, and the run has {role.total_updates}: its "
                f"learning rate ends at {max(0, role.total_updates - 1) / warmup:.2g} times {role.table}.optim.lr"
            )
        if device == "cpu" and role.dtype == "bfloat16":
            yield f"{role.table}.dtype is bfloat16 on a CPU: slower there than float32, and less exact"
        computed, named = (
            compute_dtype(dtype, role.folder, on) for dtype, on in ((role.dtype, device), (None, "cuda"))
        )
        # Weights that lie in bf16 are the same numbers in both. The files are opened only if the dtypes differ.
        if (computed, named) == ("float32", "bfloat16") and dtype_of_weights(Path(role.folder)) == torch.float32:
            yield (
                f"{role.folder} was trained in bfloat16 and computes in float32 here, and may answer otherwise; "
                f"{role.table}.dtype and rollout.dtype=bfloat16 compute as the run that trained it"
            )
        other = run_around(Path(role.folder)) if role.lora else None
        old = other is not None and (other / "checkpoints") in Path(role.folder).resolve().parents
        if old and other != Path(plan.trainer.dir).resolve():
            yield (
                f"{role.folder}, the base of the adapters, lies in the run {other}, which removes it if it goes on: "
                f"`verl-fn export {role.folder} --out FOLDER` makes a copy to train from"
            )
        if role.strategy != "megatron":
            yield from model_notices(role.folder, role.head, role.row_layout, plan.driver.device)


def _notices(source: Source, plan: Plan, tokenizer: Any, *, answers: bool) -> Iterator[str]:
    """Yields a line for each unusual property of the chat template and of problems from files."""
    known = (source.training, source.validation) if isinstance(source, FileData) else ()
    yield from notices.of_template(known, plan.data, tokenizer, converses=bool(plan.env.name))
    yield from _of_other_templates(known, plan, tokenizer)
    if not isinstance(source, FileData):
        return
    yield from _by_rules(source, plan)
    made = [notices.traits_of(problems, tokenizer) for problems in known]
    needing = sum(one.count(notices.TOOL_ARGUMENTS) for one in made)
    if needing and not plan.env.name and plan.learns_from == "samples":
        yield (
            f"{needing} of {sum(map(len, made))} problems have {' or '.join(notices.OF_TOOLS)} in extra_info, and "
            "without an environment (env.name) the model calls no tools and answers once"
        )
    # Of a stream, only the first problems are known.
    if type(source) is FileData and (plan.data.train_files or plan.data.val_files):
        by_env = bool(plan.env.name) and not plan.reward.by_user
        yield from notices.notices(
            source.training, source.validation, plan.data, tokenizer, answers=answers, judged_by_env=by_env,
            sizes=source.sizes,
        )  # fmt: skip
    held_out = source.held_out(plan.data.val_size)
    if 0 < (judged := len(sampled(plan, held_out))) < len(held_out):
        yield (
            f"data.val_files: answers to {judged} of {len(held_out)} held-out problems are sampled; the others have "
            "no ground truth with a rule for their data source, so only their loss is reported (reward.functions "
            "judge all)"
        )


def _of_other_templates(known: Sequence[Sequence[Problem]], plan: Plan, tokenizer: Any) -> Iterator[str]:
    """Yields a line for each frozen model whose own chat template writes the first prompts otherwise."""
    firsts = [one for problems in known for one in problems[: notices.MOST_RENDERED]]
    firsts = [one for one in firsts if not isinstance(one.prompt, str) and not one.images]
    for name, role in plan.roles.items():
        if name not in checks.OTHER_MODELS or not firsts:
            continue
        other = read_tokenizer(role.folder, plan.data.chat_template_kwargs, plan.data.date)
        for problem in firsts if other.chat_template is not None else ():
            texts = [prompt_text(tokenizer, problem), ""]
            # It may refuse a role, or leave out a message.
            with contextlib.suppress(ModelError, DataError):
                texts[1] = prompt_text(other, problem)
            if texts[0] != texts[1]:
                yield (
                    f"algorithm.{name}: the chat template in {role.folder} writes {label_of(problem)} otherwise than "
                    "the actor's, and the model reads what the actor's writes; take a model that learned from the "
                    "actor's chat template"
                )
                break


def _by_rules(source: FileData, plan: Plan) -> Iterator[str]:
    """Yields a line for files whose first problems have ground truths that no response equals by rule."""
    if plan.reward.by_user or plan.env.name or plan.learns_from != "samples":
        return
    trained = source.training if plan.needs_reward else ()
    held_out = sampled(plan, source.held_out(plan.data.val_size))
    for key, problems in (("data.train_files", trained), ("data.val_files", held_out)):
        # What is learned to be said is an answer in full.
        some = [one for one in problems[: notices.MOST_ENCODED] if not isinstance(one, Conversation | Judged)]
        if wrong := [problem for problem in some if problem.answer and unattainable(problem)]:
            form = FORMS[rule_for(wrong[0].data_source)].format("ANSWER")
            yield (
                f"{key}: by the rule of their data source, no response is right for {len(wrong)} of the first "
                f"{len(some)} ground truths; {label_of(wrong[0])}: {wrong[0].answer!r:.60}, and the rule reads the "
                f"answer in {form!r}; write only that answer, or set reward.functions"
            )


def with_use_of_engine(plan: Plan, source: Source) -> Plan:
    """Returns the plan with whether a step samples, as one of the user's may, or an evaluation of this data."""
    used = (
        plan.learns_from == "samples"
        or plan.algorithm not in BUILT_IN
        or bool(sampled(plan, source.held_out(plan.data.val_size)))
    )
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, used=used))


def started(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """Starts the processes of a run, if it has others than this one, and yields what ``workers`` takes.

    They import what they need while the body checks the plan. What is known at once is checked before, since an error
    of the body waits until the processes have ended.

    Raises:
        UserError: the device, or a file or folder that the plan names, does not exist.
    """
    if plan.driver.kind != "ray":
        return contextlib.nullcontext()
    checks.check_device(plan)
    checks.check_code(plan)
    checks.check_model_folders(plan)
    check_files(plan.data)
    checks.check_cluster(plan)
    from verl_fn.driver.ray import ray_started

    return ray_started(plan)


def workers(plan: Plan, begun: Any = None) -> contextlib.AbstractContextManager[Workers]:
    """Returns the workers of a run: in Ray actors if ``driver.kind`` asks for them, else in this process.

    Args:
        begun: the processes that ``started`` has begun to start; None starts them here.

    Raises:
        ConfigError: the device does not exist.
    """
    checks.check_device(plan)
    if plan.driver.kind == "ray":
        from verl_fn.driver.ray import ray_workers

        return ray_workers(plan, begun)
    if torchrun_size() > 1:
        from verl_fn.torchrun import torchrun_workers

        return torchrun_workers(plan)
    from verl_fn.driver.ranks import local_workers

    return local_workers(plan)
