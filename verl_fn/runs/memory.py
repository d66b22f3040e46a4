"""The bytes that a run needs on the GPU of a training rank, and the error of a run that has too few.

How large a model is and what its passes need is known without its weights. States, gradients, copies of the
parameters and the engine's share are counted exactly. Activations are one estimate for models that compute with
FlashAttention (``ModelSizes``), and what a process takes for CUDA is an allowance.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.hf.config import compute_dtype, head_dim, kv_heads
from verl_fn.backends.hf.folder import hollow
from verl_fn.backends.hf.logprobs import CUDA_CHUNK
from verl_fn.backends.hf.lora import Lora, target_layers
from verl_fn.backends.hf.skeleton import DTYPES
from verl_fn.backends.memory import PhaseOutOfMemory, lacks_memory, reason_of
from verl_fn.config import ConfigError, Plan, RolePlan, RolloutPlan
from verl_fn.driver.ranks import training_ranks
from verl_fn.errors import UserError
from verl_fn.state import Key

GIB = 2**30
CONTEXT = GIB  # what CUDA, its libraries, captured graphs and buffers for weights take in a process
FLOAT32 = 4
START, GENERATION, PUBLICATION = "start", "gen", "update_weights"
# What the phases of verl's timing metrics are for.
TITLES = {
    START: "start",
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
class ModelSizes:
    """The elements of a model, and an estimate of the bytes that its passes take on a GPU.

    A layer keeps for its backward pass, per token, the inputs and outputs of its two norms, queries, keys, values
    and the output of attention, and the gate, the input and the output of its MLP. FlashAttention keeps no scores.
    Each rank of tensor parallelism has its part of queries, keys, values and MLP, and with sequence parallelism also
    its part of what norms take and give.
    Peaks measured on H200s are within 6 % of these counts
    (``benchmarks/results/throughput_megatron_h200_*_fused.json``, ``residency_megatron_h200_1.5b_*.json``).

    Attributes:
        total: elements of all parameters, adapters included.
        trained: elements that training changes, adapters included.
        experts: elements of the experts of all layers.
        ends: elements outside of layers: embeddings, output layer and last norm.
        adapted: elements of the weights that adapters are added to.
        buffers: elements of the buffers that a model's files contain.
        tower: elements of the layers of the module that sees images.
        config: the config of the text model.

    Source:
        Korthikanti et al. 2022, arXiv 2205.05198, section 4, counts the same for another MLP.
    """

    total: int
    trained: int
    experts: int
    ends: int
    adapted: int
    buffers: int
    tower: int
    config: Any = attrs.field(repr=False, eq=False)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def key_value(self) -> int:
        """The width of the keys, or of the values, of all heads."""
        return kv_heads(self.config) * head_dim(self.config)

    def layer(self, tokens: int, width: int, *, tp: int = 1, sp: bool = False) -> int:
        """Returns the bytes that a layer keeps for its backward pass, with elements of ``width`` bytes.

        Args:
            tp: the ranks of tensor parallelism.
            sp: whether they split tokens, too.
        """
        text = self.config
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        if (experts := getattr(text, "num_experts_per_tok", None)) is not None:
            inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
        query = text.num_attention_heads * head_dim(text)
        norms, between = 4 * text.hidden_size, 2 * query + 2 * self.key_value + 3 * inner
        return int(tokens * width * (norms // (tp if sp else 1) + between // tp))

    def kept(
        self, tokens: int, width: int, *, checkpointing: bool, offload: bool = False, tp: int = 1, sp: bool = False
    ) -> int:
        """Returns the bytes that all layers keep; with checkpointing their inputs only, and all of one layer.

        With ``offload`` the inputs are in host memory, but for the ones of two layers.
        """
        layer = self.layer(tokens, width, tp=tp, sp=sp)
        if checkpointing:
            inputs = min(2, self.layers) if offload else self.layers
            return inputs * tokens * width * int(self.config.hidden_size) // (tp if sp else 1) + layer
        return self.layers * layer

    def logits(self, tokens: int, width: int, tp: int = 1) -> int:
        """Returns the bytes of the largest part of the logits that exists at a time, on a GPU."""
        vocab = int(self.config.vocab_size) // tp
        return min(tokens, max(16, CUDA_CHUNK // vocab)) * vocab * width

    def cache(self, tokens: int, width: int) -> int:
        """Returns the bytes of the keys and values of ``tokens`` tokens."""
        return tokens * width * 2 * self.layers * self.key_value


def model_sizes(folder: str | Path, head: str, lora: Lora | None = None, *, freeze_tower: bool = False) -> ModelSizes:
    """Counts the elements of a model, adapters included.

    Args:
        folder: a Hugging Face model folder; its weights are not read.
        head: ``lm``, or ``value`` for a scalar head.
        lora: the adapters; training changes them and a value head only.
        freeze_tower: training does not change the module that sees images, and it has no adapters.
    """
    config = Path(folder, "config.json")
    return _model_sizes(folder, head, lora, freeze_tower, config.read_bytes() if config.is_file() else b"")


# To make a model without weights takes long, and a run asks several times. `config`: the contents of config.json.
@functools.lru_cache(maxsize=64)
def _model_sizes(folder: str | Path, head: str, lora: Lora | None, freeze_tower: bool, config: bytes) -> ModelSizes:
    skeleton = hollow(folder, head, key=Key.from_seed(0), freeze_tower=freeze_tower).skeleton
    model, output = skeleton.model, skeleton.output_layer
    counts = {name: p.numel() for name, p in model.named_parameters()}
    total, adapted = sum(counts.values()), 0
    trained = total - sum(counts[name] for name in skeleton.frozen_names)
    if lora is not None:
        layers = target_layers(model, lora, output, folder, without=skeleton.tower if freeze_tower else None)
        weights = [model.get_submodule(name).weight for name in layers]
        adapters, adapted = sum(lora.rank * sum(w.shape) for w in weights), sum(w.numel() for w in weights)
        total += adapters
        trained = adapters + (sum(p.numel() for p in output.parameters()) if head == "value" else 0)
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    ends = sum(count for name, count in counts.items() if not re.search(r"\.\d+\.", name))
    buffers = sum(b.numel() for b in skeleton.constants.values())
    seeing = set() if skeleton.tower is None else set(skeleton.tower.parameters())
    tower = sum(p.numel() for name, p in model.named_parameters() if p in seeing and re.search(r"\.\d+\.", name))
    return ModelSizes(total, trained, experts, ends, adapted, buffers, tower, model.config.get_text_config())


def sizes_of(role: RolePlan) -> ModelSizes:
    """Counts the elements of a role's model."""
    lora = Lora(*role.lora) if role.lora else None
    return model_sizes(role.folder, role.head, lora, freeze_tower=role.freeze_vision_tower)


def width_of(dtype: str) -> int:
    """Returns the bytes of an element.

    Example:
        >>> width_of("bfloat16")
        2
    """
    return DTYPES[dtype].itemsize


class RunOutOfMemory(UserError, RuntimeError):
    """A run ended because a device had too little memory."""


@attrs.frozen
class Allocation:
    """The bytes of one part of a run on a GPU.

    Attributes:
        lower: the setting that makes it smaller; empty if there is none.
        exact: whether the bytes are counted, not estimated.
    """

    name: str
    nbytes: int
    lower: str = ""
    exact: bool = True


def _present(parts: Iterable[Allocation]) -> tuple[Allocation, ...]:
    return tuple(part for part in parts if part.nbytes)


@attrs.frozen
class Phase:
    """The parts that lie on a GPU in one phase of a step.

    Attributes:
        name: the phase, as in ``timing_s/*``.
        parts: the parts with bytes.
    """

    name: str
    parts: tuple[Allocation, ...] = attrs.field(converter=_present)

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
            >>> Phase("gen", (Allocation("engine", 3 * GIB), Allocation("actor parameters", GIB))).describe()
            'engine 3.00, actor parameters 1.00 = 4.00 GiB'
        """
        parts = ", ".join(f"{part.name} {part.nbytes / GIB:.2f}" for part in self.parts)
        return f"{parts} = {self.nbytes / GIB:.2f} GiB"


@attrs.frozen
class RoleMemory:
    """What one role has on the GPU of a training rank.

    Attributes:
        own: parameters, gradients, moments, the copy that computes and Megatron's buffer, wherever they lie.
        loaded: what lies on the GPU once the role's folder has been read, even if it moves to the CPU then.
        state: what lies on the GPU between passes, unless the trainer offloads it while the engine generates.
        buffers: what Megatron keeps between passes, and gives back before an engine wakes.
        phases: the phases in which the role computes, each with what it adds.
    """

    own: tuple[Allocation, ...]
    loaded: tuple[Allocation, ...]
    state: tuple[Allocation, ...]
    buffers: tuple[Allocation, ...]
    phases: tuple[Phase, ...]


def role_memory(role: RolePlan, plan: Plan, device: str = "cuda") -> RoleMemory:
    """Counts the bytes of a role on one of the ranks that train it.

    Args:
        device: ``cpu`` or ``cuda``, by which the dtype is chosen if the config names none.
    """
    sizes, ranks = sizes_of(role), training_ranks(plan)
    dtype = _dtype_of(role, device)
    width, name, lower = width_of(dtype), role.name, _state_setting(role)
    own, own_trained, held, held_trained, layers = _elements(role, sizes, ranks, width)
    # Frozen weights lie in the dtype that computes them.
    frozen = own - own_trained if role.lora or not role.trained else 0
    parameters = Allocation(f"{name} parameters", frozen * width + (own - frozen) * FLOAT32, lower)
    moments = Allocation(f"{name} moments", own_trained * moment_bytes(role), lower)
    gradients = Allocation(f"{name} gradients", own_trained * FLOAT32, lower)
    copy = Allocation(f"{name} {dtype} copy", held * width, lower)
    buffer = Allocation(f"{name} gradient buffer", held_trained * FLOAT32, lower)
    free = "" if role.fsdp_config.reshard_after_forward else f"{role.table}.fsdp_config.reshard_after_forward=true"
    gathered = Allocation(
        f"{name} gathered layers", layers * width, free if role.strategy == "fsdp" else "", exact=False
    )
    whole = Allocation(f"{name} gathered gradients", _gathered_gradients(role, sizes, plan, ranks), free, exact=False)
    passing = (*((parameters,) if role.offload else ()), gathered)
    forward, backward = _activations(role, sizes, _tokens(role, plan), width)
    phases = []
    if plan.algorithm != "sft":
        names = ("values", "reward") if role.head == "value" else ("old_log_prob", "ref")
        phases.append(Phase(names[not role.trained], (*passing, forward)))
    if role.trained:
        added: tuple[Allocation, ...] = (gradients, whole, backward)
        if role.strategy == "megatron":
            # Its buffer is copied into gradients once the backward pass has freed its activations.
            added = (max(added, key=lambda part: part.nbytes),)
        phases.append(Phase(f"update_{name}", (*passing, *added)))
    state = (parameters, moments, *((copy,) if role.strategy == "local" else ()))
    return RoleMemory(
        own=(parameters, gradients, moments, copy, buffer),
        loaded=(parameters, moments),
        state=() if role.offload else state,
        buffers=(copy, buffer) if role.strategy == "megatron" else (),
        phases=tuple(phases),
    )


def moment_bytes(role: RolePlan) -> int:
    """Returns the bytes of AdamW's two averages of a parameter."""
    return 2 * width_of(role.optim.moments_dtype)


def _activations(role: RolePlan, sizes: ModelSizes, tokens: int, width: int) -> tuple[Allocation, Allocation]:
    """Returns what a forward pass keeps on a rank, and what an update keeps."""
    lower = f"lower {role.table}.ppo_max_token_len_per_gpu ({role.max_tokens // role.sharers:,} now)"
    if not role.enable_gradient_checkpointing:
        lower += f" or set {role.table}.enable_gradient_checkpointing=true"
    elif role.recomputes and not role.offload_activations:
        lower += f" or set {role.table}.enable_activation_offload=true"
    m = role.megatron
    tp, sp = (m.tensor_model_parallel_size, m.sequence_parallel) if role.strategy == "megatron" else (1, False)
    logits = sizes.logits(tokens, width, tp) if role.head == "lm" else 0
    how = {"checkpointing": role.enable_gradient_checkpointing, "offload": role.offload_activations}
    kept = sizes.layer(tokens, width, tp=tp, sp=sp), sizes.kept(tokens, width, **how, tp=tp, sp=sp)
    forward, backward = (
        Allocation(f"activations of {tokens:,} tokens", n + logits, lower, exact=False) for n in kept
    )
    return forward, backward


def _state_setting(role: RolePlan) -> str:
    """Returns the settings that make the role's state smaller on each GPU."""
    if role.strategy == "megatron":
        return f"more ranks (ray.ranks) or a larger {role.table}.megatron.tensor_model_parallel_size"
    if role.strategy != "fsdp":
        return f"more ranks ({role.table}.strategy=fsdp, ray.ranks)"
    offload = "" if role.offload else f" or {role.table}.fsdp_config.offload_policy=true"
    return f"more ranks (ray.ranks){offload}"


def _gathered_gradients(role: RolePlan, sizes: ModelSizes, plan: Plan, ranks: int) -> int:
    """Returns the bytes of whole gradients that a rank of FSDP keeps until the last micro-batch of an update."""
    batch, options = plan.data.train_batch_size, plan.options
    prompts = min(getattr(options, "ppo_mini_batch_size", 0) or batch, batch)
    rows = -(-prompts * plan.rollout.n * role.sharers // ranks)
    # What data holds is not limited by the config.
    several = plan.learns_from != "samples" or rows * plan.rollout.longest > role.max_tokens
    if role.strategy != "fsdp" or role.fsdp_config.reshard_after_forward or ranks == 1 or not several:
        return 0
    # The ends of a model are summed together, in a buffer of their own, unless they are frozen.
    return (sizes.trained + (0 if role.lora else sizes.ends)) * width_of(role.fsdp_config.reduce_dtype)


def _tokens(role: RolePlan, plan: Plan) -> int:
    """Returns the most tokens of a micro-batch on a rank."""
    most = role.ppo_max_token_len_per_gpu
    return most if plan.algorithm == "sft" else min(most, step_tokens(role, plan))


def step_tokens(role: RolePlan, plan: Plan) -> int:
    """Returns the most tokens that a rank has of a step's rows."""
    split = 1
    if role.strategy == "megatron":
        split = role.megatron.tensor_model_parallel_size * role.megatron.pipeline_model_parallel_size
    rows = -(-plan.data.train_batch_size * plan.rollout.n * role.sharers * split // training_ranks(plan))
    return rows * plan.rollout.longest // role.sharers


def _elements(role: RolePlan, sizes: ModelSizes, ranks: int, width: int) -> tuple[int, int, int, int, int]:
    """Counts the elements of a model on a rank; norms of Megatron count as if they were split.

    Returns:
        Elements of the state, trained elements of the state, elements in the dtype that computes, elements in
        Megatron's buffer of gradients, and elements that ranks gather for a pass.
    """
    trained = sizes.trained if role.trained else 0
    # One layer computes while the next one is gathered.
    two_layers = 2 * (sizes.total - sizes.ends) // sizes.layers
    if role.strategy == "local":
        cast = sizes.trained if role.lora else trained
        return sizes.total, trained, cast if width < FLOAT32 else 0, 0, 0
    if role.strategy == "fsdp":
        shards = max(1, ranks // role.fsdp_config.replicate)
        few = min(sizes.total, sizes.ends + two_layers)
        gathered = few if role.fsdp_config.reshard_after_forward else sizes.total
        return sizes.total // shards, trained // shards, 0, 0, gathered
    m = role.megatron
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    adapters = sizes.trained if role.lora else 0
    layers = sizes.total - adapters - sizes.ends - sizes.experts
    # The first of several stages has the embedding and the last one the output layer, or a copy of a tied embedding.
    ends = sizes.ends
    if pp > 1 and role.head == "lm" and not getattr(sizes.config, "tie_word_embeddings", False):
        ends //= 2
    own = (layers + sizes.experts + ends * pp + adapters) // ranks
    experts = sizes.experts // (m.expert_model_parallel_size * pp)
    # Ranks of tensor parallelism each have a whole tower.
    layers_held = (layers - sizes.tower) // (tp * pp) + sizes.tower
    held = layers_held + experts + ends // tp + adapters // (tp * pp)
    if role.lora:
        own_trained, held_trained = adapters // ranks, adapters // (tp * pp)
    else:
        frozen = sizes.total - sizes.trained  # of a tower
        own_trained, held_trained = own - frozen // ranks, max(0, held - frozen)
    if not role.trained:
        own_trained = held_trained = 0
    if m.use_megatron_fsdp:
        return own, own_trained, own + sizes.ends, own_trained, two_layers
    copied = held
    # Where one rank owns frozen elements, the state's own tensors compute. A tied embedding lies on two stages.
    if (role.lora or not role.trained) and m.context_parallel_size == 1:
        if ranks == tp * pp:
            copied -= layers_held if tp == 1 else (layers - sizes.tower) // (tp * pp)
            copied -= ends // tp if pp == 1 or ends < sizes.ends else 0
        if ranks == m.expert_model_parallel_size * pp:
            copied -= experts
    return own, own_trained, copied, held_trained, 0


def phases(plan: Plan, gpu: int | None = None, *, offload: bool | None = None) -> tuple[Phase, ...]:
    """Returns the start and the phases of a step on the GPU of a training rank, with all that shares it.

    Roles of ``ray.separate`` and engines that are placed apart have GPUs of their own and are not counted.

    Args:
        gpu: bytes of the GPU; None if it is unknown, and vLLM's cache then counts nothing.
        offload: whether the training states lie on the CPU while the engine generates; by default as
            ``offloads`` says.
    """
    offload = offloads(plan, gpu) if offload is None else offload
    roles = [role_memory(plan.roles[name], plan) for name in sharing(plan)]
    state = [part for role in roles for part in role.state]
    buffers = [part for role in roles for part in role.buffers]
    at_rest = [] if offload else list(state)
    if plan.rollout.sleeps:
        at_rest = [attrs.evolve(part, lower="rollout.offload_trainer=true") for part in at_rest]
    else:
        at_rest += buffers
    engine = _engine(plan, gpu)
    # An engine that sleeps wakes its weights for a publication, its cache after it, and neither for the trainer.
    weights, awake = (engine[:1], ()) if plan.rollout.sleeps else (engine, engine)
    if plan.rollout.shares:
        awake = tuple(attrs.evolve(part, lower="rollout.free_cache_engine=true") for part in awake)
    processes = 1 if plan.driver.kind == "local" else 1 + _engines(plan)
    cuda = Allocation("CUDA itself", processes * CONTEXT, exact=False)
    # Roles are loaded one after the other, on the GPU.
    start = [*awake, cuda]
    for i, role in enumerate(roles):
        before = () if offload else (part for one in roles[:i] for part in one.state)
        start = max(start, [*before, *role.loaded, *awake, cuda], key=lambda parts: sum(p.nbytes for p in parts))
    return (
        Phase(START, start),
        Phase(PUBLICATION, (*at_rest, *weights, cuda)),
        Phase(GENERATION, (*at_rest, *engine, cuda)),
        *(Phase(p.name, (*state, *buffers, *p.parts, *awake, cuda)) for role in roles for p in role.phases),
    )


def sharing(plan: Plan) -> list[str]:
    """Returns the roles whose ranks share the engine's GPUs."""
    apart = plan.ray.separate if plan.driver.kind == "ray" else ()
    return [name for name in plan.roles if name not in apart]


def offloads(plan: Plan, gpu: int | None) -> bool:
    """Returns whether the training states lie on the CPU while the engine generates.

    ``rollout.offload_trainer`` decides. If it is not set, they do if they do not fit beside the engine. Beside an
    engine that never sleeps they would have to fit anyway.
    """
    r = plan.rollout
    if not r.sleeps or r.offload_trainer is not None:
        return r.sleeps and bool(r.offload_trainer)
    generation = [p for p in phases(plan, gpu, offload=False) if p.name == GENERATION]
    return gpu is not None and any(phase.nbytes > gpu for phase in generation)


def host_memory(plan: Plan, gpu: int | None, ranks: int, saved: int = 0) -> Phase:
    """Counts the bytes in the memory of a machine that settings move there from its GPUs.

    Processes, data and files take more. So does an engine whose weights an algorithm keeps while it computes between
    two requests.

    Args:
        gpu: bytes of a GPU; None if it is unknown.
        ranks: the training ranks on the machine.
        saved: bytes of a checkpoint, of which all ranks together hold a copy while threads write it.
    """
    everyone, moved = training_ranks(plan), offloads(plan, gpu)
    parts = [Allocation("copy for the disk", saved * ranks // everyone, "trainer.async_save=false")]
    inputs = []
    for name, role in plan.roles.items():
        state = ranks * sum(part.nbytes for part in role_memory(role, plan).loaded)
        if role.offload:
            parts.append(Allocation(f"{name} state", state, f"{role.table}.fsdp_config.offload_policy=false"))
        elif moved and name in sharing(plan):
            # The new state of an update comes back while the old one is still there.
            copies, words = (2, f"{name} state twice") if role.trained else (1, f"{name} state")
            parts.append(Allocation(words, copies * state, "rollout.offload_trainer=false"))
        if role.trained and role.offload_activations:
            width = width_of(_dtype_of(role))
            kept = functools.partial(sizes_of(role).kept, _tokens(role, plan), width, checkpointing=True)
            off = f"{role.table}.enable_activation_offload=false"
            inputs.append(Allocation(f"{name} inputs of layers", ranks * (kept() - kept(offload=True)), off))
    # Roles are updated one after the other.
    parts += sorted(inputs, key=lambda part: part.nbytes)[-1:]
    return Phase("host", parts)


def check_memory(plan: Plan, gpu: int | None) -> str:
    """Returns a sentence about a phase whose estimate is larger than the GPU; empty if there is none.

    Raises:
        ConfigError: what is counted exactly is larger than the GPU, so that the run cannot succeed.
    """
    if gpu is None:
        return ""
    counted = phases(plan, gpu)
    most = max(counted, key=lambda phase: phase.exact)
    if most.exact > gpu:
        raise ConfigError(f"the {most.title} needs at least {most.exact / GIB:.2f} GiB{_beside(most, gpu)}")
    if (engine := share(plan, gpu)) and (need := engine_weights(plan)) > engine:
        raise ConfigError(
            f"rollout.gpu_memory_utilization = {plan.rollout.gpu_memory_utilization:g} is {engine / GIB:.2f} GiB of "
            f"this GPU, and the engine's weights alone take {need / GIB:.2f}; raise it"
        )
    most = largest(counted)
    return f"the {most.title} may need {most.nbytes / GIB:.2f} GiB{_beside(most, gpu)}" if most.nbytes > gpu else ""


def _beside(phase: Phase, gpu: int) -> str:
    return f", and the GPU has {gpu / GIB:.2f}: {phase.describe()}; {advice(phase, gpu)}"


def largest(counted: Sequence[Phase]) -> Phase:
    """Returns the phase with most bytes."""
    return max(counted, key=lambda phase: phase.nbytes)


def advice(phase: Phase, gpu: int | None = None) -> str:
    """Returns the settings to lower in a phase: settings of its largest parts, the largest first.

    Args:
        gpu: bytes of the GPU; parts of less than a twentieth of it are left out.

    Example:
        >>> parts = Allocation("a", 10, "lower x"), Allocation("b", 90, "lower y"), Allocation("c", 50)
        >>> advice(Phase("gen", parts))
        'lower y; or lower x'
    """
    least = (gpu or phase.nbytes) / 20
    parts = sorted((part for part in phase.parts if part.lower), key=lambda part: -part.nbytes)
    settings = dict.fromkeys(part.lower for part in parts if part.nbytes >= least or part is parts[0])
    return "; or ".join(list(settings)[:3])


def share(plan: Plan, gpu: int | None) -> int:
    """Returns the bytes that one vLLM engine may take of a GPU; 0 if that is unknown, or for other engines."""
    return int(plan.rollout.gpu_memory_utilization * gpu) if gpu is not None and plan.rollout.name == "vllm" else 0


def engine_weights(plan: Plan) -> int:
    """Returns the bytes of the weights of one engine on each of its GPUs."""
    return model_sizes(plan.rollout.folder, "lm").total * element_width(plan) // plan.rollout.tensor_parallel_size


def element_width(plan: Plan) -> int:
    """Returns the bytes of an element of the engine's weights and cache."""
    return width_of(_dtype_of(plan.rollout))


def _dtype_of(part: RolePlan | RolloutPlan, device: str = "cuda") -> str:
    """Returns the dtype that a role or the engine computes in."""
    return _dtype(part.dtype, part.folder, device, Path(part.folder, "config.json").stat().st_mtime_ns)


# Settings are found by counting many plans of one model. `stamp`: of config.json.
@functools.lru_cache(maxsize=64)
def _dtype(asked: str | None, folder: str, device: str, stamp: int) -> str:
    return compute_dtype(asked, folder, device)


def _engines(plan: Plan) -> int:
    """Returns how many engines share the GPU of a training rank."""
    if plan.driver.kind == "local":
        return 1
    return -(-plan.rollout.engines // training_ranks(plan)) if plan.rollout.placement == "colocated" else 0


def _engine(plan: Plan, gpu: int | None) -> tuple[Allocation, ...]:
    """Returns the parts of the engines that share the GPU of a training rank, the weights first."""
    r, count = plan.rollout, _engines(plan)
    # The embedded engine makes room when it gets weights, vLLM before.
    if not count or not (r.used or r.name == "vllm"):
        return ()
    smaller = (
        "rollout.dtype=bfloat16" if element_width(plan) == FLOAT32 else "driver.kind=ray rollout.placement=apart"
    )
    weights = Allocation("engine weights", count * engine_weights(plan), smaller)
    if r.name == "vllm":
        utilization = f"lower rollout.gpu_memory_utilization ({r.gpu_memory_utilization:g} now)"
        rest = count * max(0, share(plan, gpu) - engine_weights(plan))
        return weights, Allocation("engine cache and computation", rest, utilization)
    rows, sizes = min(r.slots, plan.data.train_batch_size * r.n), model_sizes(r.folder, "lm")
    logits = rows * int(sizes.config.vocab_size) * element_width(plan)
    nbytes = sizes.cache(rows * r.longest, element_width(plan)) + logits
    return weights, Allocation("engine cache and logits", count * nbytes, f"lower rollout.slots ({r.slots} now)")


@contextlib.contextmanager
def explained(plan: Plan, gpu: int | None) -> Iterator[None]:
    """Replaces an error for a lack of memory by one that says what the plan holds in that phase.

    Args:
        gpu: bytes of the GPU of a training rank; None if ranks compute on the CPU.

    Raises:
        RunOutOfMemory: in place of an error for a lack of memory; it keeps the notes of that error: they name the
            process.
    """
    try:
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        name = error.phase if isinstance(error, PhaseOutOfMemory) else ""
        reason = error.reason if isinstance(error, PhaseOutOfMemory) else reason_of(error)
        explanation = RunOutOfMemory(explain(plan, gpu, name, reason))
        for note in getattr(error, "__notes__", ()):
            explanation.add_note(note)
        raise explanation from error


def explain(plan: Plan, gpu: int | None, name: str, reason: str) -> str:
    """Describes a lack of memory.

    Args:
        gpu: bytes of the GPU; None if ranks compute on the CPU.
        name: the phase, as in ``timing_s/*``; empty or unknown if the algorithm does not tell.
        reason: what the error says.
    """
    counted = phases(plan, gpu)
    phase = next((phase for phase in counted if phase.name == name), None)
    where = f"in {name} ({phase.title})" if phase is not None else f"in {name}" if name else "outside of a phase"
    shown = phase or largest(counted)
    which = "there" if phase is not None else f"in its largest phase, the {shown.title}"
    size = f" of {gpu / GIB:.2f} GiB" if gpu is not None else ""
    return (
        f"out of memory {where}: {reason}\nBy the plan, a GPU{size} holds {which}: {shown.describe()}\n"
        f"To reduce memory: {advice(shown, gpu)}. The same command continues from the last checkpoint"
    )
