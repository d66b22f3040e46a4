"""The rollout engine as far as the config leaves it open: which one, its share of a GPU, its rows at once."""

from __future__ import annotations

import attrs

from verl_fn import build
from verl_fn.backends.hf.sizes import model_sizes
from verl_fn.config import Plan
from verl_fn.config.plan import SHARE, SLOTS
from verl_fn.driver import ranks

from .memory import GENERATION, GIB, PUBLICATION, element_width, engine_weights, largest, phases, share

# What is chosen leaves a twentieth of the GPU to what activations take beyond their estimate.
FILLED = 0.95
MOST_SHARE, MOST_SLOTS = 0.9, 1024
SHARES = [percent / 100 for percent in range(round(100 * MOST_SHARE), 0, -5)]
# What vLLM takes beside weights and cache: activations of prompts, logits of its rows and recorded graphs.
COMPUTATION = 4 * GIB


def with_engine(plan: Plan) -> Plan:
    """Returns the plan with the faster engine if ``rollout.name`` is auto.

    On GPUs over Ray, this is vLLM for models that the embedded engine decodes without graphs, for engines that take
    several GPUs, and for adapters that are published alone; in all other cases the embedded engine.

    Raises:
        ModelError: the model's folder or architecture cannot be used.
    """
    r = plan.rollout
    if r.name != "auto":
        return plan
    in_one_process = plan.driver.kind != "ray" or build.device(plan.driver) == "cpu"
    if r.tensor_parallel_size > 1 or r.lora is not None:
        return plan.with_engine("vllm")
    if in_one_process or r.exact != "off" or plan.new_model is not None:
        return plan.with_engine("sampler")
    from verl_fn.backends.sampler.llama import misfit
    from verl_fn.backends.serving import model_of

    skeleton, shapes = model_of(r.folder)
    fast = not skeleton.padded and misfit(skeleton.config, shapes) is None
    return plan.with_engine("sampler" if fast or skeleton.family is not None else "vllm")


def sized(plan: Plan, gpu: int | None) -> Plan:
    """Returns the plan with an engine as large as its GPU and its rows ask for, if the config leaves that open.

    vLLM's share of the GPU is the smallest one, in steps of 0.05 and at least 0.5, whose cache holds all rows that an
    engine gets in a step, or else the largest one that fits; engines that are placed apart take 0.9. All rows are
    decoded at once, up to 1,024, as far as the cache holds them at their longest.

    Args:
        plan: the plan.
        gpu: bytes of a GPU; None if there is none or it is unknown, and the plan then stays as it is.
    """
    if gpu is None or plan.learns_from != "samples":
        return plan
    asked = plan.table.get("rollout", {})
    if plan.rollout.name == "vllm" and asked.get("gpu_memory_utilization") is None:
        plan = _with_share(plan, _share(plan, gpu))
    return _with_slots(plan, _slots(plan, gpu)) if asked.get("slots") is None else plan


def rows_of_engine(plan: Plan) -> int:
    """Returns the most rows that one engine draws in a step."""
    return -(-plan.data.train_batch_size * plan.rollout.n // plan.rollout.engines)


def cached_rows(plan: Plan, gpu: int) -> int:
    """Returns how many rows of the greatest length the cache of a vLLM engine holds."""
    r = plan.rollout
    row = model_sizes(r.folder, "lm").cache(r.longest, element_width(plan)) // r.tensor_parallel_size
    return max(0, share(plan, gpu) - engine_weights(plan)) // max(1, row)


def fits(plan: Plan, gpu: int, filled: float = 1.0) -> bool:
    """Returns whether all phases fit into a part of the GPU, and the engine's weights into its share of it."""
    served = not (of_engine := share(plan, gpu)) or engine_weights(plan) <= of_engine
    return served and largest(phases(plan, ranks.training_ranks(plan), gpu)).nbytes <= filled * gpu


def largest_share(plan: Plan, gpu: int) -> float | None:
    """Returns the largest share of a GPU with which vLLM fits beside what else is there; None if none does."""
    return next((one for one in SHARES if fits(_with_share(plan, one), gpu, FILLED)), None)


def largest_slots(plan: Plan, gpu: int) -> int | None:
    """Returns the most rows at once, a part of the rows of a step, with which the embedded engine fits; or None."""
    slots = min(rows_of_engine(plan), MOST_SLOTS)
    while slots and not fits(_with_slots(plan, slots), gpu, FILLED):
        slots = slots * 3 // 4
    return slots or None


def _with_share(plan: Plan, share: float) -> Plan:
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, gpu_memory_utilization=share))


def _with_slots(plan: Plan, slots: int) -> Plan:
    return attrs.evolve(plan, rollout=attrs.evolve(plan.rollout, slots=slots))


def _share(plan: Plan, gpu: int) -> float:
    r = plan.rollout
    if r.placement == "apart":
        return MOST_SHARE
    row = model_sizes(r.folder, "lm").cache(r.longest, element_width(plan)) // r.tensor_parallel_size
    rows = min(rows_of_engine(plan), MOST_SLOTS)
    needed = -(-100 * (engine_weights(plan) + rows * row + COMPUTATION) // gpu)
    target = max(SHARE, -(-needed // 5) * 5 / 100)
    fitting = (one for one in SHARES if _generates(_with_share(plan, one), gpu))
    return min(target, next(fitting, SHARE))


def _generates(plan: Plan, gpu: int) -> bool:
    """Returns whether the phases in which the engine is awake fit; if others do not, the trainer has to change."""
    awake = (GENERATION, PUBLICATION) if plan.rollout.sleeps else None
    counted = phases(plan, ranks.training_ranks(plan), gpu)
    most = max(phase.nbytes for phase in counted if awake is None or phase.name in awake)
    return engine_weights(plan) < share(plan, gpu) and most <= FILLED * gpu


def _slots(plan: Plan, gpu: int) -> int:
    if plan.rollout.name != "vllm":
        return largest_slots(plan, gpu) or SLOTS
    rows = min(rows_of_engine(plan), MOST_SLOTS)
    return max(SLOTS, min(rows, cached_rows(plan, gpu)))
