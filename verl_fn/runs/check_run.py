"""The report of ``verl-fn train --check``: what a run would do and need, computed without a GPU.

The user's own algorithm takes one step on mocks, before any model is loaded. It has problems of the run's data,
samples, rewards, gradients and updates. Models are tables over a few tokens, and responses and rewards are drawn at
random, so its numbers mean nothing. It shows whether the functions of the algorithm get and return what they should.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from verl_fn import build, user_files
from verl_fn.algorithms import Workers
from verl_fn.algorithms.experience import with_model_score
from verl_fn.algorithms.own import check_fields
from verl_fn.algorithms.policy import averages_rows
from verl_fn.backends.hf.config import compute_dtype
from verl_fn.backends.hf.tokenizer import end_tokens, has_tokenizer
from verl_fn.backends.mock import Mock, MockRollout, Response, Turn
from verl_fn.config import ConfigError, Plan, RolePlan, structure
from verl_fn.config.describe import without_effect
from verl_fn.config.load import default_options
from verl_fn.config.names import is_reference
from verl_fn.data.entries import entry_names
from verl_fn.data.examples import encode_examples
from verl_fn.data.files import encode_prompts
from verl_fn.data.judged import Judged, TaskPairs
from verl_fn.data.rows import sources_in
from verl_fn.data.tasks import Source, Task
from verl_fn.driver import ranks
from verl_fn.errors import UserError, say
from verl_fn.pool.worker import short
from verl_fn.rewards.reward import rule_for
from verl_fn.state import Batch, Key, Metrics, Params, TokenOutputs, TrainState
from verl_fn.state.batch import TOP, MissingField
from verl_fn.steps import Loss

from . import RunError, checks, fitting
from .checkpoints import check_disk, checkpoint_bytes, disk_line, free_memory
from .continuing import changes, find_origin, finished, going_on, unused_settings
from .fitting import Fit
from .folder import Run
from .memory import GIB, advice, engine_weights, host_memory, largest, phases, role_memory, share, sizes_of
from .prepare import prepare, with_use_of_engine
from .state import algorithm_of

# Tokens of the tables, of a response at most, and problems of the step.
TOKENS, LONGEST, PROBLEMS = 16, 8, 4
SHOWN = 8  # parts of the first row
# Outputs that only models have.
OF_MODELS = ("candidate_logprobs", "routed_experts", *TOP)
# How the fields begin that only a run's own rewards write.
OF_REWARDS = ("acc", "pred", "reward/")


@attrs.frozen
class Report:
    """What ``check_run`` has found.

    Attributes:
        text: lines about the run; the last one says whether it can start, or fits its GPUs.
        fits: False if the run needs more memory than its GPUs have.
    """

    text: str
    fits: bool = True


def check_run(plan: Plan, gpu: int | None = None, gpus: int | None = None) -> Report:
    """Runs the checks that precede training, and describes the run.

    Args:
        gpu: bytes of a GPU; by default of this machine's, if it has one.
        gpus: the GPUs of another machine that the run is planned for; None for this machine. Then model folders need
            no weights and no tokenizer, and the run's folder and the packages of the run are not looked for.

    Returns:
        Lines about the algorithm, a step's rows, each role's updates and memory, each phase's memory, and what fits.

    Raises:
        UserError: the run could not start.
    """
    if gpus is None:
        checks.check_device(plan)
        checks.check_run_folder(plan)
        checks.check_writable(plan)
    else:
        checks.check_gpus(plan, gpus)
        if plan.driver.device == "cpu":
            raise ConfigError("driver.device is cpu, and --gpus plans for GPUs; set driver.device=auto or cuda")
        plan = plan.changed("driver", device="cuda")
    checks.check_has_training(plan)
    plan = fitting.with_engine(going_on(plan))
    run = Run(plan, say)
    # On another machine, the folder is empty.
    origin, changed = (find_origin(plan, run), changes(run, plan)) if gpus is None else (None, [])
    if (ended := finished(plan, origin)) is not None:
        done = f"this run has finished, after {ended.step} steps; nothing would be done"
        return Report("\n".join([done, *unused_settings(run, plan)]))
    for sentence in changed:
        say(sentence)
    longest, rehearsed = plan.rollout.longest, ""
    first: list[str] = []
    if gpus is not None and plan.new_model is None and not has_tokenizer(plan.model):
        _check_without_tokenizer(plan, longest)
    else:
        longest, rehearsed, first, plan = _check_with_tokenizer(plan, gpus)
    lacking = checks.check_all_weights(plan, needed=gpus is None) if origin is None else []
    for folder in lacking:
        say(f"note: {folder} has no weights: they are not checked")
    if on_gpus := build.device(plan.driver) == "cuda":
        gpu = gpu or build.gpu_memory("cuda")
        plan = fitting.sized(plan, gpu)
    lines = [*_run_lines(plan, longest), *first, disk_line(plan)]
    lines += [f"on mocks    one step of {plan.algorithm} {rehearsed}"] if rehearsed else []
    if gpus is None:
        check_disk(plan)
    failing = check_fields(plan.options)
    but = f", but {' and '.join(failing)} failed on a made-up batch (see the note)" if failing else ""
    if not on_gpus:
        return Report("\n".join([*lines, f"the run can start{but}; memory is counted on GPUs only"]))
    lines += [*_memory_lines(plan, gpu), *host_lines(plan, gpu, gpus)]
    if gpu is None:
        return Report("\n".join([*lines, f"the run can start{but}; --gpu-memory GIB says whether it fits"]))
    lines += _cached_rows(plan, gpu, longest)
    lines += [f"on mocks    {' and '.join(failing)} failed on a made-up batch (see the note)"] if failing else []
    lines += _proposals(plan, gpus or max(1, torch.cuda.device_count()), gpu, begun=origin is not None)
    return Report("\n".join(lines), fitting.fits(plan, gpu, 1.0))


def _check_with_tokenizer(plan: Plan, gpus: int | None) -> tuple[int, str, list[str], Plan]:
    """Checks data, rewards and environment.

    Returns:
        The tokens of the longest row, how the step on mocks went, lines about the first row, and the plan with the
        data's use of the engine.
    """
    source = prepare(plan, say, gpus)
    checks.check_rewards(plan, source if gpus is None else None)
    rehearsed, unplanned_updates = rehearse(plan, source, here=gpus is None)
    judged = checks.check_judge(plan, source) if gpus is None else ()
    for note in filter(None, (*judged, *checks.check_conversations(plan, source), unplanned_updates)):
        say(f"note: {note}")
    tokenizer = build.policy_tokenizer(plan.rollout)
    if isinstance(source, Task | TaskPairs) and not plan.env.name:
        # 32 problems have all characters of any task. The run would end at one that the tokenizer lacks.
        some = source.held_out(32)
        if plan.learns_from == "samples":
            encode_prompts(some, tokenizer)
        else:
            encode_examples(some, tokenizer, tokenizer.eos_token_id)
    lengths = checks.row_lengths(plan, source, tokenizer)
    first = list(_first_row(plan, source, tokenizer))
    return max(lengths.sampled, lengths.trained), rehearsed, first, with_use_of_engine(plan, source)


def _first_row(plan: Plan, source: Source, tokenizer: Any) -> Iterator[str]:
    """Yields the run's first prompt, or the rows of its first example, as the model reads them."""
    problems = source.train(Key.from_seed(plan.trainer.seed).fold_in("data"), 0, 1)
    if plan.learns_from != "samples":
        rows = encode_examples(problems, tokenizer, end_tokens(plan.model, tokenizer))
    elif plan.env.name:
        return  # an environment writes its own prompts
    else:
        prompts = encode_prompts(problems, tokenizer, plan.data.max_prompt_length, plan.data.truncation)
        rows = [(ids, [0.0] * len(ids)) for ids in prompts]
    judged = problems[0].responses if isinstance(problems[0], Judged) else ()
    headings = ["chosen" if good else "rejected" for _, good in judged] or ["first row"]
    headings += [f"row {number}" for number in range(2, len(rows) + 1)]
    for heading, (ids, mask) in zip(headings, rows, strict=False):
        parts = itertools.groupby(zip(ids, mask, strict=True), lambda token: token[1] != 0)
        for number, (learned, part) in enumerate(parts):
            if number == SHOWN:
                yield f"{heading:<11} and more"
                break
            text = short(repr(tokenizer.decode([token for token, _ in part], skip_special_tokens=False)), 400)
            yield f"{heading:<11} {'trained' if learned else 'read   '} {text}"


def _check_without_tokenizer(plan: Plan, longest: int) -> None:
    """Checks what can be checked of a plan for another machine without the model's tokenizer."""
    checks.check_model_folders(plan)
    say(f"note: {plan.model} has no tokenizer: data, chat template, rewards and environment are not checked")
    for sentence in checks.check_code(plan, here=False):
        say(f"note: {sentence}")
    checks.check_ranks(plan, installed=False)
    if plan.learns_from == "samples":
        if not (plan.reward.by_user or plan.env.name or plan.data.convert):
            held_out = () if plan.data.val_size else plan.data.val_files
            for source in sources_in([*(plan.data.train_files if plan.needs_reward else ()), *held_out]):
                rule_for(source)
        parts = "a row: data.max_prompt_length and data.max_response_length"
        checks.check_lengths(plan, checks.RowLengths(longest, longest, longest, longest, parts))
    elif any(part.name == "engine weights" for phase in phases(plan) for part in phase.parts):
        say(
            "note: the memory of a rollout engine is counted. The run takes it only if held-out answers are judged; "
            "data.val_files=[] leaves an embedded engine out of this check"
        )


def _cached_rows(plan: Plan, gpu: int, longest: int) -> Iterator[str]:
    """Yields a line if the cache of a vLLM engine holds fewer rows than it gets; the other engine has all slots."""
    if plan.rollout.name != "vllm":
        return
    rows, asked = fitting.cached_rows(plan, gpu), fitting.rows_of_engine(plan)
    if rows < asked:
        held = f"{rows} of the longest rows, of {longest} tokens, at once in each engine, and more of shorter ones"
        yield f"cache       {held}; it gets {asked} a step"


def _run_lines(plan: Plan, longest: int) -> Iterator[str]:
    """Yields lines about the run and its models; ``longest`` is the number of tokens of its longest row."""
    d, r, t, size = plan.data, plan.rollout, plan.trainer, ranks.training_ranks(plan)
    rows = d.train_batch_size * {"samples": r.n, "answers": 1, "pairs": 2, "labels": 2}[plan.learns_from]
    data = entry_names(d.train_files) or f"the task {d.task}"
    yield f"algorithm   {plan.algorithm} on {data}: {t.total_training_steps} steps, seed {t.seed}"
    yield from _parts_lines(plan)
    yield f"a step      {d.train_batch_size} prompts, {rows} rows of at most {longest} tokens"
    yield f"rollout     {_engines(plan)}; temperature {r.temperature:g}, n {r.n}"
    processes = "process" if size == 1 else "processes"
    yield f"driver      {plan.driver.kind}, {build.device(plan.driver)}, {size} training {processes}"
    yield f"folder      {t.dir}"
    if lag := plan.driver.max_lag:
        steps = "1 step" if lag == 1 else f"{lag} steps"
        correction = getattr(plan.options, "rollout_is", None) or "that of the algorithm"
        yield f"overlap     sampling runs up to {steps} ahead of learning; correction: {correction}"
        if r.in_flight_weight_updates:
            yield "            each step's weights reach the engines in the middle of responses"
    for role in plan.roles.values():
        yield from _role_lines(role, plan, size)
    for name, original in plan.copies.items():
        yield f"{name:<11} the frozen base of {original}, no model of its own"


def _parts_lines(plan: Plan) -> Iterator[str]:
    """Yields lines about the algorithm's options, the reward and the environment."""
    options = plan.options
    default = attrs.asdict(default_options(type(options)), recurse=False)
    values = attrs.asdict(options, recurse=False)
    unused = {*without_effect(structure(plan.table), {f"algorithm.{name}": value for name, value in values.items()})}
    unused |= {"algorithm.loss_agg_mode"} if averages_rows(options) else set()
    parts = [
        f"{name} {value}"
        for name, value in values.items()
        if name in ("policy_loss", "adv_estimator")
        or (value is not None and value != default[name] and f"algorithm.{name}" not in unused)
    ]
    if parts:
        yield f"options     {'; '.join(parts)}"
    reward, env = plan.reward, plan.env
    if plan.needs_reward or plan.env.name:
        judge = f"{reward.model} at {reward.url}" if reward.url else ""
        rule = "the environment's" if env.name else "the rule of each data source"
        held_out = "" if plan.needs_reward else "the reward model; of held-out answers "
        yield f"reward      {held_out}{judge or ', '.join(reward.functions) or rule}"
    if env.name:
        limit = env.max_turn_length or plan.data.max_response_length
        yield f"environment {env.name}: up to {env.max_turns} replies of at most {limit} tokens each"


def _memory_lines(plan: Plan, gpu: int | None) -> Iterator[str]:
    """Yields the bytes of each phase on the GPU of a rank, and whether they fit."""
    counted = phases(plan, gpu)
    most = largest(counted)
    room = f"of {gpu / GIB:.2f} GiB" if gpu is not None else "of unknown size (--gpu-memory GIB compares)"
    yield f"memory      by phase, in GiB, on a GPU {room}; the largest is the {most.title}"
    for phase in counted:
        yield f"            {phase.title}: {phase.describe()}"
    if plan.rollout.sleeps:
        yield "            the engine sleeps while the ranks compute (rollout.free_cache_engine)"


def host_lines(plan: Plan, gpu: int | None, gpus: int | None) -> Iterator[str]:
    """Yields the bytes that settings move to the memory of a machine; notes if fewer are free on this one."""
    here = min(ranks.training_ranks(plan), gpus or max(1, torch.cuda.device_count()))
    host = host_memory(plan, gpu, here, checkpoint_bytes(plan) if plan.trainer.async_save else 0)
    if not host.parts:
        return
    yield f"host        moved to the memory of a machine with {here} of the ranks, in GiB: {host.describe()}"
    if gpus is None and not plan.ray.address and host.nbytes > (free := free_memory()):
        say(
            f"note: the run moves {host.nbytes / GIB:.2f} GiB to the memory of this machine, of which "
            f"{free / GIB:.2f} are free; {advice(host)}"
        )


def _proposals(plan: Plan, gpus: int, gpu: int, *, begun: bool) -> Iterator[str]:
    """Yields settings that use the GPUs better, layouts that fit them, and whether the plan fits."""
    if fitting.fits(plan, gpu) and plan.learns_from == "samples":
        yield from (f"engine      {sentence}" for sentence in fitting.better_engine(plan, gpu))
    found = fitting.layouts(plan, gpus, gpu)
    more = None if found else fitting.enough_gpus(plan, gpus, gpu)
    yield from _layout_lines(plan, gpus, gpu, found)
    if more is not None:
        yield f"            {more[0]} such GPUs are enough: {more[1]}"
    most, room = largest(phases(plan, gpu)), f"{gpu / GIB:.4g} GiB"
    takes = f"the largest phase, the {most.title}, takes {most.nbytes / GIB:.1f} of {room}"
    if fitting.fits(plan, gpu):
        yield f"fits: {takes}"
        return
    lora = None if begun or found else fitting.adapters(plan, gpus, gpu)
    ways = _help(fitting.remedies(plan, gpus, gpu, begun=begun), found, more, lora)
    if fitting.fits(plan, gpu, 1.0):
        yield f"fits, with less than {100 * (1 - fitting.FILLED):.0f} % to spare: {takes}; to spare more: {ways}"
    else:
        yield f"does not fit: {_lacking(plan, gpu)}; {ways}"


def _layout_lines(plan: Plan, gpus: int, gpu: int, found: Sequence[Fit]) -> Iterator[str]:
    """Yields the layouts that fit, or what is missing for the one that needs least."""
    machine = f"{100 * fitting.FILLED:.0f} % of {gpus} x {gpu / GIB:.4g} GiB"
    if found:
        yield f"layouts     with the largest budget of tokens, up to all of a step, that fits {machine}:"
        yield from (f"            {layout}\n              {layout.by_phase()}" for layout in found)
        return
    what = "with the parameters and the moments of this config; the last line says what helps"
    yield f"layouts     none fits {machine} {what}"
    if (least := fitting.nearest(plan, gpus, gpu)) is not None:
        lacking = (least.phase.nbytes - fitting.FILLED * gpu) / GIB
        what = f"{lacking:.1f} GiB a GPU are missing" if lacking > 0 else "its engine does not fit its share of a GPU"
        yield f"            the least is {least}: {what}"
        yield f"              {least.phase.describe()}"


def _lacking(plan: Plan, gpu: int) -> str:
    """Returns what a plan that does not fit lacks memory for."""
    most = largest(phases(plan, gpu))
    if most.nbytes > gpu:
        return f"the {most.title} needs {most.nbytes / GIB:.1f} of {gpu / GIB:.4g} GiB"
    weights, room = engine_weights(plan) / GIB, share(plan, gpu) / GIB
    return f"the engine's weights take {weights:.1f} GiB, and rollout.gpu_memory_utilization gives it {room:.1f}"


def _help(changes: Sequence[Fit], found: Sequence[Fit], more: tuple[int, Fit] | None, lora: Fit | None) -> str:
    """Returns what helps a plan that does not fit: the smallest changes, another layout, more GPUs, or adapters."""
    ways = [f"{more[0]} such GPUs are enough, with {more[1]}"] if more is not None else []
    if changes:
        ways = [f"set {', or '.join(map(str, changes))}"]
    elif found:
        ways = [f"take the layout {found[0]}"]
    ways += [f"adapters fit, with {lora}"] if lora is not None else []
    return "; or ".join(ways) or "no layout that was tried fits; take larger GPUs, a smaller model or actor.lora_rank"


def _engines(plan: Plan) -> str:
    r = plan.rollout
    dtype = compute_dtype(r.dtype, r.folder, build.device(plan.driver))
    engine = f"{r.name}, {dtype}, up to {r.slots} rows at once"
    if r.name == "vllm" and build.device(plan.driver) == "cuda":
        engine += f" in {r.gpu_memory_utilization:g} of a GPU"
    if plan.driver.kind == "local":
        return engine
    place = "apart from" if r.placement == "apart" else "colocated with"
    return f"{r.engines} x {engine}, {place} the training processes"


def _role_lines(role: RolePlan, plan: Plan, size: int) -> Iterator[str]:
    dtype = compute_dtype(role.dtype, role.folder, build.device(plan.driver))
    sizes = sizes_of(role)
    trained = sizes.trained if role.trained else 0
    layout = role.strategy
    if role.strategy == "fsdp":
        layout = f"fsdp over {size // role.fsdp_config.replicate} of {size} ranks"
        layout += f", sequence parallel {sp}" if (sp := role.fsdp_config.ulysses_sequence_parallel_size) > 1 else ""
    if role.strategy == "megatron":
        m = role.megatron
        layout = (
            f"{'Megatron-FSDP' if m.use_megatron_fsdp else 'megatron'} over {size} ranks: "
            f"tensor {m.tensor_model_parallel_size}, pipeline {m.pipeline_model_parallel_size}, "
            f"context {m.context_parallel_size}, expert {m.expert_model_parallel_size}"
        )
    steps = plan.trainer.total_training_steps
    updates = (
        f"{role.total_updates} updates in {steps} steps, lr {role.optim.lr:g}" if role.trained else "not updated"
    )
    if role.falls:
        updates += f" {role.optim.lr_scheduler_type}"
    if role.strategy == "megatron" and role.trained and role.megatron.optimizer == "megatron":
        updates += " by Megatron's own distributed optimizer"
    counts = f"{sizes.total:,} parameters, {trained:,} trained"
    yield f"{role.name:<11} {role.folder}: {counts}; {layout}; {dtype}; {updates}"
    counted = role_memory(role, plan, build.device(plan.driver)).own
    parts = [f"{p.name.removeprefix(f'{role.name} ')} {p.nbytes / GIB:.3f}" for p in counted if p.nbytes]
    place = "; parameters and moments stay on the CPU between passes" if role.offload else ""
    yield f"            GiB a rank: {', '.join(parts)}; micro-batches of at most {role.max_tokens:,} tokens{place}"


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


def rehearse(plan: Plan, source: Source, *, here: bool = True) -> tuple[str, str]:
    """Takes a step of an algorithm of the user on mocks.

    Args:
        plan: the plan. Steps of built-in algorithms, with environments, with adapters whose base is the reference, or
            with exact log-probs, whose metrics mocks lack, are not taken.
        here: whether the run is planned for this machine, so that it lacks what is missing here.

    Returns:
        How the step went, empty if none was taken, and a note, empty if there is none.

    Raises:
        RunError: the step fails, and not for what only mocks lack.
    """
    if not is_reference(plan.algorithm) or plan.env.name or plan.copies or plan.rollout.exact != "off":
        return "", ""
    whole = plan.data.train_batch_size
    # An algorithm may divide a step's problems by a number for which a few are not enough.
    for size in sorted({min(PROBLEMS, whole), whole}):
        try:
            return "went well", _step_on_mocks(plan, source, size)
        except Exception as error:  # an algorithm of the user may raise anything
            failure = error
    place = user_files.place_of(failure, __file__)
    what = str(failure) if isinstance(failure, UserError) else f"{type(failure).__name__}: {failure}{place}"
    if _lies_in_mocks(failure) or (not here and isinstance(failure, ImportError)):
        return f"says nothing, since mocks differ from models: {what}", ""
    raise RunError(f"a step of {plan.algorithm} on mocks fails: {what}") from failure


def _lies_in_mocks(error: Exception) -> bool:
    """Returns whether a step may fail only for what mocks lack: a model's outputs, the rewards' fields, a device."""
    if any(word in str(error) for word in OF_MODELS) or "cuda" in str(error).lower():
        return True
    if isinstance(error, MissingField):
        return error.name.startswith(OF_REWARDS)
    # Perhaps the name of a model's parameter.
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, KeyError) and raised_in == Params.__getitem__.__code__.co_filename


def _step_on_mocks(plan: Plan, source: Source, size: int) -> str:
    """Takes a step with so many problems, and returns a sentence about updates that nobody planned, if there are."""
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
        more=lambda count: source.train(key.fold_in("more"), size, count),
        tokenizer=build.policy_tokenizer(plan.rollout),
        sampling=build.sampling(plan.rollout, LONGEST),
        gives_likeliest=False,
    )
    algorithm = algorithm_of(plan)
    state = algorithm.init({name: trainer.init(key.fold_in(name)) for name, trainer in trainers.items()}, key)
    problems = source.train(key.fold_in("data"), 0, size)
    after, _ = algorithm.step(state, problems, w)
    sentences = (
        unplanned(role, plan, getattr(after, name).scheduler, algorithm.outline.updates(name, len(problems), 1), 1)
        for name, role in plan.roles.items()
    )
    return next(filter(None, sentences), "")


def unplanned(role: RolePlan, plan: Plan, made: int, planned: int, steps: int) -> str:
    """Returns a sentence about a role with more updates than its algorithm's outline counts, whose rate ends early.

    Args:
        planned: the updates that the outline counts for ``steps`` steps.
    """
    if not role.falls or made <= planned:
        return ""
    return (
        f"the {role.name} had {made} updates up to step {steps}, and the algorithm's outline counts {planned}: its "
        f"learning rate falls over {role.total_updates} updates, and so reaches its end before step "
        f"{plan.trainer.total_training_steps}. Count them: Outline(updates=lambda role, prompts, steps: "
        f"{-(-made // steps)} * steps)"
    )
