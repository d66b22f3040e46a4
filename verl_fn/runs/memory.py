"""The bytes that each phase of a step holds on a GPU, as a function of the plan and of the GPU's size.

States, gradients, copies and the engine's share are counted exactly. Activations and logits are estimates for models
that compute with FlashAttention (``Footprint``), and what a process takes for CUDA itself is an allowance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from verl_fn.backends.hf.config import compute_dtype
from verl_fn.backends.hf.sizes import Footprint, parameter_counts, width_of
from verl_fn.backends.protocol import BUCKET_BYTES
from verl_fn.backends.weight_sync.staging import SLOTS
from verl_fn.config import ConfigError, Plan

from .role_memory import Part, RoleMemory

GIB = 2**30
CONTEXT = GIB  # what CUDA, its libraries and captured graphs take in a process
GENERATION, PUBLICATION = "gen", "update_weights"
# What the phases of verl's timing metrics are for.
TITLES = {
    GENERATION: "generation",
    PUBLICATION: "publication",
    "old_log_prob": "log-probs",
    "ref": "log-probs of the reference",
    "values": "values",
    "reward": "scores of the reward model",
    "update_actor": "update of the actor",
    "update_critic": "update of the critic",
}


def _present(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.nbytes)


@attrs.frozen
class Phase:
    """The parts that lie on a GPU in one phase of a step.

    Attributes:
        name: the phase, as in ``timing_s/*``.
        parts: those with bytes.
    """

    name: str
    parts: tuple[Part, ...] = attrs.field(converter=_present)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def exact(self) -> int:
        """The bytes of the parts that are counted exactly."""
        return sum(part.nbytes for part in self.parts if part.exact)

    @property
    def title(self) -> str:
        """What the phase is for."""
        return TITLES.get(self.name, self.name)

    def describe(self) -> str:
        """Returns the parts and their sum, in GiB.

        Example:
            >>> Phase("gen", (Part("engine", 3 * GIB), Part("actor parameters", GIB))).describe()
            'engine 3.00, actor parameters 1.00 = 4.00 GiB'
        """
        parts = ", ".join(f"{part.name} {part.nbytes / GIB:.2f}" for part in self.parts)
        return f"{parts} = {self.nbytes / GIB:.2f} GiB"


def phases(plan: Plan, ranks: int, gpu: int | None = None, *, offload: bool | None = None) -> tuple[Phase, ...]:
    """Returns the phases of a step on the GPU of a training rank, with all that shares it.

    Roles of ``ray.separate`` and engines that are placed apart have GPUs of their own and are not counted.

    Args:
        plan: the plan.
        ranks: how many ranks train.
        gpu: bytes of the GPU; None where it is unknown, and vLLM's cache then counts nothing.
        offload: whether the training states lie on the CPU while the engine generates; by default as
            ``offloads`` says.
    """
    offload = offloads(plan, ranks, gpu) if offload is None else offload
    names = [name for name in plan.roles if name not in plan.ray.separate or plan.driver.kind != "ray"]
    models = [RoleMemory.of(plan.roles[name], plan, ranks) for name in names]
    others = _contexts(plan, ranks)
    staging = _staging(plan)
    exchange = [part for model in models if model.role.name == "actor" for part in model.exchange()]
    movable = "rollout.offload_trainer=true" if plan.rollout.sleeps else ""
    buffers = [part for model in models for part in model.buffers()]
    resident = [*(part for model in models for part in model.resident()), *buffers]
    at_rest = [] if offload else [part for model in models for part in model.resident(movable)]
    if not plan.rollout.sleeps:
        at_rest += buffers
    engine = _engine(plan, ranks, gpu)
    # An engine that sleeps wakes its weights for a publication, its cache after it, and neither for the trainer.
    weights, beside = (engine[:1], ()) if plan.rollout.sleeps else (engine, engine)
    if plan.rollout.shares:
        beside = tuple(attrs.evolve(part, lower="rollout.free_cache_engine=true") for part in beside)
    counted = [
        Phase(PUBLICATION, (*at_rest, *weights, *staging, *exchange, *others)),
        Phase(GENERATION, (*at_rest, *engine, *staging, *others)),
    ]
    for model in models:
        if plan.algorithm != "sft":
            counted.append(Phase(model.forward_phase, (*resident, *model.forward(), *beside, *staging, *others)))
        if model.role.optim is not None:
            name = f"update_{model.role.name}"
            counted.append(Phase(name, (*resident, *model.backward(), *beside, *staging, *others)))
    return tuple(counted)


def offloads(plan: Plan, ranks: int, gpu: int | None) -> bool:
    """Returns whether the training states lie on the CPU while the engine generates.

    ``rollout.offload_trainer`` decides. Where it is not set, they do if they do not fit beside the engine. Beside an
    engine that never sleeps they would have to fit anyway.
    """
    r = plan.rollout
    if not r.sleeps or r.offload_trainer is not None:
        return r.sleeps and bool(r.offload_trainer)
    generation = [p for p in phases(plan, ranks, gpu, offload=False) if p.name == GENERATION]
    return gpu is not None and any(phase.nbytes > gpu for phase in generation)


def check_memory(plan: Plan, ranks: int, gpu: int | None) -> str:
    """Returns a sentence about a phase whose estimate is larger than the GPU; empty if there is none.

    Raises:
        ConfigError: what is counted exactly is larger than the GPU, so that the run cannot succeed.
    """
    if gpu is None:
        return ""
    counted = phases(plan, ranks, gpu)
    most = max(counted, key=lambda phase: phase.exact)
    if most.exact > gpu:
        raise ConfigError(
            f"the {most.title} needs at least {most.exact / GIB:.2f} GiB, and the GPU has {gpu / GIB:.2f}: "
            f"{most.describe()}; {advice(most, gpu)}"
        )
    if (engine := share(plan, gpu)) and (need := _weights(plan)) > engine:
        raise ConfigError(
            f"rollout.gpu_memory_utilization = {plan.rollout.gpu_memory_utilization:g} is {engine / GIB:.2f} GiB of "
            f"this GPU, and the engine's weights alone take {need / GIB:.2f}; raise it"
        )
    most = largest(counted)
    if most.nbytes <= gpu:
        return ""
    return (
        f"the {most.title} may need {most.nbytes / GIB:.2f} GiB, and the GPU has {gpu / GIB:.2f}: "
        f"{most.describe()}; {advice(most, gpu)}"
    )


def largest(counted: Sequence[Phase]) -> Phase:
    """Returns the phase with most bytes."""
    return max(counted, key=lambda phase: phase.nbytes)


def advice(phase: Phase, gpu: int | None = None) -> str:
    """Returns the settings to lower in a phase: those of its largest parts, the largest first.

    Args:
        phase: the phase.
        gpu: bytes of the GPU; parts of less than a twentieth of it are left out.

    Example:
        >>> advice(Phase("gen", (Part("a", 10, "lower x"), Part("b", 90, "lower y"), Part("c", 50))))
        'lower y; or lower x'
    """
    least = (gpu or phase.nbytes) / 20
    parts = sorted((part for part in phase.parts if part.lower), key=lambda part: -part.nbytes)
    settings = dict.fromkeys(part.lower for part in parts if part.nbytes >= least or part is parts[0])
    return "; or ".join(list(settings)[:3])


def share(plan: Plan, gpu: int | None) -> int:
    """Returns the bytes that one vLLM engine may take of a GPU; 0 where that is unknown, or for other engines."""
    return int(plan.rollout.gpu_memory_utilization * gpu) if gpu is not None and plan.rollout.name == "vllm" else 0


def _weights(plan: Plan) -> int:
    r = plan.rollout
    return parameter_counts(r.folder, "lm")[0] * _width(plan) // r.tensor_parallel_size


def _width(plan: Plan) -> int:
    """Returns the bytes of an element of the engine's weights and cache."""
    return width_of(compute_dtype(plan.rollout.dtype, plan.rollout.folder, "cuda"))


def _count(plan: Plan, ranks: int) -> int:
    """Returns how many engines share the GPU of a training rank."""
    if plan.driver.kind == "local":
        return 1
    return -(-plan.rollout.engines // ranks) if plan.rollout.placement == "colocated" else 0


def _engine(plan: Plan, ranks: int, gpu: int | None) -> tuple[Part, ...]:
    """Returns the parts of the engines that share the GPU of a training rank, the weights first."""
    r, count = plan.rollout, _count(plan, ranks)
    if not count:
        return ()
    weights = _weights(plan)
    utilization = f"lower rollout.gpu_memory_utilization ({r.gpu_memory_utilization:g} now)"
    if r.name == "vllm":
        rest = max(0, share(plan, gpu) - weights)
        return (
            Part("engine weights", count * weights, "rollout.dtype=bfloat16"),
            Part("engine cache and computation", count * rest, utilization),
        )
    row = r.max_prompt_length + r.max_response_length
    rows = min(r.slots, plan.data.train_batch_size * r.n)
    cache = Footprint.of(r.folder).cache(rows * row, _width(plan))
    slots = f"lower rollout.slots ({r.slots} now)"
    return (
        Part("engine weights", count * weights, "rollout.dtype=bfloat16"),
        Part("engine cache", count * cache, slots),
    )


def _staging(plan: Plan) -> tuple[Part, ...]:
    """Returns the buckets through which weights go to engines of other processes."""
    if plan.driver.kind == "local":
        return ()
    return (Part("buckets of a publication", min(BUCKET_BYTES, SLOTS * _weights(plan))),)


def _contexts(plan: Plan, ranks: int) -> tuple[Part, ...]:
    """Returns the allowance for the processes that use the GPU."""
    processes = 1 if plan.driver.kind == "local" else 1 + _count(plan, ranks)
    return (Part("CUDA itself", processes * CONTEXT, exact=False),)
