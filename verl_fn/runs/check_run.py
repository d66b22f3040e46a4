"""What a run would do and need, before a GPU is touched: ``verl-fn train --check``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl_fn.backends.hf.folder import read_config
from verl_fn.backends.hf.lora import Lora, target_layers
from verl_fn.config import Plan, RolePlan
from verl_fn.driver import build, ranks

from .checks import row_lengths
from .prepare import prepare

GIB = 2**30
FLOAT32, ADAM = 4, 8


def check_run(plan: Plan) -> str:
    """Checks a plan as a run would, and describes it.

    Returns:
        Lines on the algorithm, the rows and updates of a step, and for each role its layout and its bytes a rank.

    Raises:
        UserError: the run could not begin.
    """
    source = prepare(plan, print)
    tokenizer = build.tokenizer(plan.model)
    size = ranks.training_ranks(plan)
    d, r, t = plan.data, plan.rollout, plan.trainer
    rows = d.train_batch_size * (1 if plan.algorithm == "sft" else r.n)
    longest, trained, _ = row_lengths(plan, source, tokenizer)
    origin = "files" if d.train_files else d.task
    lines = [
        f"algorithm   {plan.algorithm} on {origin}: {t.total_training_steps} steps, seed {t.seed}",
        f"a step      {d.train_batch_size} prompts, {rows} rows of at most {max(longest, trained)} tokens",
        f"rollout     {r.name}, {r.dtype}, {r.slots} rows at once; temperature {r.temperature:g}, n {r.n}",
        f"driver      {plan.driver.kind}, {ranks.device(plan.driver)}, {size} training "
        f"{'process' if size == 1 else 'processes'}",
        f"folder      {t.dir}",
    ]
    for role in plan.roles.values():
        lines += _role_lines(role, size, t.total_training_steps)
    for name, of in plan.copies.items():
        lines.append(f"{name:<11} the frozen base of {of}, no model of its own")
    return "\n".join(lines)


def _role_lines(role: RolePlan, size: int, steps: int) -> Iterator[str]:
    total, trained = parameter_counts(role)
    shards = size // role.fsdp.replicate if role.strategy == "fsdp" else 1
    layout = role.strategy
    if role.strategy == "fsdp":
        layout = f"fsdp over {shards} of {size} ranks"
        layout += f", sequence parallel {sp}" if (sp := role.fsdp.ulysses_sequence_parallel_size) > 1 else ""
    updates = f"{role.total_updates} updates in {steps} steps" if role.optim is not None else "not updated"
    yield f"{role.name:<11} {role.folder}: {total:,} parameters, {trained:,} trained; {layout}; {updates}"
    parts = {"parameters": total * FLOAT32, "gradients": trained * FLOAT32, "moments": trained * ADAM}
    if role.dtype == "bfloat16":
        parts["bfloat16 copy"] = total * 2
    sizes = ", ".join(f"{name} {count / shards / GIB:.3f}" for name, count in parts.items() if count)
    place = "; parameters and moments stay on the CPU between passes" if role.offload else ""
    yield f"            GiB a rank: {sizes}; micro-batches of at most {role.max_tokens:,} tokens{place}"


def parameter_counts(role: RolePlan) -> tuple[int, int]:
    """Counts the elements of a role's model, and those that are trained, without its weights."""
    import transformers

    config = read_config(role.folder)
    auto = transformers.AutoModelForCausalLM
    if role.head == "value":
        auto, config.num_labels = transformers.AutoModelForTokenClassification, 1
    with torch.device("meta"):
        model = auto.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    if role.optim is None:
        return total, 0
    if role.lora is None:
        return total, total
    lora = Lora(*role.lora)
    if role.head == "lm":
        output, head = model.get_output_embeddings(), 0
    else:
        output = next(getattr(model, name) for name in ("score", "classifier") if hasattr(model, name))
        head = sum(p.numel() for p in output.parameters())
    layers = target_layers(model, lora, output, role.folder)
    adapters = sum(lora.rank * sum(model.get_submodule(name).weight.shape) for name in layers)
    return total + adapters, adapters + head
