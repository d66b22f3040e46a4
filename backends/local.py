"""The reference backend: one process, on the CPU or on one GPU."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_fn.backends.base import SkeletonBackend, one_at_a_time
from verl_fn.backends.hf import exact
from verl_fn.backends.hf.exact import Activations, of_trainer
from verl_fn.backends.hf.folder import Checkpointing, build, check_same_model, hollow
from verl_fn.backends.hf.lora import Lora, itself
from verl_fn.backends.hf.outputs import Staged, check_needs, token_outputs
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.hf.vision import beside_tokens
from verl_fn.backends.hf.weights import FolderWeights
from verl_fn.backends.memory import fits
from verl_fn.backends.weight_sync import Weights, apart, in_parts, keeping, specs_of
from verl_fn.state import (
    Batch,
    Grads,
    Key,
    Metrics,
    Params,
    Split,
    Sum,
    TokenOutputs,
    TrainState,
    isolated,
    metrics,
    split_by_tokens,
    tree,
    version_of,
)
from verl_fn.state.guards import expect
from verl_fn.steps import Loss, Optimizer, total_loss
from verl_fn.steps.losses.contract import check_fields

T = TypeVar("T")


class Local(SkeletonBackend):
    """Trains a Hugging Face causal language model, or a value model on its body, in this process.

    Parameters are put into a skeleton on the meta device for each call. Detached aliases of the state's tensors (or
    bf16 copies, which are a cache and never state) are the leaves of autograd; gradients accumulate in them over the
    micro-batches and are returned as a ``Grads`` value.

    Args:
        folder: a Hugging Face model folder.
        optimizer: from ``verl_fn.steps``.
        head: ``lm`` for a policy, ``value`` for a critic.
        dtype: of the computation, by name or as torch's: ``float32``, or ``bfloat16`` with fp32 masters, gradients
            and reductions.
        max_tokens: the most tokens of a micro-batch.
        checkpointing: recompute each layer in the backward pass; ``"offload"`` keeps their inputs in host memory.
        lora: adapters to train; everything else but a value head is then frozen.
        row_layout: of a micro-batch: ``packed``, ``padded``, or ``auto`` for the first one that is right.
        freeze_vision_tower: do not train the module that sees images; adapters leave it as it is.
        device: the device that computes and on which states are made.
        deterministic: use bitwise repeatable kernels on CUDA; kernels of the CPU always are.
        exact: log-probs equal those of a ``Sampler`` with ``exact`` in every bit, and do not depend on micro-batches;
            the forward pass is slower.

    Example:
        >>> import tempfile
        >>> from verl_fn.steps import adamw, cross_entropy, aggregate
        >>> from verl_fn.backends.hf.new_model import new_model
        >>> folder = new_model(tempfile.mkdtemp(), chars="ab")
        >>> backend = Local(folder, adamw(1e-3))
        >>> state = backend.init(Key.from_seed(0))
        >>> batch = aggregate(Batch.from_rows([[1, 3, 4, 2]], {"response_mask": [[0.0, 1.0, 1.0, 1.0]]}))
        >>> grads, metrics = backend.forward_backward(state, batch, cross_entropy())
        >>> state, metrics = backend.apply_update(state, grads)
        >>> state.step, metrics["update_skipped"].value
        (1, 0.0)
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: Optimizer,
        *,
        head: str = "lm",
        dtype: str | torch.dtype = "float32",
        max_tokens: int = 16384,
        checkpointing: Checkpointing = False,
        lora: Lora | None = None,
        row_layout: str = "auto",
        freeze_vision_tower: bool = False,
        device: str | torch.device = "cpu",
        deterministic: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__(
            folder, optimizer, device=torch.device(device), dtype=dtype, max_tokens=max_tokens,
            checkpointing=checkpointing, row_layout=row_layout, freeze_vision_tower=freeze_vision_tower, exact=exact,
            head=head, deterministic=deterministic, lora=lora,
        )  # fmt: skip
        # Calls share the skeleton and the cached copies.
        self._skeleton: Skeleton | None = None
        self._cast: dict[str, Tensor] = {}
        self._cast_from: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def weights(self, params: Params) -> Weights:
        """Returns the parameters for ``RolloutBackend.publish``, adapters merged in.

        Raises:
            LayoutError: the parameters are of another layout.
        """
        self._check(params)
        skeleton, adapters = self._built(), self._built().adapters
        buffers = in_parts(params.buffers)
        unmerged = apart(adapters.without(params) | buffers, adapters.own(params))
        # Merged weights are made for each publication.
        frozen = params.keys() - set(params.trained()) - {f"{layer}.weight" for layer in adapters.layers}
        part = functools.partial(exact.rounded, dtype=self.dtype) if self.exact else itself

        def source(params: Params) -> Weights:
            return Weights(
                specs_of(adapters.merged_like(params) | buffers),
                lambda: itertools.chain(adapters.merged(params, part, part), buffers.items()),
                apart=unmerged,
                frozen=frozenset(frozen & params.keys()),
            )

        return keeping(source, params, skeleton.frozen_names)

    # The two steps

    def _forward(self, params: Params, batch: Batch, wanted: frozenset[str]) -> TokenOutputs:
        self._built().check_batch(batch)
        tensors = self._compute_tensors(params)
        split = self._split(batch)
        parts: list[TokenOutputs] = []
        for i, part in enumerate(split):
            compute = functools.partial(token_outputs, staged=Staged.of(part, self.device), needs=wanted)
            with fits(part, i, len(split), self.max_tokens):
                outputs = self._built().run(tensors, compute)
            parts.append(tree.map_tensors(lambda t: t.cpu(), outputs))
        return split.join_outputs(parts)

    def _forward_backward(
        self, state: TrainState, batch: Batch, loss: Loss, wanted: frozenset[str]
    ) -> tuple[Grads, Metrics]:
        reported: Metrics = {}
        self._built().check_batch(batch)
        tensors = self._compute_tensors(state.params)
        leaves = {name: _leaf(tensors[name]) for name in state.params.trained()}
        tensors |= leaves
        split = self._split(batch, loss.together)
        for i, part in enumerate(split):
            staged = Staged.of(part, self.device)

            def backward(model: Skeleton, staged: Staged = staged) -> Metrics:
                total, of_part = total_loss(loss, token_outputs(model, staged, wanted), staged.batch)
                total.backward()
                return tree.map_tensors(torch.Tensor.detach, {"loss": Sum(total.double()), **of_part})

            with fits(part, i, len(split), self.max_tokens, keeps=not self.checkpointing):
                reported = metrics.merge(reported, self._built().run(tensors, backward))
        return Grads({name: _gradient(leaf) for name, leaf in leaves.items()}), reported

    @one_at_a_time
    def activations(self, params: Params, batch: Batch) -> Activations:
        """Returns what each module computes for each token of a batch, in one micro-batch."""
        staged = Staged.of(batch, self.device)
        found: Activations = self._built().run(self._compute_tensors(params), lambda model: of_trainer(model, staged))
        return found

    def loss_fn(self, batch: Batch, loss: Loss) -> Callable[[Params], tuple[Tensor, Metrics]]:
        """Returns the loss as a pure function of parameters, for ``torch.func``: grad, jvp, vjp, vmap, linearize.

        Its gradient is the one of ``forward_backward``. It uses torch's own functions instead of fused kernels, holds
        the activations of the whole batch and all logits of a micro-batch, and never recomputes layers. Use it to
        examine a loss, not to train. A transformation's backward pass runs in the caller's settings of torch, so
        transform it outside of autocast.

        Raises:
            ValueError: as ``forward_backward``.

        Example:
            ``torch.func.grad(backend.loss_fn(batch, loss), has_aux=True)(state.params)`` returns gradients, as
            ``Params``, and metrics.
        """
        expect("loss_fn", Batch, batch)
        # Weights may be traced, so their values are not checked.
        check_fields(loss, batch)
        wanted = check_needs(self.head, loss.needs)
        skeleton = self._built()
        with isolated(gradients=None):
            split = self._split(batch, loss.together)
            parts = [Staged.of(part, self.device).plain() for part in split]

        def fn(params: Params) -> tuple[Tensor, Metrics]:
            totals: list[Tensor] = []
            reported: list[Metrics] = []
            with self._one_call(gradients=None), skeleton.transformable(), skeleton.holding(params):
                leaves = self._completed(params)
                tensors = {name: t.to(self.device, self.dtype) for name, t in leaves.items()}
                for staged in parts:

                    def compute(model: Skeleton, staged: Staged = staged) -> tuple[Tensor, Metrics]:
                        return total_loss(loss, token_outputs(model, staged, wanted), staged.batch)

                    total, of_part = skeleton.run(tensors, compute)
                    totals.append(total)
                    reported.append({"loss": Sum(total.detach().double()), **of_part})
                # Transformations of torch.func accept tensors only.
                return torch.stack(totals).sum(), tree.map(torch.as_tensor, metrics.merge(*reported))

        return fn

    # What stays inside

    def _check(self, *values: Params | Grads) -> None:
        self._built()
        shapes = {name: t.shape for name, t in self._blank.items()}
        for value in values:
            for name, t in value.leaves.items():
                # Megatron's values are flat tensors. The shapes of gradients are compared with the parameters' later.
                flat = isinstance(value, Params) and t.shape != shapes.get(name, t.shape)
                if flat or isinstance(t, DTensor):
                    raise LayoutError(
                        f"a value of another layout or model ({name}) was given to a local backend; its tensors are "
                        "whole; save the state there and restore it here"
                    )

    def _free_copies(self) -> None:
        self._cast.clear()
        self._cast_from.clear()

    def _params(self, folder: str | Path, key: Key, *, pretrained: bool) -> Params:
        options = {**self._options, "key": key}
        empty = hollow(folder, self.head, **options) if pretrained else None
        if empty is not None and (weights := FolderWeights.of(folder, empty)) is not None:
            skeleton, params = empty.skeleton, weights.whole(empty, self.device)
        else:
            skeleton, params = build(folder, self.head, pretrained=pretrained, **options)
            # Copies, since transformers' tensors may share a storage, or lie such that kernels round differently.
            params = {name: t.to(self.device, copy=True) for name, t in params.items()}
        if self._skeleton is None and Path(folder) == self.folder:
            self._adopt(skeleton, {name: t.to("meta") for name, t in params.items()})
            self._skeleton = skeleton
        else:
            # All states of a backend belong to one model, whichever folder was read last.
            check_same_model(self._built(), skeleton, folder)
        return Params(params, skeleton.trainable, skeleton.new_buffers(self.device))

    def _built(self) -> Skeleton:
        if self._skeleton is None:
            with self._one_call():
                self._params(self.folder, Key.from_seed(0), pretrained=False)
        assert self._skeleton is not None
        return self._skeleton

    def _split(self, batch: Batch, together: str | None = None) -> Split:
        padded, beside = self._built().padded, beside_tokens(batch)
        return split_by_tokens(batch, self.max_tokens, together, padded=padded, beside=beside)

    def _completed(self, params: Params) -> Mapping[str, Tensor]:
        """Returns the parameters by name, with zeros for adapters that they lack.

        Raises:
            ValueError: the parameters are another model's.
            LayoutError: they are of another layout.
        """
        self._check(params)
        leaves = self._built().adapters.completed(params, lambda shape: torch.zeros(shape, device=self.device))
        if leaves.keys() != self._blank.keys():
            wrong = sorted(leaves.keys() ^ self._blank.keys())
            raise ValueError(f"the state's parameters are not this model's: {wrong[:5]}")
        # Autograd refuses tensors that were made in inference mode.
        return {name: t.clone() if t.is_inference() else t for name, t in leaves.items()}

    def _compute_tensors(self, params: Params) -> dict[str, Tensor]:
        """Returns the parameters in compute dtype on the device: the state's own tensors, or the cached copies.

        Tensors of the compute dtype, as frozen ones are, need no copy. A copy is used for every value that has the
        leaf, until the leaf is written.
        """
        leaves = self._completed(params)
        ready = {name: t.to(self.device) for name, t in leaves.items() if t.dtype == self.dtype}
        leaves = {name: t for name, t in leaves.items() if name not in ready}
        copied = self._cast_from
        stale = {name: t for name, t in leaves.items() if name not in copied or not _unchanged(copied[name], t)}
        for name, t in stale.items():
            copied.pop(name, None)
            if name not in self._cast:
                self._cast[name] = torch.empty_like(t, dtype=self.dtype, device=self.device)
        if stale:
            torch._foreach_copy_([self._cast[name] for name in stale], list(stale.values()))
        copied.update({name: (weakref.ref(t), version_of(t)) for name, t in stale.items()})
        return ready | {name: self._cast[name] for name in leaves}


def _unchanged(seen: tuple[weakref.ref[Tensor], int], t: Tensor) -> bool:
    """Returns whether ``t`` is the tensor of an earlier call and was not written since."""
    tensor, version = seen
    return tensor() is t and version == version_of(t)


def _leaf(t: Tensor) -> Tensor:
    """Returns an alias of ``t`` in which autograd accumulates gradients, in fp32 whatever the dtype of ``t``."""
    leaf = t.detach().requires_grad_()
    if leaf.dtype != torch.float32:
        leaf.grad_dtype = torch.float32
    return leaf


def _gradient(leaf: Tensor) -> Tensor:
    """Returns the accumulated gradient; zeros where the loss does not depend on the parameter."""
    return torch.zeros_like(leaf, dtype=torch.float32) if leaf.grad is None else leaf.grad
