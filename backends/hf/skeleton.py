"""A transformers model as a function of its parameters: a skeleton that owns none, and what it says of packed rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.logprobs import logprobs_and_entropy
from verl_fn.backends.hf.lora import Adapters, Lora, canonical, inject
from verl_fn.backends.hf.ulysses import Sequence
from verl_fn.state import Batch, Key, Params, TokenOutputs

SUPPORTED_NEEDS = {"lm": frozenset({"logprobs", "entropy"}), "value": frozenset({"values"})}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(name: str, option: str) -> torch.dtype:
    """The dtype that a backend's ``option`` names.

    >>> dtype_of("bfloat16", "compute_dtype")
    torch.bfloat16
    """
    if name not in DTYPES:
        raise ValueError(f"{option} is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


@contextlib.contextmanager
def repeatable(asked: bool) -> Iterator[None]:
    """Deterministic kernels inside, if asked for or on already; outside as before."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Skeleton(nn.Module):
    """A model whose parameters lie on the meta device; the real ones come in with every call.

    ``run`` holds the swapped parameters for as long as ``fn`` runs, so a backward pass inside ``fn``
    recomputes checkpointed layers with the right ones.

    Attributes:
        model: the transformers model.
        head: ``lm`` for a language model, ``value`` for a scalar a token.
        adapters: of LoRA, if it has any.
        longest: the most tokens of a row.
    """

    def __init__(self, model: nn.Module, head: str, longest: float = math.inf) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.adapters = Adapters()
        self.longest = longest
        self._inside: dict[str, str] = {}

    def forward(self, fn: Callable[[Skeleton], Any]) -> Any:
        return fn(self)

    def run(self, tensors: dict[str, Tensor], fn: Callable[[Skeleton], Any]) -> Any:
        """``fn(skeleton)`` with the model's parameters and buffers replaced by ``tensors``."""
        renamed = {f"model.{self._inside.get(name, name)}": tensor for name, tensor in tensors.items()}
        return torch.func.functional_call(self, renamed, (fn,), tie_weights=True)

    def adapt(self, lora: Lora, key: Key, folder: str | Path) -> None:
        """Put adapters in, drawn from ``key``; parameters keep their names. ``folder`` is named in errors.

        Raises:
            LoraError: this model cannot have them.
        """
        self.adapters = inject(self.model, lora, self.output_layer, key, folder)
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        self._inside = {canonical(name): name for name in names}

    @property
    def trainable(self) -> frozenset[str] | None:
        """What is trained: the adapters and a value head, or None for all parameters."""
        if self.adapters.lora is None:
            return None
        head = set(self.output_layer.parameters()) if self.head == "value" else set()
        return frozenset(self.adapters.names()) | {n for n, p in self.model.named_parameters() if p in head}

    def move_buffers(self, device: torch.device) -> None:
        """Put the model's constants (rotary frequencies) where it computes."""
        for module in self.modules():
            for name, b in module._buffers.items():
                module._buffers[name] = None if b is None else b.to(device)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def constants(self) -> dict[str, Tensor]:
        """The buffers that belong into a model's file."""
        held = self.model.state_dict(keep_vars=True)
        return {name: b for name, b in self.model.named_buffers() if name in held}

    @property
    def output_layer(self) -> nn.Linear:
        """The language-model head or the value head."""
        if self.head == "lm":
            return self.model.get_output_embeddings()
        return next(getattr(self.model, name) for name in ("score", "classifier") if hasattr(self.model, name))

    def check_trained(self, params: Params) -> None:
        """Whether a checkpoint would come back with the same parameters trained: it does not say which are.

        Raises:
            ValueError: others are trained than in the states that the backend makes.
        """
        ours = set(params if self.trainable is None else self.trainable)
        if odd := sorted(ours.symmetric_difference(params.trained())):
            raise ValueError(
                f"this state was given another set of trainable parameters ({len(odd)} differ: {', '.join(odd[:3])}), "
                "which a checkpoint does not keep: save it with the backend's own set, attrs.evolve(state, "
                "params=attrs.evolve(state.params, trainable=...)), and choose again after restore"
            )

    def check_longest(self, tokens: int) -> None:
        """Whether rows of so many tokens can be computed.

        Raises:
            ValueError: they are longer than the model's frequencies are fixed for.
        """
        if tokens > self.longest:
            raise ValueError(
                f"a row has {tokens} tokens, more than the {self.longest} of this model's "
                f"original_max_position_embeddings: beyond it, longrope changes all rows of a micro-batch together"
            )

    def hidden_states(self, tokens: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        """The last hidden state of each packed token, ``[T, H]``.

        Raises:
            ValueError: a row is too long to be computed as it would be alone.
        """
        self.check_longest(packing.longest)
        found = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, packing=packing
        )
        return found.last_hidden_state[0]


@attrs.frozen(eq=False)
class Staged:
    """A micro-batch on the device, with what the forward pass wants to know beforehand.

    Attributes:
        batch: the micro-batch.
        packing: its layout.
        targets: the tokens to speak of: those with ``response_mask``.
        temperature: for each of them, or None where all are 1.
    """

    batch: Batch
    packing: Packing
    targets: Tensor
    temperature: Tensor | None

    @classmethod
    def of(cls, batch: Batch, device: torch.device, group: Any = None) -> Staged:
        """Stage a batch that lies on the CPU; ``group`` is of the ranks that share its sequence, if any do.

        Raises:
            ValueError: as ``check_targets``.
        """
        targets = check_targets(batch)
        temperature = None
        if "temperature" in batch and bool((batch["temperature"] != 1.0).any()):
            temperature = batch.spread(batch["temperature"].float())[targets].to(device)
        sequence = None if group is None else Sequence(group, batch.num_tokens)
        packing = Packing.of(batch, device, sequence)
        return cls(batch.to(device), packing, targets.to(device, non_blocking=True), temperature)


def check_targets(batch: Batch) -> Tensor:
    """The tokens with ``response_mask``.

    Raises:
        ValueError: one of them is a row's first token, which nothing precedes, or ``temperature`` is not one positive
            number a row.
    """
    if "temperature" in batch:
        if "temperature" in batch.per_token or batch["temperature"].ndim != 1:
            raise ValueError("temperature must be one number a row, a per-row field")
        odd = ~(batch["temperature"].isfinite() & (batch["temperature"] > 0))
        if bool(odd.any()):
            row = int(odd.nonzero()[0])
            raise ValueError(
                f"row {row}: temperature is {batch['temperature'][row]:g}; it must be positive and finite"
            )
    targets = batch["response_mask"].nonzero()[:, 0]
    first = batch.positions[targets] == 0
    if bool(first.any()):
        row = int(batch.row_ids[targets[first][0]])
        raise ValueError(f"row {row}: response_mask is set on its first token, which has no log-probability")
    return targets


def token_outputs(skeleton: Skeleton, staged: Staged, needs: Iterable[str]) -> TokenOutputs:
    """Run the model over a micro-batch and say what ``needs`` asks of each target token."""
    batch, targets, temperature = staged.batch, staged.targets, staged.temperature
    tokens, positions, sequence = batch.tokens, batch.positions, staged.packing.sequence
    # What speaks of token t is read where the model has seen the tokens before t.
    seen = targets - 1
    if sequence is not None:
        tokens, positions = sequence.part(tokens), sequence.part(positions)
        mine = (seen >= sequence.start) & (seen < sequence.start + sequence.each)
        targets, seen = targets[mine], seen[mine] - sequence.start
        temperature = None if temperature is None else temperature[mine]
    hidden = skeleton.hidden_states(tokens, positions, staged.packing).index_select(0, seen)
    layer = skeleton.output_layer

    def spread(x: Tensor) -> Tensor:
        found = x.new_zeros(batch.num_tokens).index_copy(0, targets, x)
        return found if sequence is None else sequence.whole(found)

    if skeleton.head == "value":
        return TokenOutputs({"values": spread(layer(hidden).float()[:, 0])})
    logprobs, entropy = logprobs_and_entropy(
        hidden, layer.weight, layer.bias, batch.tokens[targets], temperature, entropy="entropy" in needs
    )
    found = {"logprobs": spread(logprobs)}
    if entropy is not None:
        found["entropy"] = spread(entropy)
    return TokenOutputs(found)


def check_head(head: str) -> str:
    """The head, if it is one.

    Raises:
        ValueError: it is not.

    >>> check_head("value")
    'value'
    """
    if head not in SUPPORTED_NEEDS:
        raise ValueError(f"head is {head!r}; it must be {' or '.join(SUPPORTED_NEEDS)}")
    return head


def check_needs(head: str, needs: Iterable[str]) -> frozenset[str]:
    """The needs as a set.

    Raises:
        ValueError: the head cannot provide one of them.

    >>> sorted(check_needs("lm", ["logprobs"]))
    ['logprobs']
    """
    wanted = frozenset(needs)
    if not wanted <= SUPPORTED_NEEDS[head]:
        raise ValueError(
            f"a {head} model gives {sorted(SUPPORTED_NEEDS[head])}, not {sorted(wanted - SUPPORTED_NEEDS[head])}"
        )
    return wanted


def compile_layer(layer: nn.Module) -> None:
    """Let ``torch.compile`` make the kernels of a decoder layer, one set for all layers and all numbers of tokens."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            # Only caches ask for it, and compiled code would be of one layer alone.
            module.layer_idx = 0
    compiled = torch.compile(layer.forward)

    def forward(hidden: Tensor, *args: Any, packing: Packing, **kwargs: Any) -> Any:
        # Nothing else is to vary: kernels that divide by sizes of heads known only at run time are far slower.
        by_token = (hidden, kwargs.get("position_ids"), *(kwargs.get("position_embeddings") or ()))
        for t in by_token:
            if t is not None:
                torch._dynamo.maybe_mark_dynamic(t, 1)
        for t in (packing.slots, packing.cu_seqlens, packing.places):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        return compiled(hidden, *args, packing=packing, **kwargs)

    layer.forward = forward  # type: ignore[method-assign]
