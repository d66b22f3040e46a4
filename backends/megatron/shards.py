"""The elements of a model that a rank owns, in the flat buffers of Megatron's DDP or of Megatron-FSDP.

Megatron's distributed optimizer divides each bucket of a buffer evenly over the ranks that hold the same part of the
model. A rank owns the elements in its part of the bucket; of parameters that all ranks of tensor parallelism hold, it
owns one of tp parts of these. So each element of the model belongs to exactly one rank: it has its master, its
gradient and its moments, and sums over all ranks count nothing twice.

Frozen parameters are not in the buffers. Their elements are divided over the same ranks in the same way.

The buffer of parameters is a copy of the masters in the compute dtype, and never state. ``Resident`` records which
values it was made from, so that a call with the same values copies nothing. The memory of the model can be freed
between calls: tensors keep their storages, whose size becomes 0, as in Megatron's own ``offload_grad_buffers``.

With Megatron-FSDP, ranks divide the parameters that compute, too: it gathers the parameters of a layer for its
forward and for its backward pass, and divides gradients as soon as they are there. A state is what it is with DDP,
but Megatron-FSDP decides which elements a rank owns, and holds its own copy of them only in the compute dtype.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_fn.backends.agreement import agreed
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron.layout import Layout, Sizes
from verl_fn.state import version_of

FULLY_SHARDED = {
    "use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True,
    "overlap_param_gather": True, "megatron_fsdp_main_params_dtype": None,
    "megatron_fsdp_main_grads_dtype": torch.float32, "megatron_fsdp_grad_comm_dtype": torch.float32,
}  # fmt: skip
"""Fields of Megatron's ``DistributedDataParallelConfig``. Masters belong to states, so Megatron-FSDP has none."""


@attrs.frozen(eq=False)
class Memory:
    """The storages of tensors, which can be freed and allocated again.

    Attributes:
        sizes: a tensor of each storage, and the bytes of the storage.
    """

    sizes: list[tuple[Tensor, int]]

    @classmethod
    def of(cls, tensors: Iterable[Tensor | None]) -> Memory:
        """Returns the storages of tensors whose memory is allocated."""
        by_address = {t.untyped_storage().data_ptr(): t.detach() for t in tensors if t is not None and t.numel()}
        return cls([(t, t.untyped_storage().nbytes()) for t in by_address.values()])

    def free(self) -> None:
        """Frees the storages."""
        for t, _ in self.sizes:
            t.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocates the storages, with any values, unless they are allocated."""
        for t, nbytes in self.sizes:
            if t.untyped_storage().nbytes() != nbytes:
                t.untyped_storage().resize_(nbytes)


def _tensors_of(ddp: Any, borrowed: Collection[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns tensors of all storages of a model's parameters, and of its gradients.

    What Megatron-FSDP keeps gathered is not among them. Frozen parameters are in no buffer.

    Args:
        ddp: Megatron's ``DistributedDataParallel`` or ``FullyShardedDataParallel``.
        borrowed: parameters whose memory is a state's, and not the model's.
    """
    if ddp.ddp_config.use_megatron_fsdp:
        groups = ddp.param_and_grad_buffer.parameter_groups
        weights, gradients = (
            [buffer.data for group in groups if (buffer := getattr(group, name)) is not None]
            for name in ("model_weight_buffer", "main_grad_buffer")
        )
        return weights, gradients
    flat = (*ddp.buffers, *ddp.expert_parallel_buffers)
    return [p.data for p in ddp.module.parameters() if p not in borrowed], [b.grad_data for b in flat]


@attrs.frozen(eq=False)
class Piece:
    """The elements of one parameter that a rank owns.

    Attributes:
        param: Megatron's parameter, whose data and ``main_grad`` are views of the flat buffers unless it is frozen.
        start: the number of the first element that this rank owns.
        stop: the one after the last.
        local: the first and last element of the rank's part of the bucket; ranks of tensor parallelism divide it.
        replicated: whether they do, since all of them hold the parameter.
        group: the ranks that own the other elements.
        shift: what a weight in the buffer is more than its leaf: -1 where Megatron's norm scales by 1 + weight, and
            transformers' by the weight.
    """

    param: nn.Parameter
    start: int
    stop: int
    local: tuple[int, int]
    replicated: bool
    group: Any
    shift: float = attrs.field(default=0.0, kw_only=True)

    @property
    def trained(self) -> bool:
        """Whether the parameter has gradients."""
        return self.param.requires_grad

    @property
    def borrowed(self) -> bool:
        """Whether the model can compute with a state's own tensor: it is frozen, and this rank owns all of it."""
        return not self.trained and self.group.size() == 1 and not self.shift

    def lend(self, leaf: Tensor | None) -> None:
        """Makes the model compute with a leaf, or with nothing. A leaf of another dtype or device is copied.

        Nobody writes to a frozen leaf, so no copy of it is needed.
        """
        held = self.param.data
        if leaf is None:
            self.param.data = held.new_zeros(()).expand(held.shape)
        else:
            self.param.data = leaf.detach().to(held.device, held.dtype).view(held.shape)

    @property
    def of_expert(self) -> bool:
        """Whether ranks of expert parallelism hold different ones, and ranks of tensor parallelism all hold it."""
        return _of_expert(self.param)

    @property
    def weight(self) -> Tensor:
        """The elements in the buffer of parameters."""
        return self.param.data.view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """The elements in the buffer of gradients."""
        return self.param.main_grad.view(-1)[self.start : self.stop]  # type: ignore[attr-defined]

    def shifted(self, leaf: Tensor) -> Tensor:
        """Returns what the buffer has for elements of a leaf."""
        return leaf.float() + self.shift if self.shift else leaf

    def whole(self, own: Tensor) -> Tensor:
        """Returns a whole tensor of a value that is divided in this way; all ranks of the group call it together.

        Bits are added up, since adding zeros would turn -0.0 into 0.0.
        """
        full = torch.zeros(self.param.numel(), dtype=torch.float32, device=own.device)
        full[self.start : self.stop] = own
        if self.group.size() > 1:
            dist.all_reduce(full.view(torch.int32), group=self.group)
        return full.view(self.param.shape)


def _of_expert(param: Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def pieces_of(ddp: Any, layout: Layout) -> dict[nn.Parameter, Piece]:
    """Returns the pieces of this rank: empty for parameters of which it owns nothing."""
    pieces = {}
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        ranks, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
        for bucket in buffer.buckets:
            each = bucket.grad_data.numel() // ranks
            low = bucket.offset + rank * each
            for param in bucket.params_list:
                first, end, _ = buffer.param_index_map[param]
                start = min(max(first, low), end) - first
                stop = max(min(end, low + each), first) - first
                pieces[param] = _piece(param, start, max(start, stop), buffer.data_parallel_group, layout)
    for param in ddp.module.parameters():
        if not param.requires_grad:
            group = layout.groups.expt_dp if _of_expert(param) else layout.groups.dp_cp
            ranks, rank, count = group.size(), group.rank(), param.numel()
            pieces[param] = _piece(param, count * rank // ranks, count * (rank + 1) // ranks, group, layout)
    return pieces


def _piece(param: nn.Parameter, start: int, stop: int, group: Any, layout: Layout) -> Piece:
    replicated = layout.sizes.tp > 1 and not _of_expert(param) and not getattr(param, "tensor_model_parallel", False)
    if not replicated:
        return Piece(param, start, stop, (start, stop), False, group)
    count, tp, rank = stop - start, layout.sizes.tp, layout.tp_rank
    own = start + count * rank // tp, start + count * (rank + 1) // tp
    return Piece(param, *own, (start, stop), True, layout.groups.tp_dp_cp)


class Resident:
    """Remembers which tensors the buffer of parameters was made from, and makes it from others.

    Args:
        tied: the parameter of the output layer that is a copy of the embedding of another stage, if there is one.

    Attributes:
        weights: the memory of parameters.
        gradients: the memory of gradients.
        loads: how often the buffer was filled.
    """

    def __init__(self, ddp: Any, pieces: Mapping[str, Piece], layout: Layout, tied: nn.Parameter | None) -> None:
        self.ddp = ddp
        self.pieces = pieces
        self.layout = layout
        self.tied = tied
        self._borrowed = {name: piece for name, piece in pieces.items() if piece.borrowed}
        for piece in self._borrowed.values():
            piece.lend(None)
        weights, gradients = _tensors_of(ddp, {piece.param for piece in self._borrowed.values()})
        self.weights, self.gradients = Memory.of(weights), Memory.of(gradients)
        self.loads = 0
        self._in_pass = False
        self._made_from: dict[str, tuple[Callable[[], Tensor | None], int]] = {}

    @contextlib.contextmanager
    def held(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Holds these values inside, where no other pass can begin: autograd does not see that a buffer changes.

        Raises:
            LayoutError: another pass is not yet done, so this call comes from its loss.
            ValueError: the leaves are not this rank's.
        """
        if self._in_pass:
            raise LayoutError(
                "a loss calls the Megatron backend that computes it; compute before, with backend.forward, and write "
                "what the loss needs into the batch, with batch.with_tokens"
            )
        self.hold(leaves)
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False

    def hold(self, leaves: Mapping[str, Tensor]) -> None:
        """Fills the buffer with these values, unless it holds them already; all ranks call it together.

        An update leaves frozen parameters as they are, so they are filled only if they differ themselves.

        Raises:
            ValueError: the leaves are not this rank's.
        """
        trained, frozen = self._differing(leaves)
        if not trained and not frozen:
            return
        with agreed():
            check_leaves(leaves, self.pieces, [self.pieces.keys()])
        self._made_from = {}
        self.weights.allocate()
        with torch.no_grad():
            if frozen:
                for name, piece in self.pieces.items():
                    if name in self._borrowed:
                        piece.lend(leaves[name])
                    elif not piece.trained:
                        piece.param.data.copy_(piece.whole(piece.shifted(leaves[name].to(piece.param.device))))
            if trained:
                # Together: the GPU is idle, and a call for each parameter takes milliseconds.
                own = [name for name, piece in self.pieces.items() if piece.trained and piece.stop > piece.start]
                if own:
                    shifted = [self.pieces[name].shifted(leaves[name]) for name in own]
                    torch._foreach_copy_([self.pieces[name].weight for name in own], shifted)
                self._share_replicated(leaves)
                if self.ddp.ddp_config.use_megatron_fsdp:
                    # It gathers what it needs as it computes, but not what a call that failed has left gathered.
                    self.ddp.synchronize_param_gather()
                else:
                    self.ddp.start_param_sync(force_sync=True)
            if self.tied is not None and (trained if self.tied.requires_grad else frozen):
                dist.broadcast(
                    self.tied.data, dist.get_global_rank(self.layout.groups.embd, 0), self.layout.groups.embd
                )
        self._made_from = {name: (weakref.ref(t), version_of(t)) for name, t in leaves.items()}
        self.loads += 1

    def free(self) -> None:
        """Frees the memory of parameters and gradients; the next call allocates it again, and fills it."""
        if self.ddp.ddp_config.use_megatron_fsdp:
            # It may still gather for the next layer from memory that is freed here.
            self.ddp.synchronize_param_gather()
        self._made_from = {}
        self.weights.free()
        self.gradients.free()
        for piece in self._borrowed.values():
            piece.lend(None)

    def forget(self) -> None:
        """Forgets which trained values the buffer holds, since something else overwrites them there."""
        for name, piece in self.pieces.items():
            if piece.trained and name in self._made_from:
                self._made_from[name] = (lambda: None), 0

    def _differing(self, leaves: Mapping[str, Tensor]) -> tuple[bool, bool]:
        """Returns whether trained, and whether frozen parameters differ from what the model holds, on any rank.

        Filling is collective: a rank may hold what it is given where another does not.
        """
        made = self._made_from
        differing = torch.zeros(2, dtype=torch.int64)
        if made.keys() != leaves.keys():
            differing += 1
        else:
            for name, t in leaves.items():
                if made[name][0]() is not t or made[name][1] != version_of(t):
                    differing[0 if self.pieces[name].trained else 1] = 1
        if self.layout.size > 1:
            dist.all_reduce(differing, dist.ReduceOp.MAX)
        return bool(differing[0]), bool(differing[1])

    def _share_replicated(self, leaves: Mapping[str, Tensor]) -> None:
        """Completes the parameters that all ranks of tensor parallelism hold, of which each has a part."""
        shared = [(name, p) for name, p in self.pieces.items() if p.replicated and p.trained]
        if not shared:
            return
        sizes = [piece.local[1] - piece.local[0] for _, piece in shared]
        flat = torch.zeros(sum(sizes), device=shared[0][1].param.device)
        for (name, piece), part in zip(shared, flat.split(sizes), strict=True):
            part[piece.start - piece.local[0] : piece.stop - piece.local[0]] = piece.shifted(leaves[name])
        dist.all_reduce(flat, group=self.layout.groups.tp)
        for (_, piece), part in zip(shared, flat.split(sizes), strict=True):
            piece.param.data.view(-1)[piece.local[0] : piece.local[1]] = part


def check_leaves(
    leaves: Mapping[str, Tensor], pieces: Mapping[str, Piece], expected: Sequence[Collection[str]]
) -> None:
    """Raises LayoutError for a value of another model, layout or backend.

    Args:
        expected: the sets of leaves that a value can have.
    """
    if not any(leaves.keys() == set(names) for names in expected):
        differing = sorted(leaves.keys() ^ set(expected[0]))
        raise LayoutError(
            f"a value of another layout or backend was given to a megatron backend (they differ in {differing[:3]}); "
            "save the state there and restore it here"
        )
    for name, t in leaves.items():
        wanted = pieces[name].stop - pieces[name].start
        if t.shape != (wanted,):
            raise LayoutError(
                f"a value of another layout was given to a megatron backend: {name} has the shape {list(t.shape)} on "
                f"this rank, which owns {wanted} elements; save the state there and restore it here"
            )


def check_fully_sharded(sizes: Sizes, *, adapters: bool, updates_by: str) -> None:
    """Raises LayoutError for what does not go together with Megatron-FSDP, or was not tried with it.

    Example:
        >>> check_fully_sharded(Sizes(tp=2), adapters=False, updates_by="verl_fn")
        Traceback (most recent call last):
        verl_fn.backends.hf.ulysses.LayoutError: Megatron-FSDP was not tried with tp = 2: set it to 1, or turn ...
    """
    if sizes.pp > 1:
        problem = f"has no pipeline parallelism, and pp = {sizes.pp}: set it to 1"
    elif sizes.tp > 1:
        problem = f"was not tried with tp = {sizes.tp}: set it to 1"
    elif adapters:
        problem = "was not tried with adapters: train all parameters"
    elif updates_by != "verl_fn":
        problem = "was not tried with Megatron's own optimizer: let verl_fn compute updates"
    else:
        return
    raise LayoutError(f"Megatron-FSDP {problem}, or turn Megatron-FSDP off")


def unwrapped(ddp: Any) -> Any:
    """Returns the model inside, with the parameters that compute in place of Megatron-FSDP's DTensors."""
    for _, param in ddp.param_and_grad_buffer.optimizer_named_parameters:
        # Megatron-FSDP gives them gradients in fp32, and expects masters in fp32 where it has none here.
        param.grad_dtype = None
    ddp.module._replace_param_with_raw_if_needed()
    return ddp.module.module


@attrs.frozen(eq=False)
class _Sharded(Piece):
    """The elements of one parameter that a rank owns of Megatron-FSDP's buffers.

    Attributes:
        buffers: Megatron-FSDP's group of parameters.
        number: of the parameter in this group.
    """

    buffers: Any
    number: int

    @property
    def weight(self) -> Tensor:
        """The elements in the buffer of parameters."""
        return self.buffers.model_weight_buffer.get_item(self.number, only_shard=True)

    @property
    def gradient(self) -> Tensor:
        """The elements in the buffer of gradients."""
        return self.buffers.main_grad_buffer.get_item(self.number, only_shard=True)


def sharded_pieces(ddp: Any, layout: Layout) -> dict[nn.Parameter, Piece]:
    """Returns the pieces of this rank: empty for parameters of which it owns nothing."""
    pieces: dict[nn.Parameter, Piece] = {}
    for group in ddp.param_and_grad_buffer.parameter_groups:
        ranks = layout.groups.expt_dp if group.is_expert_param else layout.groups.dp_cp
        for number, param in enumerate(group.params):
            start, stop = group.main_grad_buffer._get_item_slice_in_shard(number)
            pieces[param] = _Sharded(param, start, stop, (start, stop), False, ranks, group, number)
    return pieces
