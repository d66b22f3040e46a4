"""A transformers model as a function of its parameters: a skeleton that owns none."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.lora import Adapters, Lora, canonical, inject
from verl_fn.state import Key, Params

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

    @contextlib.contextmanager
    def transformable(self) -> Iterator[None]:
        """Inside, the model takes every ``torch.func`` transformation, and all agree on its derivative.

        No layer is recomputed, since transformations refuse the hooks that do it, and the one of transformers that makes
        embeddings require gradients for it. The embedding of the padding token
        is a constant also in forward mode: torch drops it in the backward pass alone.
        """
        training = self.model.training
        embeddings = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        hooks = {m: dict(m._forward_hooks) for m in embeddings}
        padded = {m: m.padding_idx for m in embeddings if m.padding_idx is not None}
        self.model.eval()
        for module in hooks:
            module._forward_hooks.clear()
        for module, padding in padded.items():
            module.forward = functools.partial(_embed, module.forward, padding)  # type: ignore[method-assign]
            module.padding_idx = None
        try:
            yield
        finally:
            self.model.train(training)
            for module, held in hooks.items():
                module._forward_hooks.update(held)
            for module, padding in padded.items():
                del module.forward
                module.padding_idx = padding

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
        # A mask of four dimensions passes through transformers unread; without one it looks for packed rows in the
        # positions, which a traced tensor does not allow.
        mask = torch.empty(1, 1, 1, 1, device=tokens.device) if packing.plain else None
        outputs = self.model.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask,
            use_cache=False,
            packing=packing,
        )
        return outputs.last_hidden_state[0]


def _embed(embed: Callable[[Tensor], Tensor], padding: int, ids: Tensor) -> Tensor:
    rows = embed(ids)
    return torch.where((ids == padding)[..., None], rows.detach(), rows)


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
