"""What the calls of all training backends do before and after they compute.

They check their arguments, refuse derivatives, run one at a time in the same settings of torch, and move gradients.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn.backends import checkpoint
from verl_fn.backends.agreement import Gather, agreed, alone, gathered, require_same, settings_of
from verl_fn.backends.checkpoint import Writing
from verl_fn.backends.hf import exact as exactness
from verl_fn.backends.hf.config import check_same_config
from verl_fn.backends.hf.folder import Checkpointing
from verl_fn.backends.hf.lora import ADAPTERS, FrozenBase, Lora, Reference, chain_of, in_peft, stamp_of
from verl_fn.backends.hf.outputs import check_head, check_needs
from verl_fn.backends.hf.skeleton import Skeleton, dtype_of, repeatable
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.tensor_file import Span
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import (
    Batch,
    Grads,
    Key,
    Metrics,
    Params,
    Slots,
    TokenOutputs,
    TrainState,
    isolated,
    refuse_derivatives,
    taken,
    tree,
)
from verl_fn.state.guards import expect, expect_update
from verl_fn.state.tree import flatten
from verl_fn.steps import Frozen, Loss, Optimizer, apply_update, check_weights

P = ParamSpec("P")
B = TypeVar("B", bound="Base")
T = TypeVar("T")


def one_at_a_time(method: Callable[Concatenate[B, P], T]) -> Callable[Concatenate[B, P], T]:
    """Makes a method run as one call of its backend."""

    @functools.wraps(method)
    def alone(self: B, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._one_call():
            return method(self, *args, **kwargs)

    return alone


class Base(abc.ABC):
    """A training backend without its computations.

    A backend of a single process implements ``_params``, ``_forward``, ``_forward_backward``, ``save`` and
    ``restore``. One that shards its values replaces the other hooks too.

    Args:
        folder: a Hugging Face model folder, if the backend has one.
        deterministic: use bitwise repeatable kernels on CUDA; kernels of the CPU always are.
        lora: adapters that are trained, if there are any.
        several_ranks: ranks make every call together. While another thread computes, a call then raises an error
            instead of waiting, since ranks must make their calls in one order.

    Raises:
        ArgumentError: ``optimizer`` is no ``Optimizer``, or ``lora`` no ``Lora``.
        ValueError: there is no such head.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        folder: str | Path = "",
        head: str = "lm",
        deterministic: bool = False,
        lora: Lora | None = None,
        several_ranks: bool = False,
    ) -> None:
        expect(type(self).__name__, Optimizer, optimizer)
        if lora is not None:
            expect(type(self).__name__, Lora, lora)
        self.optimizer = optimizer
        self.folder = Path(folder)
        self.head = check_head(head)
        self.deterministic = deterministic
        self.lora = lora
        self.several_ranks = several_ranks
        self._gather: Gather = gathered if several_ranks else alone
        self._base: FrozenBase | None = None
        self._writing: Writing | None = None
        self._trains = not isinstance(optimizer, Frozen)
        # All calls share the model.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def _one_call(self, *, gradients: bool | None = False) -> Iterator[None]:
        """Computes inside, while no other thread does; ``gradients`` is as for ``isolated``."""
        if not self._lock.acquire(blocking=not self.several_ranks):
            raise LayoutError(
                "another thread computes with this backend; ranks make its calls in one order, so make them from one "
                "thread"
            )
        try:
            with isolated(gradients=gradients), repeatable(self.deterministic):
                yield
        finally:
            self._lock.release()

    # Making states

    def init(self, key: Key) -> TrainState:
        """Returns a state with random parameters drawn from ``key``; every layout gets the same ones.

        If several ranks share the model, the first rank draws all of it, since it is one sequence of draws, and sends
        the other ranks their parts.
        """
        return self._new_state(self.folder, key, pretrained=False)

    def load_pretrained(self, folder: str | Path | None = None, key: Key | None = None) -> TrainState:
        """Returns a fresh state with the weights of ``folder``, by default the backend's own.

        Raises:
            ModelError: the folder does not hold the weights of this model.
            LayoutError: ranks were given different keys or weights.
        """
        return self._new_state(folder or self.folder, key or Key.from_seed(0), pretrained=True)

    @one_at_a_time
    def save(self, state: TrainState, folder: str | Path, *, later: bool = False) -> None:
        """Writes the state into ``folder``; the folder is then also a Hugging Face model folder, or one of PEFT.

        Args:
            folder: is made if it does not exist. Every backend writes the same files.
            later: return when the state is copied, and let a thread write; ``saved`` makes the folder whole.

        Raises:
            OSError: some rank cannot write; all ranks raise it, here or in ``saved``, and the folder keeps its state.
        """
        self.saved()
        self._writing = self._saving(state, Path(folder), later)
        if not later:
            self.saved()

    @one_at_a_time
    def saved(self) -> None:
        """Waits until a save that was to end later is whole; all ranks call it together."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing()

    @one_at_a_time
    def place(self, state: TrainState, *, params: str | None = None, optimizer: str | None = None) -> TrainState:
        """Returns the same state with the parameters or the optimizer tree on another device.

        Parameters that move to the CPU leave no copy on the device.

        Raises:
            LayoutError: ranks were asked for different devices.
        """
        self._agree({"params for place": params, "optimizer for place": optimizer})
        if params == "cpu":
            self._free_copies()

        def moved(value: T, to: str | None) -> T:
            return value if to is None else tree.map_tensors(lambda t: self._moved(t, torch.device(to)), value)

        return attrs.evolve(state, params=moved(state.params, params), optimizer=moved(state.optimizer, optimizer))

    def named(self, value: Params | Grads | Slots) -> Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]:
        """Returns the tensors by canonical name."""
        return dict(value.items())

    def weights(self, params: Params) -> Weights:
        """Returns the parameters for ``RolloutBackend.publish``."""
        return Weights.of(params)

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """Returns ``fn(*values)``, applied to what this process holds of the values; all ranks call it together."""
        return fn(*values)

    # The two steps

    def forward(self, params: Params, batch: Batch, needs: Iterable[str] = ("logprobs",)) -> TokenOutputs:
        """Returns the outputs that ``needs`` names, without gradients, on the CPU and on every rank.

        They are given for every token with ``response_mask``, or for every row; ``routed_experts`` for every token.

        Raises:
            ValueError: the head cannot compute one of ``needs``, or ``routed_experts`` name experts that it lacks.
            LayoutError: ranks were given different batches, or another thread computes.
            NotDifferentiable: a derivative of this function was taken.
        """
        expect("forward", Params, params)
        expect("forward", Batch, batch)
        refuse_derivatives("forward", params, batch)
        wanted = self._wanted(needs, forward=True)
        with self._one_call(), self._with_buffers(params):
            return self._forward(params, batch.detached(), wanted)

    def forward_backward(self, state: TrainState, batch: Batch, loss: Loss) -> tuple[Grads, Metrics]:
        """Returns fp32 gradients of the loss over the whole batch, and its metrics, with the total as ``loss``.

        Raises:
            ValueError: the state trains no parameter, as one of the optimizer ``frozen()``; the batch lacks the
                weights that the loss's levels need, the field that keeps its rows together or the ``routed_experts``
                to replay; a row or group is longer than the token budget; or ranks were given different batches,
                needs or states. Different losses are not detected.
            LayoutError: another thread computes.
            DonatedError: the state was donated.
            NotDifferentiable: a derivative of this function was taken.
            OutOfMemory: a micro-batch does not fit into the device's memory. Other ranks wait until the process
                group's timeout, as they do when a loss raises on one rank; the Ray driver reports it at once.
        """
        expect("forward_backward", TrainState, state)
        expect("forward_backward", Batch, batch)
        refuse_derivatives("forward_backward", state, batch)
        if state.params.trainable == frozenset():
            raise ValueError(
                "this state trains no parameter, so there are no gradients: it was made with the optimizer frozen(), "
                "or its params are the base of others; make the backend with an optimizer that updates"
            )
        check_weights(loss, batch)
        wanted = self._wanted(loss.needs)
        with self._one_call(gradients=True), self._with_buffers(state.params):
            return self._forward_backward(state, batch.detached(), loss, wanted)

    def apply_update(
        self, state: TrainState, grads: Grads, *, donate: bool = True, optimizer: Optimizer | None = None
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state and metrics; see ``steps.apply_update``. Gradients move to the parameters' device.

        Args:
            optimizer: computes this update in place of the backend's own, with other hyperparameters: a learning
                rate, betas, weight decay or norm to clip at. It must continue the state's optimizer tree. The next
                call has the backend's own again.

        Raises:
            ArgumentError, ValueError: as ``steps.check_update``, or parameters and optimizer lie on different
                devices; nothing was donated then.
            LayoutError: the state or the gradients are of another layout, ranks were given optimizers of other
                settings (functions are compared by name), or another thread computes; nothing was donated then.
        """
        expect_update(state, grads)
        optimizer = self.optimizer if optimizer is None else optimizer
        if self.several_ranks:
            # Before it is checked, since the others would wait for a rank that refuses it.
            with self._one_call():
                self._agree({"optimizer for apply_update": settings_of(optimizer)})
        expect("apply_update", Optimizer, optimizer)
        self._check(state.params, grads)
        moved_grads = beside(state, grads, self._moved)
        new, reported = self._updated(optimizer, state, moved_grads, donate)
        if donate and moved_grads is not grads:
            taken(grads, "apply_update")
        return new, reported

    # What a backend computes

    @abc.abstractmethod
    def _params(self, folder: str | Path, key: Key, *, pretrained: bool) -> Params:
        """Returns the weights of a folder, or random parameters drawn from ``key``."""

    def _saving(self, state: TrainState, folder: Path, later: bool) -> Writing:
        """Begins to write a state; a backend with other files replaces ``save`` and ``saved`` instead."""
        raise NotImplementedError

    @abc.abstractmethod
    def _forward(self, params: Params, batch: Batch, wanted: frozenset[str]) -> TokenOutputs:
        """Returns what ``forward`` does."""

    @abc.abstractmethod
    def _forward_backward(
        self, state: TrainState, batch: Batch, loss: Loss, wanted: frozenset[str]
    ) -> tuple[Grads, Metrics]:
        """Returns what ``forward_backward`` does."""

    # What a backend may compute differently

    def _updated(
        self, optimizer: Optimizer, state: TrainState, grads: Grads, donate: bool
    ) -> tuple[TrainState, Metrics]:
        """Returns what ``apply_update`` does, for gradients on the device of the parameters."""
        return apply_update(optimizer, state, grads, donate=donate)

    def _slots(self, params: Params) -> Any:
        """Returns the first state of the optimizer."""
        return self.optimizer.init(params)

    def _wanted(self, needs: Iterable[str], *, forward: bool = False) -> frozenset[str]:
        """Returns the needs of a call after checking them."""
        return check_needs(self.head, needs, forward=forward)

    def _agree(self, given: Mapping[str, Any]) -> None:
        """Compares arguments with the arguments of the other ranks."""
        if self.several_ranks:
            require_same(given)

    def _check(self, *values: Params | Grads) -> None:  # noqa: B027  # few backends have layouts
        """Raises a LayoutError for values of another layout."""

    def _with_buffers(self, params: Params) -> AbstractContextManager[None]:
        """Returns a context in which the model has these parameters' buffers."""
        return contextlib.nullcontext()

    def _moved(self, t: Tensor, device: torch.device) -> Tensor:
        """Returns a tensor on another device."""
        return t.to(device)

    def _free_copies(self) -> None:  # noqa: B027  # few backends keep copies
        """Frees what the backend keeps on its device beside the states."""

    @one_at_a_time
    def _new_state(self, folder: str | Path, key: Key, *, pretrained: bool) -> TrainState:
        self._agree({"key": str(key)})
        if pretrained and self.lora is not None and self._trains and Path(folder) == self.folder:
            params = self._with_base(key.fold_in("init"))
        else:
            params = self._params(folder, key.fold_in("init"), pretrained=pretrained)
        return TrainState(params, self._slots(params), 0, key.fold_in("train"), 0)

    def _check_saved(self, skeleton: Skeleton, folder: str | Path) -> None:
        """Checks that a folder holds a state of this model, and of its adapters; all ranks call it together."""
        self._agree({"folder to restore": str(folder), "state (train_state.json)": checkpoint.about(folder)})
        with agreed(self._gather):
            checkpoint.check_finished(folder)
            check_same_config(skeleton, folder)
            skeleton.adapters.check(Path(folder))

    # Frozen weights that checkpoints do not hold

    def _with_base(self, key: Key) -> Params:
        """Returns the weights of the backend's folder, with adapters, and keeps in mind what the frozen ones are."""
        stamp = stamp_of(self.folder)
        params = self._params(self.folder, key, pretrained=True)
        self._base = FrozenBase.of(self.folder, stamp, self._frozen(params))
        return params

    def _base_of(self, params: Params, into: Path) -> FrozenBase | None:
        """Returns the frozen weights of a state if a checkpoint in ``into`` may refer to their folder, else None."""
        base = self._base
        # A save replaces the weights in its folder.
        kept = base is not None and not params.buffers and into.resolve() not in chain_of(base.folder)
        held = kept and base is not None and base.holds(self._frozen(params))
        return base if all(self._gather(held)) else None

    def _on_base(self, reference: Reference, checkpoint: str | Path, trained: Mapping[str, Tensor]) -> Params:
        """Returns parameters of which a checkpoint holds the trained ones, and refers to the frozen ones.

        Raises:
            ModelError: the backend's folder holds other weights.
        """
        with agreed(self._gather):
            if not self.several_ranks or dist.get_rank() == 0:
                reference.check(checkpoint, self.folder)
        read, dtype = self._with_base(Key.from_seed(0)), getattr(torch, reference.dtype)
        leaves = {name: trained[name] if name in trained else t.to(dtype).to(t.dtype) for name, t in read.items()}
        return attrs.evolve(read, leaves=leaves)

    def _frozen(self, params: Params) -> dict[str, Tensor]:
        """Returns what this rank holds of the parameters that are not trained."""
        trained = set(params.trained())
        return {name: self._held(t) for name, t in params.items() if name not in trained}

    def _held(self, t: Tensor) -> Tensor:
        """Returns what this rank holds of a parameter."""
        return t


class SkeletonBackend(Base):
    """A training backend that computes with a ``Skeleton``, on whole tensors or on a part of the rows of each.

    A subclass implements ``_params``, ``_forward``, ``_forward_backward`` and ``_built``. One that shards its values
    replaces the hooks at the end.

    Args:
        dtype: of the computation, by name or as torch's.
        checkpointing: recompute each layer in the backward pass.
        row_layout: of a micro-batch.
        freeze_vision_tower: do not train the module that sees images.
        exact: compute with the kernels of ``hf.exact``.
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: Optimizer,
        *,
        device: torch.device,
        dtype: str | torch.dtype,
        max_tokens: int,
        checkpointing: Checkpointing,
        row_layout: str,
        freeze_vision_tower: bool,
        exact: bool,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, folder=folder, **options)
        self.device, self.dtype = device, dtype_of(dtype, "dtype")
        self.max_tokens, self.checkpointing, self.exact = max_tokens, checkpointing, exact
        # How models of folders are made; see ``hf.folder.build``.
        self._options: dict[str, Any] = {
            "checkpointing": checkpointing, "lora": self.lora, "row_layout": row_layout, "frozen": self.dtype,
            "device": device, "trained": self._trains, "freeze_tower": freeze_vision_tower,
        }  # fmt: skip
        # What states hold, on the meta device.
        self._blank = Params({})

    @abc.abstractmethod
    def _built(self) -> Skeleton:
        """Returns the model of the backend's folder."""

    def _adopt(self, skeleton: Skeleton, shapes: Mapping[str, Tensor]) -> None:
        """Makes a model, with these parameters on the meta device, the one that the backend computes with."""
        if self.exact:
            exactness.check(skeleton, self.dtype, self.device, self.folder)
            exactness.adopt(skeleton)
        skeleton.move_buffers(self.device)
        self._blank = Params(shapes, skeleton.trainable, skeleton.new_buffers(self.device))

    def _with_buffers(self, params: Params) -> AbstractContextManager[None]:
        return self._built().holding(params)

    def _saving(self, state: TrainState, folder: Path, later: bool) -> Writing:
        self._check(state.params)
        self._agree({"folder to save in": str(folder)})
        skeleton, params = self._built(), state.params
        skeleton.check_trained(params)
        checkpoint.check_restorable(state, self.optimizer.init(self._blank))
        skeleton.check_buffers(params.buffers)
        if (base := self._base_of(params, folder)) is None:
            file, kept = checkpoint.MODEL, skeleton.adapters.unmerged(params)
            adapted = {f"{layer}.weight" for layer in skeleton.adapters.layers}
            merged = skeleton.adapters.merged(params, self._held, self._whole)
            # Merged weights move to the CPU one by one, so that a GPU never holds all of them.
            filed = Params({name: t.cpu() if name in adapted else t for name, t in merged})
            weights = {**self._of_rows(filed), **params.buffers}
        else:
            file, kept = ADAPTERS, Params({})
            weights = {in_peft(name): params[name] for name in params.trained()}
        rest, scalars = flatten(attrs.evolve(state, params=kept))
        model, others = ({name: self._span(t) for name, t in tensors.items()} for tensors in (weights, rest))

        def describe(folder: Path) -> None:
            checkpoint.describe_model(folder, skeleton, self.folder, self.dtype, base)

        rank = dist.get_rank() if self.several_ranks else 0
        return checkpoint.begin_save(
            folder, model, others, scalars, describe, file=file, gather=self._gather, rank=rank, later=later
        )

    @one_at_a_time
    def restore(self, folder: str | Path) -> TrainState:
        """Returns the state that ``save`` of any backend wrote, bitwise; each rank reads its own rows.

        Raises:
            ModelError: its frozen weights are in another folder, and this backend's folder has others.
        """
        skeleton = self._built()
        self._check_saved(skeleton, folder)
        adapters, params = skeleton.adapters, self._blank
        rest = TrainState(Params({}), self.optimizer.init(params), 0, Key.from_seed(0), 0)
        read = functools.partial(
            checkpoint.read_state, folder, rows=self._rows, device=self.device, gather=self._gather
        )
        if (reference := Reference.read(folder)) is not None:
            model = {in_peft(name): params[name] for name in params.trained()}
            weights, rest = read(model, rest, file=ADAPTERS)
            trained = self._of_rows(Params({name: weights[in_peft(name)] for name in params.trained()}))
            return attrs.evolve(self._of_rows(rest), params=self._on_base(reference, folder, trained))
        rest = attrs.evolve(rest, params=adapters.unmerged(params))
        buffers = {name: b.to("meta") for name, b in params.buffers.items()}
        frozen = params.keys() - params.trained()
        weights, rest = read({**adapters.merged_like(params), **buffers}, rest, frozen=frozen)
        joined = adapters.joined(params, weights, rest.params)
        joined = attrs.evolve(joined, buffers=checkpoint.read_buffers(folder, params.buffers))
        return self._of_rows(attrs.evolve(rest, params=joined))

    # What a backend that shards its values does differently

    def _rows(self, count: int) -> tuple[int, int]:
        """Returns where this process's rows of a tensor with this many rows begin and end."""
        return 0, count

    def _span(self, t: Tensor) -> Span:
        """Returns the elements of a tensor that this process writes into a checkpoint."""
        return Span.whole(t)

    def _whole(self, t: Tensor) -> Tensor:
        """Returns a whole tensor."""
        return t

    def _of_rows(self, value: T) -> T:
        """Returns a value of the backend, given one whose tensors are the rows that this process holds."""
        return value


def beside(state: TrainState, grads: Grads, move: Callable[[Tensor, torch.device], Tensor] = Tensor.to) -> Grads:
    """Returns the gradients on the device of the parameters: on the CPU, if the state was placed there.

    Args:
        grads: its gradients, on any device.
        move: copies one gradient to a device.

    Raises:
        ValueError: parameters and optimizer lie on different devices.

    Example:
        >>> from verl_fn.state import Key, Params
        >>> meta = TrainState(Params({"w": torch.zeros(1, device="meta")}), None, 0, Key.from_seed(0), 0)
        >>> beside(meta, Grads({"w": torch.zeros(1)}))["w"].device
        device(type='meta')
    """
    # The first tensor of each tree is enough, since `place` moves whole trees; reading every device takes longer
    # than donation does.
    params, moments, gradients = (_device(part) for part in (state.params, state.optimizer, grads))
    if moments not in (None, params):
        raise ValueError(f"parameters lie on {params}, the optimizer on {moments}; place them together to update")
    if params is None or gradients in (None, params):
        return grads
    device = params
    return tree.map_tensors(lambda gradient: move(gradient, device), grads)


def _device(part: object) -> torch.device | None:
    """Returns the device of the first tensor of a tree, None for a tree without tensors."""
    return next((leaf.device for leaf in pytree.tree_iter(part) if isinstance(leaf, Tensor)), None)
