"""Sharded training on PyTorch's ``fully_shard``: each rank of a process group holds a part of every tensor.

All ranks call each method together, with the same batch, and get the same metrics. On GPUs the process group has both
backends, ``init_process_group("cpu:gloo,cuda:nccl")``: metrics and tensors on the CPU travel over gloo.

FSDP's modules own no parameters. During a call they point at the shards of the state that the call was given, so no
call depends on the states that came before, and nothing is copied in or out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_fn.backends.agreement import (
    Share,
    added_up,
    agree_on_batch,
    agree_on_call,
    agreed,
    brought_together,
    require_same,
    settings,
    share_out,
)
from verl_fn.backends.base import SkeletonBackend, one_at_a_time
from verl_fn.backends.fsdp.modules import ShardedModules, gradient
from verl_fn.backends.fsdp.sharding import (
    Layout,
    check_slots,
    locals_of,
    moved,
    read_shards,
    sent_by_first,
    whole,
    with_specs,
)
from verl_fn.backends.fsdp.torch_private import local_of, spec_of
from verl_fn.backends.hf import exact
from verl_fn.backends.hf.exact import Activations, of_trainer
from verl_fn.backends.hf.folder import Checkpointing, build, check_same_model, hollow
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.outputs import Staged, token_outputs
from verl_fn.backends.hf.skeleton import Hollow, Skeleton, dtype_of
from verl_fn.backends.hf.ulysses import LayoutError, check_heads
from verl_fn.backends.hf.vision import PIXELS
from verl_fn.backends.memory import fits
from verl_fn.backends.tensor_file import Span
from verl_fn.backends.weight_sync import Weights, apart, in_parts, keeping, specs_of
from verl_fn.state import (
    Batch,
    Grads,
    Key,
    Metrics,
    Params,
    Slots,
    Sum,
    TokenOutputs,
    TrainState,
    metrics,
    one_thread,
    tree,
)
from verl_fn.state.ownership import donate as donated
from verl_fn.steps import Loss, Optimizer, apply_update, check_update, total_loss

T = TypeVar("T")


class Fsdp(SkeletonBackend):
    """Trains a Hugging Face causal language model, or a value model on its body, over the ranks of a process group.

    Parameters, gradients and moments are DTensors under canonical names; the optimizer is the one of ``steps`` on
    the local shards. Arguments that are not explained are as for ``Local``.

    Args:
        folder: a Hugging Face model folder that every rank can read.
        replicate: whole copies of the parameters; their gradients are summed.
        sp: neighbouring ranks that share each row (Ulysses).
        max_tokens: the most tokens of a micro-batch; with ``sp``, of the ranks that share it together.
        compile: compile each layer with ``torch.compile``; it takes about a minute in the first calls.
        reshard_after_forward: drop a layer's gathered parameters after each use and reduce gradients after each
            micro-batch; otherwise parameters stay gathered for the whole call, and gradients are reduced once at its
            end. Every rank then needs memory for a whole gradient in ``reduce_dtype``.
        reduce_dtype: in which gradients are summed over ranks, by name or as torch's; in ``bfloat16`` ranks exchange
            half as many bytes. What an update gets is fp32.
        device: ``cpu`` or ``cuda``; a rank computes on its current CUDA device.
        exact: on one rank, log-probs equal those of a ``Sampler`` with ``exact`` in every bit; see ``Local``.

    Raises:
        LayoutError: ``replicate`` or ``sp`` does not divide the ranks, or ``sp`` the heads; or ranks were given
            different settings, optimizers or models.
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: Optimizer,
        *,
        replicate: int = 1,
        sp: int = 1,
        head: str = "lm",
        dtype: str | torch.dtype = "float32",
        max_tokens: int = 16384,
        checkpointing: Checkpointing = False,
        lora: Lora | None = None,
        row_layout: str = "auto",
        freeze_vision_tower: bool = False,
        compile: bool = False,
        reshard_after_forward: bool = True,
        reduce_dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        deterministic: bool = False,
        exact: bool = False,
    ) -> None:
        # Before ranks do anything together: with different settings they would wait for each other.
        options = {name: value for name, value in locals().items() if name not in ("self", "folder", "optimizer")}
        require_same(settings(Path(folder), optimizer, options))
        own = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        super().__init__(
            folder, optimizer, device=own, dtype=dtype, max_tokens=max_tokens, checkpointing=checkpointing,
            row_layout=row_layout, freeze_vision_tower=freeze_vision_tower, exact=exact, head=head,
            deterministic=deterministic, lora=lora, several_ranks=True,
        )  # fmt: skip
        self.layout = Layout.of(device, replicate=replicate, sp=sp)
        self.reduce_dtype = dtype_of(reduce_dtype, "reduce_dtype")
        self.compile = compile
        if exact and (compile or self.layout.size > 1):
            raise LayoutError("exact is for one rank, and for layers that are not compiled")
        self.reshard_after_forward = reshard_after_forward
        self._modules: ShardedModules | None = None

    def named(self, value: Params | Grads | Slots) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors by canonical name, one after the other; all ranks go through them together.

        Raises:
            LayoutError: the value is of another layout.
        """
        self.layout.check(value)
        yield from self.layout.wholes(value)

    def weights(self, params: Params) -> Weights:
        """Returns the parameters for ``RolloutBackend.publish``, adapters merged in; all ranks read them together.

        Ranks send ``held``, their own rows; for an engine in this process, each tensor is gathered when it is read.

        Raises:
            LayoutError: the parameters are of another layout.
        """
        self.layout.check(params)
        skeleton, layout = self._built(), self.layout
        adapters = skeleton.adapters
        buffers = {name: layout.shard(t, self.device) for name, t in in_parts(params.buffers).items()}
        base, own = adapters.without(params) | buffers, adapters.own(params)
        unmerged = apart(base, own, rows=layout.sent, cut=layout.published, local=local_of)

        def gather(t: Tensor) -> Tensor:
            return exact.rounded(whole(t), self.dtype) if self.exact else whole(t)

        def source(
            params: Params, rows: Callable[[Tensor], Tensor] = gather, cut: Callable[..., Any] = lambda specs: None
        ) -> Weights:
            def read() -> Iterator[tuple[str, Tensor]]:
                yield from adapters.merged(params, rows, gather)
                yield from ((name, rows(t)) for name, t in buffers.items())

            specs = specs_of(adapters.merged_like(params) | buffers)
            return Weights(specs, read, cut(specs))

        if self.exact:
            # One rank has the whole of each tensor, and exact models have no buffers.
            return source(params)
        frozen = skeleton.frozen_names
        rows = functools.partial(source, rows=layout.sent, cut=layout.published)
        held = attrs.evolve(keeping(rows, params, frozen, local=local_of), apart=unmerged)
        # Engines of several ranks could disagree about which tensors the ranks gather together.
        in_this_process = keeping(source, params, frozen if dist.get_world_size() == 1 else (), local=local_of)
        return attrs.evolve(in_this_process, held=held)

    # The two steps

    def _forward(self, params: Params, batch: Batch, wanted: frozenset[str]) -> TokenOutputs:
        outputs: list[dict[str, Tensor]] = []
        share = self._share(batch, wanted)
        with self._pointing_at(params):
            for i, (rows, staged) in enumerate(share):
                with fits(staged.batch, i, len(share), self.max_tokens, sharers=self.layout.sp):
                    of_part = self._built()(lambda model, s=staged: token_outputs(model, s, wanted))
                if rows:
                    outputs.append(dict(of_part.by_name))
            agree_on_batch(self.layout, batch)
        with one_thread():
            return TokenOutputs(brought_together(self.layout, batch, share, outputs, wanted, self.device))

    def _forward_backward(
        self, state: TrainState, batch: Batch, loss: Loss, wanted: frozenset[str]
    ) -> tuple[Grads, Metrics]:
        totals: Metrics = {}
        sharers, keeps = self.layout.sp, not self.checkpointing
        share = self._share(batch, wanted, state, loss.together)
        with self._pointing_at(state.params) as pointed:
            for i, (rows, staged) in enumerate(share):

                def compute(model: Skeleton, staged: Staged = staged) -> tuple[Tensor, Metrics]:
                    total, measured = total_loss(loss, token_outputs(model, staged, wanted), staged.batch)
                    return total, {"loss": Sum(total.detach().double()), **measured}

                with fits(staged.batch, i, len(share), self.max_tokens, sharers=sharers, keeps=keeps):
                    self._built_modules().reduce_gradients(self.reshard_after_forward or i == len(share) - 1)
                    total, measured = self._built()(compute)
                    total.backward()
                if rows:
                    totals = metrics.merge(totals, tree.map_tensors(lambda t: t.detach(), measured))
            agree_on_batch(self.layout, batch)
            grads = {name: gradient(pointed[name], state.params[name]) for name in state.params.trained()}
        return Grads(grads), added_up(self.layout, totals)

    @one_at_a_time
    def _updated(
        self, optimizer: Optimizer, state: TrainState, grads: Grads, donate: bool
    ) -> tuple[TrainState, Metrics]:
        specs = {name: spec_of(t) for name, t in state.params.items()}
        check_update(optimizer, state, grads)
        copies = 0
        if donate:
            # Donation happens twice: of the DTensors here, and of their local tensors in apply_update.
            state, state_copies = donated(state, "apply_update")
            grads, grads_copies = donated(grads, "apply_update")
            copies = state_copies + grads_copies

        def reduce(t: Tensor, name: str = "") -> Tensor:
            dist.all_reduce(t, group=self.layout.shard_group)
            return t

        state, grads = locals_of(state), locals_of(grads)
        state, reported = apply_update(optimizer, state, grads, donate=donate, reduce=reduce)
        return with_specs(state, specs), metrics.merge(reported, {"perf/residency_copies": Sum(copies)})

    @one_at_a_time
    def activations(self, params: Params, batch: Batch) -> Activations:
        """Returns what each module computes for each token of a batch, in one micro-batch, on one rank."""
        staged = Staged.of(batch, self.device)
        with self._pointing_at(params):
            found: Activations = self._built()(lambda model: of_trainer(model, staged))
        return found

    # What stays inside

    def _params(self, folder: str | Path, key: Key, *, pretrained: bool) -> Params:
        """Returns the weights of a folder, or random parameters.

        Each rank reads its own rows if the folder's safetensors name and shape tensors as the model does. If
        transformers has to convert them (one tensor for each expert, another prefix, tied weights that are stored
        twice, pickled or quantized files), the first rank loads the whole model and sends the others their shards.
        """
        with agreed():
            model = self._hollow(folder, key)
        make = functools.partial(
            build, folder, self.head, pretrained=pretrained, key=key, row_layout=self._options["row_layout"]
        )
        of_model = make, model, self.layout, self.device
        shards = read_shards(folder, *of_model) if pretrained else sent_by_first(*of_model)
        return Params(shards, self._built().trainable, model.skeleton.new_buffers(self.device))

    def _slots(self, params: Params) -> Any:
        specs = {name: spec_of(t) for name, t in params.items()}
        optimizer = with_specs(self.optimizer.init(locals_of(params)), specs)
        check_slots(optimizer, params)
        return optimizer

    def _held(self, t: Tensor) -> Tensor:
        return local_of(t)

    def _whole(self, t: Tensor) -> Tensor:
        return whole(t)

    def _rows(self, count: int) -> tuple[int, int]:
        return self.layout.bounds(count)

    def _span(self, t: Tensor) -> Span:
        return self.layout.part(t)

    def _of_rows(self, value: T) -> T:
        return with_specs(value, {name: self.layout.spec(t.shape, t.dtype) for name, t in self._blank.items()})

    def _check(self, *values: Params | Grads) -> None:
        for value in values:
            self.layout.check(value)

    def _moved(self, t: Tensor, device: torch.device) -> Tensor:
        return moved(t, device)

    def _hollow(self, folder: str | Path, key: Key) -> Hollow:
        """Returns the model of a folder without its weights; the backend computes with the first one of its own."""
        model = hollow(folder, self.head, **self._options, key=key)
        if self._modules is None and Path(folder) == self.folder:
            check_heads(model.skeleton.config, self.layout.sp)
            if model.skeleton.padded and self.layout.sp > 1:
                raise LayoutError(
                    f"{self.folder}: this model needs padded rows, which ranks cannot share; set "
                    "ulysses_sequence_parallel_size to 1"
                )
            self._adopt(model.skeleton, model.shapes)
            self._modules = ShardedModules(
                model.skeleton,
                model.shapes,
                self.layout,
                self.device,
                dtype=self.dtype,
                reduce_dtype=self.reduce_dtype,
                reshard=self.reshard_after_forward,
                compile=self.compile,
                folder=self.folder,
            )
        else:
            # All states of a backend belong to one model, whichever folder was read last.
            check_same_model(self._built(), model.skeleton, folder)
        return model

    def _built_modules(self) -> ShardedModules:
        if self._modules is None:
            self._hollow(self.folder, Key.from_seed(0))
        assert self._modules is not None
        return self._modules

    def _built(self) -> Skeleton:
        return self._built_modules().skeleton

    def _pointing_at(self, params: Params) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Points FSDP's modules at these shards, and yields the parameters in which gradients accumulate."""
        layout, device = self.layout, self.device
        leaves = self._built().adapters.completed(params, lambda shape: layout.shard(torch.zeros(shape), device))
        # Also where no gradients are needed: FSDP fixes the dtypes of gradients in its first call.
        trained = {*params.trained(), *(leaves.keys() - params.keys())}
        return self._built_modules().pointing_at(leaves, trained)

    def _share(
        self, batch: Batch, wanted: Iterable[str], state: TrainState | None = None, together: str | None = None
    ) -> Share[Staged]:
        """Returns this rank's micro-batches, after comparing the call with the other ranks' calls."""
        agree_on_call(self.layout, batch, wanted, state, together)
        self._built().check_batch(batch)
        if self.layout.sp > 1 and PIXELS in batch:
            raise LayoutError("ranks cannot share rows with images; set ulysses_sequence_parallel_size to 1")
        with one_thread():
            stage = functools.partial(Staged.of, device=self.device, group=self.layout.sequence)
            return share_out(self.layout, batch, self.max_tokens, stage, together, padded=self._built().padded)
