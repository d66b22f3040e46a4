"""The bytes of one role on the GPU of a training rank."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from verl_fn.backends.hf.config import compute_dtype
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.sizes import FLOAT32, Footprint, parameter_counts, stage_of, width_of
from verl_fn.backends.protocol import BUCKET_BYTES
from verl_fn.config import Plan, RolePlan

MOMENTS = 2 * FLOAT32  # AdamW's two averages of a parameter


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


@attrs.frozen
class RoleMemory:
    """The bytes of one role on one rank.

    Attributes:
        role: the role's plan.
        total, trained: elements of the whole model, and those that are trained.
        own, own_trained: elements of the state that the rank has, and those that are trained.
        held, held_trained: elements that it computes with between calls, and those with gradients.
        ends: elements of embeddings and the output layer that it computes with.
        tokens: the most tokens of a micro-batch on a rank, with gradients and without.
        footprint: what passes need.
    """

    role: RolePlan
    total: int
    trained: int
    own: int
    own_trained: int
    held: int
    held_trained: int
    ends: int
    tokens: tuple[int, int]
    footprint: Footprint

    @classmethod
    def of(cls, role: RolePlan, plan: Plan, ranks: int) -> RoleMemory:
        total, trained = parameter_counts(role.folder, role.head, Lora(*role.lora) if role.lora else None)
        trained = trained if role.optim is not None else 0
        shards = max(1, ranks // role.fsdp.replicate) if role.strategy == "fsdp" else 1
        parts = [total // shards, trained // shards, total, 0, 0]
        if role.strategy == "megatron":
            parts = megatron_parts(role, ranks)
        shared = role.sharers
        prompts = plan.data.train_batch_size
        part = min(getattr(plan.options, "ppo_mini_batch_size", prompts), prompts)
        limits = [role.max_tokens // shared] * 2
        if plan.algorithm != "sft":
            longest = plan.data.max_prompt_length + plan.data.max_response_length
            rows = [count * plan.rollout.n for count in (part, prompts)]
            of_model = shared * _split(role)
            limits = [min(role.max_tokens, -(-count * of_model // ranks) * longest) // shared for count in rows]
        own, own_trained, held, held_trained, ends = parts
        footprint = Footprint.of(role.folder)
        tokens = limits[0], limits[1]
        return cls(role, total, trained, own, own_trained, held, held_trained, ends, tokens, footprint)

    @property
    def dtype(self) -> str:
        return compute_dtype(self.role.dtype, self.role.folder, "cuda")

    @property
    def width(self) -> int:
        return width_of(self.dtype)

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
            yield Part(f"{name} parameters", self.own * FLOAT32, lower)
            yield Part(f"{name} moments", self.own_trained * MOMENTS, lower)
            if self.role.strategy == "local" and self.width < FLOAT32:
                yield self._copy(lower)

    def buffers(self) -> Iterator[Part]:
        """Yields what lies there too, until the ranks give it back for an engine that wakes."""
        if self.role.strategy == "megatron":
            yield self._copy(self._lower)
            yield Part(f"{self.role.name} gradient buffer", self.held_trained * FLOAT32, self._lower)

    def exchange(self) -> Iterator[Part]:
        """Yields what ranks of Megatron exchange whole tensors through: a bucket, or one larger tensor."""
        if self.role.strategy == "megatron":
            largest = self.footprint.vocab * self.footprint.hidden
            nbytes = max(min(BUCKET_BYTES, self.total * FLOAT32), largest * FLOAT32)
            yield Part(f"{self.role.name} exchange between ranks", nbytes, exact=False)

    def _copy(self, lower: str) -> Part:
        return Part(f"{self.role.name} {self.dtype} copy", self.held * self.width, lower)

    @property
    def _lower(self) -> str:
        """The settings that make the role's state smaller on each GPU."""
        table = self.role.table
        if self.role.strategy == "megatron":
            return f"more ranks (ray.ranks) or a larger {table}.megatron.tensor_model_parallel_size"
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
        gradients = Part(f"{self.role.name} gradients", self.own_trained * FLOAT32, self._lower)
        tokens, checkpointing = self.tokens[0], self.role.checkpointing
        kept = self.footprint.kept(tokens, self.width, checkpointing=checkpointing)
        activations = [*self._activations(tokens, kept), *self._head_gradient()]
        if self.role.strategy != "megatron":
            yield from (gradients, *activations)
        elif gradients.nbytes > sum(part.nbytes for part in activations):
            yield gradients
        else:
            # Megatron's buffer is copied once the backward pass has freed them.
            yield from activations

    def _head_gradient(self) -> Iterator[Part]:
        # DDP of Megatron gets it in its buffer.
        buffered = self.role.strategy == "megatron" and not self.role.megatron.use_megatron_fsdp
        if self.role.head == "lm" and not self.role.lora and not buffered:
            nbytes = self.footprint.vocab * self.footprint.hidden * self.width
            yield Part("gradient of the output layer", nbytes, exact=False)

    def _weights(self) -> Iterator[Part]:
        """Yields the parameters that a pass brings to the GPU, or gathers there."""
        name, fsdp = self.role.name, self.role.fsdp
        if self.role.offload:
            yield Part(f"{name} parameters", self.own * FLOAT32)
        if self.role.strategy == "fsdp":
            whole = self.total
            if fsdp.reshard_after_forward:
                ends = self.footprint.vocab * self.footprint.hidden
                # One layer computes while the next one is gathered.
                whole = min(whole, ends + 2 * max(0, whole - ends) // self.footprint.layers)
            setting = f"{self.role.table}.fsdp_config.reshard_after_forward=true"
            lower = "" if fsdp.reshard_after_forward else setting
            yield Part(f"{name} gathered layers", whole * self.width, lower, exact=False)
        if self.role.strategy == "megatron" and self.role.megatron.use_megatron_fsdp:
            layers = 2 * max(0, self.total - self.ends) // self.footprint.layers
            yield Part(f"{name} gathered layers", layers * self.width, exact=False)

    @property
    def _vocabulary_parts(self) -> int:
        return self.role.megatron.tensor_model_parallel_size if self.role.strategy == "megatron" else 1

    def _activations(self, tokens: int, nbytes: int) -> Iterator[Part]:
        role = self.role
        lower = f"lower {role.table}.ppo_max_token_len_per_gpu ({role.max_tokens // role.sharers:,} now)"
        other = "" if role.checkpointing else f" or set {role.table}.enable_gradient_checkpointing=true"
        yield Part(f"activations of {tokens:,} tokens", nbytes, lower + other, exact=False)
        if role.head == "lm":
            nbytes = self.footprint.logits(tokens, self.width) // self._vocabulary_parts
            yield Part("logits", nbytes, lower, exact=False)


def _split(role: RolePlan) -> int:
    """Returns how many ranks share a model without sharing tokens."""
    sizes = role.megatron
    split = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
    return split if role.strategy == "megatron" else 1


def megatron_parts(role: RolePlan, ranks: int) -> list[int]:
    """Returns the elements of a model of Megatron on a rank of the largest stage.

    Args:
        role: the role's plan.
        ranks: how many ranks train.

    Returns:
        Elements of the state and those that are trained, elements in the buffer of parameters and in that of
        gradients, and those of the buffer of parameters in embeddings and the output layer.
    """
    m, lora = role.megatron, Lora(*role.lora) if role.lora else None
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    stage = stage_of(role.folder, role.head, tp=tp, pp=pp, ep=m.expert_model_parallel_size)
    adapters = parameter_counts(role.folder, role.head, lora)[1] if lora else 0
    own, held = (stage.whole * pp + adapters) // ranks, stage.held + adapters // (tp * pp)
    own_trained, held_trained = (adapters // ranks, adapters // (tp * pp)) if lora else (own, held)
    if m.use_megatron_fsdp:
        held, held_trained = own + stage.ends, own_trained
    if role.optim is None:
        own_trained = held_trained = 0
    return [own, own_trained, held, held_trained, stage.ends]
