"""The bytes that each phase of a step holds on a GPU, as a function of the plan and of the GPU's size.

States, gradients, copies and the engine's share are counted exactly. Activations and logits are estimates for models
that compute with FlashAttention (``Footprint``), and what a process takes for CUDA itself is an allowance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.sizes import FLOAT32, Footprint, parameter_counts, width_of
from verl_fn.backends.protocol import BUCKET_BYTES
from verl_fn.backends.weight_sync.outlet import PARTS
from verl_fn.config import ConfigError, Plan, RolePlan

GIB = 2**30
MOMENTS = 2 * FLOAT32  # AdamW's two averages of a parameter
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


@attrs.frozen
class Part:
    """What one part of a run holds on a GPU in one phase.

    Attributes:
        name: the part.
        nbytes: its bytes.
        lower: the setting that makes it smaller; empty where there is none.
        exact: whether the bytes are counted, not estimated.
    """

    name: str
    nbytes: int
    lower: str = ""
    exact: bool = True


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
    models = [_Model.of(plan.roles[name], plan, ranks) for name in names]
    others = _contexts(plan, ranks)
    staging = _staging(plan)
    movable = "rollout.offload_trainer=true" if plan.rollout.sleeps else ""
    resident = [part for model in models for part in model.resident()]
    at_rest = [] if offload else [part for model in models for part in model.resident(movable)]
    engine = _engine(plan, ranks, gpu)
    # An engine that sleeps wakes its weights for a publication, its cache after it, and neither for the trainer.
    weights, beside = (engine[:1], ()) if plan.rollout.sleeps else (engine, engine)
    if plan.rollout.shares:
        beside = tuple(attrs.evolve(part, lower="rollout.free_cache_engine=true") for part in beside)
    found = [
        Phase(PUBLICATION, (*at_rest, *weights, *staging, *others)),
        Phase(GENERATION, (*at_rest, *engine, *staging, *others)),
    ]
    for model in models:
        if plan.algorithm != "sft":
            found.append(Phase(model.forward_phase, (*resident, *model.forward(), *beside, *staging, *others)))
        if model.role.optim is not None:
            name = f"update_{model.role.name}"
            found.append(Phase(name, (*resident, *model.backward(), *beside, *staging, *others)))
    return tuple(found)


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
    found = phases(plan, ranks, gpu)
    most = max(found, key=lambda phase: phase.exact)
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
    most = largest(found)
    if most.nbytes <= gpu:
        return ""
    return (
        f"the {most.title} may need {most.nbytes / GIB:.2f} GiB, and the GPU has {gpu / GIB:.2f}: "
        f"{most.describe()}; {advice(most, gpu)}"
    )


def largest(found: Sequence[Phase]) -> Phase:
    """Returns the phase with most bytes."""
    return max(found, key=lambda phase: phase.nbytes)


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


@attrs.frozen
class _Model:
    """The bytes of one role on one rank.

    Attributes:
        role: the role's plan.
        total, trained: elements of the whole model, and those that are trained.
        shards: how many ranks share a copy.
        tokens: the most tokens of a micro-batch on a rank, with gradients and without.
        footprint: what passes need.
    """

    role: RolePlan
    total: int
    trained: int
    shards: int
    tokens: tuple[int, int]
    footprint: Footprint

    @classmethod
    def of(cls, role: RolePlan, plan: Plan, ranks: int) -> _Model:
        total, trained = parameter_counts(role.folder, role.head, Lora(*role.lora) if role.lora else None)
        fsdp = role.strategy == "fsdp"
        shared = role.fsdp.ulysses_sequence_parallel_size if fsdp else 1
        prompts = plan.data.train_batch_size
        part = min(getattr(plan.options, "ppo_mini_batch_size", prompts), prompts)
        limits = [role.max_tokens // shared] * 2
        if plan.algorithm != "sft":
            longest = plan.data.max_prompt_length + plan.data.max_response_length
            rows = [count * plan.rollout.n for count in (part, prompts)]
            limits = [min(role.max_tokens, -(-count * shared // ranks) * longest) // shared for count in rows]
        return cls(
            role,
            total,
            trained if role.optim is not None else 0,
            max(1, ranks // role.fsdp.replicate) if fsdp else 1,
            (limits[0], limits[1]),
            Footprint.of(role.folder),
        )

    @property
    def width(self) -> int:
        return width_of(self.role.dtype)

    @property
    def forward_phase(self) -> str:
        if self.role.head == "value":
            return "values" if self.role.optim is not None else "reward"
        return "ref" if self.role.optim is None else "old_log_prob"

    def resident(self, lower: str = "") -> Iterator[Part]:
        """Yields what lies on the GPU between passes.

        Args:
            lower: the setting that makes it smaller; by default that of the role's layout.
        """
        name, lower = self.role.name, lower or self._lower
        if not self.role.offload:
            yield Part(f"{name} parameters", self.total * FLOAT32 // self.shards, lower)
            yield Part(f"{name} moments", self.trained * MOMENTS // self.shards, lower)
            if self.role.strategy != "fsdp" and self.width < FLOAT32:
                yield Part(f"{name} {self.role.dtype} copy", self.total * self.width, lower)

    @property
    def _lower(self) -> str:
        """The settings that make the role's state smaller on each GPU."""
        table = self.role.table
        if self.role.strategy != "fsdp":
            return f"more ranks ({table}.strategy=fsdp, ray.ranks)"
        if self.role.offload:
            return "more ranks (ray.ranks)"
        return f"more ranks (ray.ranks) or {table}.fsdp_config.offload_policy=true"

    def forward(self) -> Iterator[Part]:
        """Yields what a forward pass adds."""
        yield from self._weights()
        yield from self._activations(self.tokens[1], self.footprint.layer(self.tokens[1], self.width))

    def backward(self) -> Iterator[Part]:
        """Yields what an update adds."""
        yield from self._weights()
        yield Part(f"{self.role.name} gradients", self.trained * FLOAT32 // self.shards, self._lower)
        tokens, checkpointing = self.tokens[0], self.role.checkpointing
        yield from self._activations(tokens, self.footprint.kept(tokens, self.width, checkpointing=checkpointing))
        if self.role.head == "lm" and not self.role.lora:
            nbytes = self.footprint.vocab * self.footprint.hidden * FLOAT32
            yield Part("gradient of the output layer", nbytes, exact=False)

    def _weights(self) -> Iterator[Part]:
        """Yields the parameters that a pass brings to the GPU, or gathers there."""
        name, fsdp = self.role.name, self.role.fsdp
        if self.role.offload:
            yield Part(f"{name} parameters", self.total * FLOAT32 // self.shards)
        if self.role.strategy == "fsdp":
            whole = self.total
            if fsdp.reshard_after_forward:
                ends = self.footprint.vocab * self.footprint.hidden
                # One layer computes while the next one is gathered.
                whole = min(whole, ends + 2 * max(0, whole - ends) // self.footprint.layers)
            setting = f"{self.role.table}.fsdp_config.reshard_after_forward=true"
            lower = "" if fsdp.reshard_after_forward else setting
            yield Part(f"{name} gathered layers", whole * self.width, lower, exact=False)

    def _activations(self, tokens: int, nbytes: int) -> Iterator[Part]:
        role = self.role
        shared = role.fsdp.ulysses_sequence_parallel_size if role.strategy == "fsdp" else 1
        lower = f"lower {role.table}.ppo_max_token_len_per_gpu ({role.max_tokens // shared:,} now)"
        other = "" if role.checkpointing else f" or set {role.table}.enable_gradient_checkpointing=true"
        yield Part(f"activations of {tokens:,} tokens", nbytes, lower + other, exact=False)
        if role.head == "lm":
            yield Part("logits", self.footprint.logits(tokens, self.width), lower, exact=False)


def share(plan: Plan, gpu: int | None) -> int:
    """Returns the bytes that one vLLM engine may take of a GPU; 0 where that is unknown, or for other engines."""
    return int(plan.rollout.gpu_memory_utilization * gpu) if gpu is not None and plan.rollout.name == "vllm" else 0


def _weights(plan: Plan) -> int:
    r = plan.rollout
    return parameter_counts(r.folder, "lm")[0] * width_of(r.dtype) // r.tensor_parallel_size


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
    cache = Footprint.of(r.folder).cache(rows * row, width_of(r.dtype))
    slots = f"lower rollout.slots ({r.slots} now)"
    return (
        Part("engine weights", count * weights, "rollout.dtype=bfloat16"),
        Part("engine cache", count * cache, slots),
    )


def _staging(plan: Plan) -> tuple[Part, ...]:
    """Returns the buckets through which weights go to engines of other processes."""
    if plan.driver.kind == "local":
        return ()
    return (Part("buckets of a publication", min(BUCKET_BYTES, PARTS * _weights(plan))),)


def _contexts(plan: Plan, ranks: int) -> tuple[Part, ...]:
    """Returns the allowance for the processes that use the GPU."""
    processes = 1 if plan.driver.kind == "local" else 1 + _count(plan, ranks)
    return (Part("CUDA itself", processes * CONTEXT, exact=False),)
