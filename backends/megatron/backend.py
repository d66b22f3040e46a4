"""Training on megatron-core: ranks share a model by tensor, pipeline, context, expert and data parallelism.

All ranks call each method together, with the same batch, and get the same metrics. On GPUs the process group has both
backends, ``init_process_group("cpu:gloo,cuda:nccl")``: metrics and tensors on the CPU travel over gloo.

A state is made of ordinary tensors: the elements that this rank owns of each parameter, in fp32, and their moments.
Megatron's buffers hold a copy of them in the compute dtype, made anew where a call gets other values than the last.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.agreement import (
    Share,
    added_up,
    agree_on_batch,
    agree_on_call,
    agreed,
    brought_together,
    gathered,
    require_same,
    settings,
    share_out,
)
from verl_fn.backends.base import Base, one_at_a_time
from verl_fn.backends.checkpoint import Writing, check_restorable
from verl_fn.backends.hf.folder import build, check_same_model, hollow
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.outputs import check_needs
from verl_fn.backends.hf.skeleton import dtype_of
from verl_fn.backends.hf.ulysses import LayoutError
from verl_fn.backends.megatron import conversion, saving
from verl_fn.backends.megatron.distributed_optimizer import check_updates_by
from verl_fn.backends.megatron.executor import Executor
from verl_fn.backends.megatron.layout import Layout, Sizes
from verl_fn.backends.megatron.model import How, adds_losses
from verl_fn.backends.megatron.names import check_slots
from verl_fn.backends.megatron.rows import ROUTED, MicroBatch, padded_starts
from verl_fn.backends.megatron.schedule import run
from verl_fn.backends.megatron.shards import check_fully_sharded
from verl_fn.backends.memory import fits
from verl_fn.backends.weight_sync import Apart, Weights, identity_of, in_parts, specs_of
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
from verl_fn.steps import Loss, Optimizer, apply_update, total_loss


class Megatron(Base):
    """Trains a Hugging Face causal language model, or a value model on its body, with Megatron's model of it.

    Parameters, gradients and moments are the elements that a rank owns of each of Megatron's parameters; ``named``
    gives whole tensors under canonical names. The optimizer is the one of ``steps`` on these elements by default.
    Arguments that are not explained are as for ``Local``.

    Args:
        folder: a Hugging Face model folder that every rank can read, of a family that Megatron-Bridge knows.
        tp: ranks that share the matrices of each layer.
        pp: ranks that share the layers.
        cp: ranks that share the tokens of each row.
        ep: ranks that share the experts.
        sp: whether ranks that share matrices share the tokens between them too.
        max_tokens: the most tokens of a micro-batch; with ``cp``, of the ranks that share it together.
        checkpointing: recompute each layer in the backward pass.
        provider: fields of Megatron-Bridge's provider.
        router_replay: record the experts of each token where ``forward`` is asked for ``routed_experts``, and let
            tokens of batches with this field go to the experts that it names; ``forward_backward`` then needs it.
        updates_by: ``verl_fn``, or ``megatron``, whose distributed optimizer then computes what ``optimizer`` says.
        fsdp: Megatron-FSDP takes the place of Megatron's DDP, so that ranks divide the parameters that compute, too.
        device: ``cuda``, where a rank computes on its current device; ``cpu`` works only in tests.
        deterministic: use bitwise repeatable kernels on CUDA, torch's attention too; kernels of the CPU are.

    Raises:
        LayoutError: the sizes do not divide the ranks, or ranks were given different settings.
        MegatronMissing: megatron-core or Megatron-Bridge is missing, or of a version that was not tested.
        ValueError: Megatron's optimizer cannot compute what ``optimizer`` does.
        LoraError, ModelError: when the model is made, it cannot have such adapters.
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: Optimizer,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        sp: bool = False,
        head: str = "lm",
        dtype: str | torch.dtype = "float32",
        max_tokens: int = 16384,
        checkpointing: bool = False,
        provider: Mapping[str, Any] | None = None,
        lora: Lora | None = None,
        router_replay: bool = False,
        updates_by: str = "verl_fn",
        fsdp: bool = False,
        device: str = "cuda",
        deterministic: bool = False,
        freeze_vision_tower: bool = False,
    ) -> None:
        # Before ranks do anything together: with different settings they would wait for each other.
        options = {name: value for name, value in locals().items() if name not in ("self", "folder", "optimizer")}
        require_same(settings(Path(folder), optimizer, options))
        super().__init__(
            optimizer, folder=folder, head=head, deterministic=deterministic, lora=lora, several_ranks=True
        )
        self.layout = Layout.of(Sizes(tp, pp, cp, ep, sp))
        self.dtype = dtype_of(dtype, "dtype")
        self.max_tokens = max_tokens
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        check_updates_by(updates_by, optimizer)
        fields = dict(provider or {})
        if fsdp:
            check_fully_sharded(self.layout.sizes, adapters=lora is not None, updates_by=updates_by)
        self._how = How(
            head, self.dtype, self.device, checkpointing, fields, lora, router_replay, updates_by, fsdp,
            freeze_vision_tower,
        )  # fmt: skip
        self._model: Executor | None = None

    def _saving(self, state: TrainState, folder: Path, later: bool) -> Writing:
        """Each whole tensor is written by one of the ranks."""
        model = self._built()
        check_restorable(state)
        model.check(state.params, *(part for _, part in saving.named_parts(state.optimizer)))
        model.hollow.skeleton.check_trained(Params(model.canonical.shapes, model.trained_names(state.params)))
        require_same({"folder to save in": str(folder)})
        base = self._base_of(state.params, folder)
        return saving.save(state, folder, model, self.folder, self.dtype, base, later=later)

    @one_at_a_time
    def restore(self, folder: str | Path) -> TrainState:
        """Returns the state that ``save`` of any backend wrote, bitwise; each rank reads what it needs.

        Raises:
            ModelError: its frozen weights are in another folder, and this backend's folder has others.
        """
        model = self._built()
        self._check_saved(model.hollow.skeleton, folder)
        return saving.restore(Path(folder), model, self.optimizer, self._on_base)

    @one_at_a_time
    def free_buffers(self) -> None:
        """Frees Megatron's buffers until a call needs them; they hold no state."""
        if self._model is not None:
            self._model.resident.free()

    def named(self, value: Params | Grads | Slots) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors by canonical name, one after the other; all ranks go through them together.

        Raises:
            LayoutError: the value is of another layout.
        """
        model = self._built()
        model.check(value)
        return model.named(value)

    def from_named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the elements that this rank owns of whole tensors by canonical name; ``named`` is its inverse.

        Raises:
            ValueError: they are not those of whole parameters of this model, or have other shapes.
        """
        model = self._built()
        for name, t in tensors.items():
            if (wanted := model.canonical.shapes.get(name)) is not None and t.shape != wanted.shape:
                raise ValueError(f"{name} has the shape {list(t.shape)}, and the model's is {list(wanted.shape)}")
        return model.read(lambda name, start, end: tensors[name][start:end], tensors.keys())

    def weights(self, params: Params) -> Weights:
        """Returns the parameters for ``RolloutBackend.publish``, adapters merged in; all ranks call it together.

        Each tensor is gathered when it is read, so no rank ever holds the whole model. A frozen tower is read by all
        ranks if the engine of any of them lacks it.

        Raises:
            LayoutError: the parameters are of another layout.
        """
        model = self._built()
        model.check(params)
        shapes, buffers = model.canonical.shapes, in_parts(params.buffers)
        given = model.adapters.without(shapes) if params.trainable == frozenset() else shapes
        specs = specs_of(model.adapters.merged_like(given) | buffers)
        tower = model.hollow.skeleton.frozen_names
        if not tower:
            return Weights(specs, lambda: itertools.chain(model.merged(params), buffers.items()))
        frozen = {leaf: t for leaf, t in params.items() if model.canonical.names(leaf) <= tower}
        others = attrs.evolve(params, leaves={leaf: t for leaf, t in params.items() if leaf not in frozen})

        def source(*, lacking: bool) -> Weights:
            def read() -> Iterator[tuple[str, Tensor]]:
                tensors = model.merged(params if any(gathered(lacking)) else others)
                yield from ((name, t) for name, t in tensors if lacking or name not in tower)
                yield from buffers.items()

            return Weights(tuple(spec for spec in specs if lacking or spec.name not in tower), read)

        whole, identity = source(lacking=True), " ".join(gathered(identity_of(frozen)))
        return attrs.evolve(whole, kept=Apart(whole, source(lacking=False), lambda: identity))

    def _forward(self, params: Params, batch: Batch, wanted: frozenset[str]) -> TokenOutputs:
        share, record = self._share(batch, wanted), ROUTED in wanted and ROUTED not in batch
        outputs: dict[int, dict[str, Tensor]] = {}

        def keep(number: int, micro_batch: MicroBatch, part: TokenOutputs) -> tuple[Tensor, Metrics]:
            outputs[number] = dict(part.by_name)
            return torch.zeros((), device=self.device), {}

        with self._holding(params) as model, model.routing(record) as routing:
            self._run(model, share, wanted, keep, forward_only=True, routing=routing)
        agree_on_batch(self.layout, batch)
        own = [outputs[i] for i, rows in enumerate(share.own_rows) if rows and i in outputs]
        with one_thread():
            whole = brought_together(self.layout, batch, share, own, wanted - {ROUTED}, self.device)
            if ROUTED in wanted:
                # A batch that has a recording is routed by it.
                whole[ROUTED] = batch[ROUTED] if routing is None or not record else routing.whole(share, batch)
        return TokenOutputs(whole)

    def _forward_backward(
        self, state: TrainState, batch: Batch, loss: Loss, wanted: frozenset[str]
    ) -> tuple[Grads, Metrics]:
        from megatron.core.distributed import finalize_model_grads

        if self._how.recorded and ROUTED not in batch:
            raise ValueError(f"the batch has no {ROUTED!r} to replay; write what forward gives for it into the batch")
        share = self._share(batch, wanted, state, loss.together)
        self._built().check_trained(state.params)
        totals: list[Metrics] = []

        def finish(number: int, micro_batch: MicroBatch, part: TokenOutputs) -> tuple[Tensor, Metrics]:
            total, measured = total_loss(loss, part, micro_batch.batch)
            if share.own_rows[number]:
                reported = {"loss": Sum(total.detach().double()), **measured}
                # A copy: Megatron divides what it is given in place.
                totals.append(tree.map_tensors(lambda t: t.detach().clone(), reported))
            return total, {}

        with self._holding(state.params) as model, model.routing() as routing:
            model.resident.gradients.allocate()
            model.built.ddp.zero_grad_buffer()
            if adds_losses(model.built.model.config):
                self._weigh_losses_of_routers(model, share)
            self._run(model, share, wanted, finish, forward_only=False, routing=routing)
            agree_on_batch(self.layout, batch)
            finalize_model_grads([model.built.ddp], None, pg_collection=self.layout.groups)
            model.built.complete_gradients(self.layout)
            grads = model.gradients(state.params.trained())
        return Grads(grads), added_up(self.layout, metrics.merge(*totals))

    @one_at_a_time
    def _updated(
        self, optimizer: Optimizer, state: TrainState, grads: Grads, donate: bool
    ) -> tuple[TrainState, Metrics]:
        def total(t: Tensor, name: str = "") -> Tensor:
            dist.all_reduce(t)
            return t

        own = self._built().optimizer if optimizer is self.optimizer else self._built().optimizer_for(optimizer)
        return apply_update(own, state, grads, donate=donate, reduce=self._reduce, total=total)

    def _reduce(self, t: Tensor, name: str = "") -> Tensor:
        """Adds a sum over the elements of one parameter over the ranks that own others of it."""
        pieces, groups = self._built().pieces, self.layout.groups
        if name not in pieces and self.layout.sizes.ep > 1:
            raise LayoutError(
                "update.reduce needs the name of a parameter if ep is above 1, since ranks hold different experts; "
                "call update.reduce(t, name)"
            )
        of_expert = name in pieces and pieces[name].of_expert
        dist.all_reduce(t, group=groups.expt_dp if of_expert else groups.tp_dp_cp)
        return t

    def _params(self, folder: str | Path, key: Key, *, pretrained: bool) -> Params:
        """Returns the weights of a folder, or random parameters.

        Each rank reads what it needs if the folder's safetensors name and shape tensors as transformers' model does.
        Otherwise the first rank makes the model with transformers and sends it tensor by tensor.
        """
        model = self._built()
        options: dict[str, Any] = {"key": key, "lora": self._how.lora, "freeze_tower": self._how.freeze_tower}
        with agreed():
            other = hollow(folder, self.head, **options)
            check_same_model(model.hollow.skeleton, other.skeleton, folder)
        rows = saving.readable(folder, other) if pretrained else None
        if rows is not None:
            leaves = model.read(rows, model.blank.keys())
        else:
            whole: dict[str, Tensor] = {}
            with agreed():
                if self.layout.rank == 0:
                    _, whole = build(folder, self.head, pretrained=pretrained, **options)
            leaves = model.divided(conversion.sent(model.canonical, whole), model.blank.keys(), together=True)
        return Params(leaves, model.trainable, other.skeleton.new_buffers(self.device))

    def _slots(self, params: Params) -> Any:
        optimizer = self._built().optimizer.init(params)
        check_slots(optimizer)
        return optimizer

    def _wanted(self, needs: Iterable[str], *, forward: bool = False) -> frozenset[str]:
        return check_needs(self.head, needs, forward=forward, recorded=self._how.recorded, candidates=False)

    def _check(self, *values: Params | Grads) -> None:
        self._built().check(*values)

    def _free_copies(self) -> None:
        self.free_buffers()

    def _built(self) -> Executor:
        if self._model is None:
            with self._one_call():
                self._model = Executor.of(self.folder, self.optimizer, self.layout, self._how)
        return self._model

    @contextlib.contextmanager
    def _holding(self, params: Params) -> Iterator[Executor]:
        """Fills Megatron's buffers with these parameters, and yields the model."""
        model = self._built()
        with self.layout.active(), model.holding(params):
            model.hold_buffers(params.buffers)
            try:
                yield model
            finally:
                if model.built.sight is not None:
                    model.built.sight.forget()

    def _run(
        self, model: Executor, share: Share[MicroBatch], wanted: frozenset[str], finish: Any, **options: Any
    ) -> None:
        batch, count = share.staged[0].batch, len(share)
        with fits(batch, 0, count, self.max_tokens, sharers=self.layout.sizes.cp, keeps=not self._how.checkpointing):
            run(model.built, self.layout, share.staged, wanted, finish, **options)

    def _share(
        self, batch: Batch, wanted: Iterable[str], state: TrainState | None = None, together: str | None = None
    ) -> Share[MicroBatch]:
        """Returns this rank's micro-batches, after comparing the call with the other ranks' calls."""
        agree_on_call(self.layout, batch, wanted, state, together)
        self._built().hollow.skeleton.check_batch(batch)
        sizes, routers, padded = self.layout.sizes, self._built().routers, self._built().padded
        if routers is not None:
            routers.check(batch)
        with one_thread():
            share = share_out(self.layout, batch, self.max_tokens, lambda part: part, together, padded=padded)
            # The stages of a pipeline exchange tensors of one size.
            lengths = [padded_starts(part.lengths, sizes.tp, sizes.cp)[1] for part in share.staged]
            longest = max(lengths) if sizes.pp > 1 else None
            tables = self._tables([part.lengths for part in share.staged]) if padded else [None] * len(lengths)
            with agreed() if self.layout.size > 1 else contextlib.nullcontext():
                experts = None if routers is None else routers.experts
                staged = [
                    MicroBatch.of(part, self.layout, self.device, longest, experts, table, self._built().sees)
                    for part, table in zip(share.staged, tables, strict=True)
                ]
            return Share(share.rows, staged, share.own_rows)

    def _weigh_losses_of_routers(self, model: Executor, share: Share[MicroBatch]) -> None:
        """Makes the losses that routers add means over all tokens that routers see.

        Megatron multiplies the loss of a micro-batch by its tokens, and expects that gradients are divided by all
        tokens in the end. Here the weights of a batch hold every denominator, so nothing is divided.
        """
        tokens = torch.tensor(sum(part.tokens.numel() for part in share.staged), dtype=torch.float64)
        dist.all_reduce(tokens, group=self.layout.groups.dp_cp)
        scale = torch.full((1,), 1.0 / float(tokens), device=self.device)
        model.built.model.config.moe_grad_scale_func = lambda: scale

    def _tables(self, lengths: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Returns how many rows and columns the table of each micro-batch has; the same with several stages."""
        sizes = self.layout.sizes
        each = sizes.tp if sizes.sp else 1
        tables = [(len(rows), -(-int(rows.max()) // each) * each) for rows in lengths]
        if sizes.pp > 1:
            largest = max(rows for rows, _ in tables), max(columns for _, columns in tables)
            return [largest] * len(tables)
        return tables
