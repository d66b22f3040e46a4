"""The report of ``verl-fn train --check``: what a run would do and need, computed without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_fn.backends.hf.config import compute_dtype
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.sizes import model_sizes
from verl_fn.config import Plan, RolePlan
from verl_fn.driver import build, ranks

from .checks import (
    check_all_weights,
    check_has_training,
    check_processes,
    check_run_folder,
    check_writable,
    row_lengths,
)
from .continuing import changes, find_origin, finished, run_date
from .folder import Run
from .memory import GIB, check_memory, largest, offloads, phases, role_memory
from .prepare import prepare
from .screen import say


def check_run(plan: Plan, gpu: int | None = None) -> str:
    """Runs the checks that precede training, and describes the run.

    Args:
        plan: the plan.
        gpu: bytes of a GPU; by default of this machine's, if it has one.

    Returns:
        Lines about the algorithm, the rows of a step, each role's layout, updates and memory per rank, and the
        memory of each phase on a GPU.

    Raises:
        UserError: the run could not start, or needs more memory than the GPU has.
    """
    check_run_folder(Path(plan.trainer.dir))
    check_writable(Path(plan.trainer.dir))
    check_has_training(plan)
    plan = plan.dated(run_date(plan))
    run = Run(plan, say)
    origin, changed = find_origin(plan, run), changes(run, plan)
    if (ended := finished(plan, origin)) is not None:
        return f"this run has finished, after {ended.step} steps; nothing would be done"
    for sentence in changed:
        say(sentence)
    source = prepare(plan, say)
    if origin is None:
        check_all_weights(plan)
    for note in check_processes(plan, source):
        say(f"note: {note}")
    tokenizer = build.policy_tokenizer(plan.rollout)
    size = ranks.training_ranks(plan)
    d, r, t = plan.data, plan.rollout, plan.trainer
    rows = d.train_batch_size * {"samples": r.n, "answers": 1, "pairs": 2, "labels": 2}[plan.learns_from]
    lengths = row_lengths(plan, source, tokenizer)
    longest = max(lengths.sampled, lengths.trained)
    data = "files" if d.train_files else d.task
    lines = [
        f"algorithm   {plan.algorithm} on {data}: {t.total_training_steps} steps, seed {t.seed}",
        f"a step      {d.train_batch_size} prompts, {rows} rows of at most {longest} tokens",
        f"rollout     {_engines(plan)}; temperature {r.temperature:g}, n {r.n}",
        f"driver      {plan.driver.kind}, {ranks.device(plan.driver)}, {size} training "
        f"{'process' if size == 1 else 'processes'}",
        f"folder      {t.dir}",
    ]
    if lag := plan.driver.max_lag:
        steps = "1 step" if lag == 1 else f"{lag} steps"
        correction = getattr(plan.options, "rollout_is", None) or "that of the algorithm"
        lines.append(f"overlap     sampling runs up to {steps} ahead of learning; correction: {correction}")
        if r.in_flight_weight_updates:
            lines.append("            each step's weights reach the engines in the middle of responses")
    for role in plan.roles.values():
        lines += _role_lines(role, plan, size)
    for name, original in plan.copies.items():
        lines.append(f"{name:<11} the frozen base of {original}, no model of its own")
    if plan.driver.device != "cpu":
        lines += _memory_lines(plan, size, gpu or ranks.gpu_memory(ranks.device(plan.driver)))
    return "\n".join(lines)


def _memory_lines(plan: Plan, size: int, gpu: int | None) -> Iterator[str]:
    """Yields the bytes of each phase on the GPU of a rank, and a note where they may be too many."""
    note = check_memory(plan, size, gpu)
    counted = phases(plan, size, gpu)
    room = f"of {gpu / GIB:.2f} GiB" if gpu is not None else "of unknown size (--gpu-memory GIB compares)"
    yield f"memory      by phase, on a GPU {room}; the largest is the {largest(counted).title}"
    for phase in counted:
        yield f"            {phase.title}: {phase.describe()}"
    if plan.rollout.sleeps:
        yield "            the engine sleeps while the ranks compute (rollout.free_cache_engine)"
    if offloads(plan, size, gpu):
        yield "            training states lie on the CPU while the engine generates (rollout.offload_trainer)"
    if note:
        yield f"            note: {note}"


def _engines(plan: Plan) -> str:
    r = plan.rollout
    dtype = compute_dtype(r.dtype, r.folder, ranks.device(plan.driver))
    engine = f"{r.name}, {dtype}, {r.slots} rows at once"
    if plan.driver.kind == "local":
        return engine
    place = "apart from" if r.placement == "apart" else "colocated with"
    return f"{r.engines} x {engine}, {place} the training processes"


def _role_lines(role: RolePlan, plan: Plan, size: int) -> Iterator[str]:
    dtype = compute_dtype(role.dtype, role.folder, ranks.device(plan.driver))
    sizes = model_sizes(role.folder, role.head, Lora(*role.lora) if role.lora else None)
    trained = sizes.trained if role.trained else 0
    layout = role.strategy
    if role.strategy == "fsdp":
        layout = f"fsdp over {size // role.fsdp_config.replicate} of {size} ranks"
        layout += f", sequence parallel {sp}" if (sp := role.fsdp_config.ulysses_sequence_parallel_size) > 1 else ""
    if role.strategy == "megatron":
        m = role.megatron
        layout = f"{'Megatron-FSDP' if m.use_megatron_fsdp else 'megatron'} over {size} ranks: " + ", ".join(
            f"{name} {value}"
            for name, value in (
                ("tensor", m.tensor_model_parallel_size),
                ("pipeline", m.pipeline_model_parallel_size),
                ("context", m.context_parallel_size),
                ("expert", m.expert_model_parallel_size),
            )
        )
    steps = plan.trainer.total_training_steps
    updates = f"{role.total_updates} updates in {steps} steps" if role.trained else "not updated"
    if role.strategy == "megatron" and role.trained and role.megatron.optimizer == "megatron":
        updates += " by Megatron's own distributed optimizer"
    counts = f"{sizes.total:,} parameters, {trained:,} trained"
    yield f"{role.name:<11} {role.folder}: {counts}; {layout}; {dtype}; {updates}"
    counted = role_memory(role, plan, size).own
    parts = [f"{p.name.removeprefix(f'{role.name} ')} {p.nbytes / GIB:.3f}" for p in counted if p.nbytes]
    place = "; parameters and moments stay on the CPU between passes" if role.offload else ""
    yield f"            GiB a rank: {', '.join(parts)}; micro-batches of at most {role.max_tokens:,} tokens{place}"
