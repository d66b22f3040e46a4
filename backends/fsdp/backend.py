"""Sharded training on PyTorch's ``fully_shard``: each rank of a process group holds a part of every tensor.

All ranks call each method together, with the same batch, and get the same metrics. On GPUs the process group has both
backends, ``init_process_group("cpu:gloo,cuda:nccl")``: metrics and what is placed on the CPU travel over gloo.

FSDP's modules own nothing: for as long as a call runs they point at the shards of the state that the call was given,
so every state means what it means, whichever came before, and nothing is copied in or out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_fn.backends.agreement import agreed, gathered, of_batch, require_same, sample, settings
from verl_fn.backends.checkpoint import state_folder as checkpoint
from verl_fn.backends.fsdp.sharding import Layout, check_slots, locals_of, moved, parameter, with_specs
from verl_fn.backends.hf.folder import ModelError, build, check_same_config, check_same_model
from verl_fn.backends.hf.lora import Lora, canonical
from verl_fn.backends.hf.outputs import Staged, check_head, check_needs, check_targets, token_outputs
from verl_fn.backends.hf.skeleton import Skeleton, compile_layer, dtype_of, repeatable
from verl_fn.backends.hf.ulysses import check_heads
from verl_fn.backends.memory import fits
from verl_fn.backends.placing import beside
from verl_fn.backends.weight_sync import Weights, specs_of
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
    deal,
    donate,
    groups_of,
    metrics,
    tree,
)
from verl_fn.state.serial import flatten
from verl_fn.steps import Loss, Optimizer, apply_update, check_update, check_weights, total_loss


class Fsdp:
    """Any Hugging Face causal language model, or a value model on its body, over the ranks of a process group.

    Parameters, gradients and moments are DTensors under canonical names; the optimizer is the one of ``steps`` on
    the local shards.

    Args:
        folder: a Hugging Face model folder that every rank can read.
        optimizer: from ``verl_fn.steps``.
        replicate: whole copies of the parameters; their gradients are summed.
        sp: neighbouring ranks that share each row (Ulysses).
        head: ``lm`` for a policy, ``value`` for a critic.
        compute_dtype: ``float32``, or ``bfloat16`` with fp32 masters, gradients and reductions.
        max_tokens: strict budget of tokens a micro-batch; with ``sp``, of the ranks that share it together.
        checkpointing: recompute each layer in the backward pass.
        lora: adapters to train; all else but a value head is then frozen.
        compile: compile each layer with ``torch.compile``, which takes a minute at the first calls.
        reshard_after_forward: drop a layer's gathered parameters after each use; otherwise they stay for the call.
        device: ``cpu`` or ``cuda``; a rank computes on its current CUDA device.
        deterministic: bitwise repeatable kernels on CUDA; the CPU's always are.

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
        compute_dtype: str = "float32",
        max_tokens: int = 16384,
        checkpointing: bool = False,
        lora: Lora | None = None,
        compile: bool = False,
        reshard_after_forward: bool = True,
        device: str = "cpu",
        deterministic: bool = False,
    ) -> None:
        # Before ranks do anything together, since they would wait for each other.
        options = {name: value for name, value in locals().items() if name not in ("self", "folder", "optimizer")}
        require_same(settings(Path(folder), optimizer, options))
        self.folder = Path(folder)
        self.optimizer = optimizer
        self.layout = Layout.of(device, replicate=replicate, sp=sp)
        self.head = check_head(head)
        self.dtype = dtype_of(compute_dtype, "compute_dtype")
        self.max_tokens = max_tokens
        self.checkpointing = checkpointing
        self.lora = lora
        self.compile = compile
        self.reshard_after_forward = reshard_after_forward
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.deterministic = deterministic
        self._skeleton: Skeleton | None = None
        self._places: dict[str, Any] = {}
        self._groups: list[Any] = []
        self._empty: dict[str, nn.Parameter] = {}
        self._blank = Params({})

    # Making states

    def init(self, key: Key) -> TrainState:
        """A state with random parameters drawn from ``key``, the same ones as on any other layout."""
        return self._new_state(self.folder, key, pretrained=False)

    def load_pretrained(self, folder: str | Path | None = None, key: Key | None = None) -> TrainState:
        """A fresh state around the weights of ``folder``, by default the backend's own."""
        return self._new_state(folder or self.folder, key or Key.from_seed(0), pretrained=True)

    def save(self, state: TrainState, folder: str | Path) -> None:
        """Write the state as ``Local`` would, each rank what it holds: nothing is gathered."""
        self.layout.check(state.params)
        require_same({"folder to save in": str(folder)})
        skeleton, params = self._built(), state.params
        skeleton.check_trained(params)
        rest, scalars = flatten(attrs.evolve(state, params=skeleton.adapters.kept(params)))
        merged = skeleton.adapters.filed(params, rows=lambda t: t._local_tensor, whole=lambda t: t.full_tensor())
        weights = {name: DTensor(t, params[name]._spec, requires_grad=False) for name, t in merged.items()}
        model, others = (
            {name: self.layout.part(t) for name, t in tensors.items()}
            for tensors in ({**weights, **skeleton.constants}, rest)
        )
        describe = lambda folder: checkpoint.describe_model(folder, skeleton, self.folder)  # noqa: E731
        checkpoint.save_state(folder, model, others, scalars, describe, gather=gathered, rank=self.layout.rank)

    def restore(self, folder: str | Path) -> TrainState:
        """The state that ``save`` of any backend wrote, bitwise; each rank reads what it will hold."""
        skeleton = self._built()
        require_same({"folder to restore": str(folder), "state (train_state.json)": checkpoint.about(folder)})
        with agreed():
            checkpoint.check_finished(folder)
            check_same_config(skeleton, folder)
            skeleton.adapters.check(Path(folder))
        adapters, params = skeleton.adapters, self._blank
        rest = TrainState(adapters.kept(params), self.optimizer.init(params), 0, Key.from_seed(0), 0)
        model = {**adapters.without(params), **skeleton.constants}
        weights, rest = checkpoint.read_state(
            folder, model, rest, rows=self.layout.bounds, device=self.device, gather=gathered
        )
        specs = {name: self.layout.spec(t.shape, t.dtype) for name, t in params.items()}
        return with_specs(attrs.evolve(rest, params=adapters.joined(params, weights, rest.params)), specs)

    def place(self, state: TrainState, *, params: str | None = None, optimizer: str | None = None) -> TrainState:
        """The same state with parameters or optimizer tree on another device.

        Raises:
            LayoutError: ranks were asked for different devices.
        """
        require_same({"params for place": params, "optimizer for place": optimizer})
        move = lambda value, to: value if to is None else tree.map_tensors(lambda t: moved(t, to), value)  # noqa: E731
        return attrs.evolve(state, params=move(state.params, params), optimizer=move(state.optimizer, optimizer))

    def named_tensors(self, params: Params) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under canonical names, with the adapters merged in, one after the other on all ranks."""
        whole = lambda t: t.full_tensor()  # noqa: E731
        yield from self._built().adapters.merged(params, whole, whole)

    def weights(self, params: Params) -> Weights:
        """These parameters for ``RolloutBackend.publish``, adapters merged in; all ranks read it together.

        A tensor is gathered when it is asked for, so no rank ever holds the whole model.
        """
        adapters = self._built().adapters

        def merged() -> Iterator[tuple[str, Tensor]]:
            return adapters.merged(params, DTensor.full_tensor, DTensor.full_tensor)

        return Weights(specs_of(adapters.without(params)), merged)

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """``fn(*values)``: of this rank's shards; all ranks call it together."""
        return fn(*values)

    # The two steps

    @torch.no_grad()
    def forward(self, params: Params, batch: Batch, needs: Iterable[str] = ("logprobs",)) -> TokenOutputs:
        """What ``needs`` names for every token with ``response_mask``, of all rows on every rank, on the CPU."""
        wanted = check_needs(self.head, needs)
        parts_here: list[tuple[list[int], TokenOutputs]] = []
        self._agree(batch, wanted)
        parts = self._mine(batch)
        with repeatable(self.deterministic), self._pointing_at(params):
            for i, (rows, staged) in enumerate(parts):
                with fits(staged.batch, i, len(parts), self.max_tokens, sharers=self.layout.sp):
                    outputs = self._built()(lambda model, s=staged: token_outputs(model, s, wanted))
                if rows:
                    parts_here.append((rows, tree.map_tensors(lambda t: t.cpu(), outputs)))
        everywhere = [one for rank in gathered(parts_here if self.layout.speaks else []) for one in rank]
        split = Split(batch, tuple(torch.tensor(rows) for rows, _ in everywhere))
        return split.join_outputs([outputs for _, outputs in everywhere])

    def forward_backward(self, state: TrainState, batch: Batch, loss: Loss) -> tuple[Grads, Metrics]:
        """Gradients of the loss over the whole batch, fp32 shards, and its metrics, with the total as ``loss``.

        Raises:
            ValueError: the batch lacks the weights that the loss's levels want or the field that keeps its rows
                together, a row or group is longer than the token budget, or ranks were given different batches, needs
                or states. That they were given different losses is not seen.
            DonatedError: the state was donated.
            OutOfMemory: a micro-batch does not fit into this rank's memory. The others wait for it, as for a rank
                whose loss raises, until the process group's timeout; the Ray driver tells at once.
        """
        check_weights(loss, batch)
        wanted = check_needs(self.head, loss.needs)
        found: Metrics = {}
        sharers, keeps = self.layout.sp, not self.checkpointing
        self._agree(batch, wanted, state)
        parts = self._mine(batch, loss.together)
        with repeatable(self.deterministic), self._pointing_at(state.params) as held:
            for i, (rows, staged) in enumerate(parts):

                def compute(model: Skeleton, staged: Staged = staged) -> tuple[Tensor, Metrics]:
                    total, of_part = total_loss(loss, token_outputs(model, staged, wanted), staged.batch)
                    return total, {"loss": Sum(total.detach().double()), **of_part}

                with fits(staged.batch, i, len(parts), self.max_tokens, sharers=sharers, keeps=keeps):
                    total, told = self._built()(compute)
                    total.backward()
                if rows:
                    found = metrics.merge(found, tree.map_tensors(lambda t: t.detach(), told))
            grads = {name: _gradient(held[name], state.params[name]) for name in state.params.trained()}
        told = gathered(tree.map_tensors(lambda t: t.cpu(), found) if self.layout.speaks else {})
        return Grads(grads), metrics.merge(*told)

    def apply_update(self, state: TrainState, grads: Grads, *, donate: bool = True) -> tuple[TrainState, Metrics]:
        """The next state; see ``steps.apply_update``, which runs on the local shards where the parameters are.

        Raises:
            ValueError: parameters and optimizer lie on different devices, or the gradients are not those of the
                trainable parameters.
            LayoutError: the state or the gradients are of another layout.
        """
        self.layout.check(state.params)
        self.layout.check(grads)
        grads = beside(state, grads, moved)
        return _apply(self.optimizer, self.layout, state, grads, donate)

    # What stays inside

    def _new_state(self, folder: str | Path, key: Key, *, pretrained: bool) -> TrainState:
        with agreed():
            whole = self._build(folder, key, pretrained=pretrained)
        require_same({"key": str(key), "weights": sample(whole)})
        shards = {name: self.layout.shard(t, self.device) for name, t in whole.items()}
        params = Params(shards, self._built().trainable)
        specs = {name: t._spec for name, t in params.items()}
        optimizer = with_specs(self.optimizer.init(locals_of(params)), specs)
        check_slots(optimizer, params)
        return TrainState(params, optimizer, 0, key.fold_in("train"), 0)

    def _build(self, folder: str | Path, key: Key, *, pretrained: bool) -> dict[str, Tensor]:
        """Whole parameters on the CPU."""
        skeleton, params = build(
            folder, self.head, pretrained=pretrained, key=key.fold_in("init"), checkpointing=self.checkpointing,
            lora=self.lora,
        )  # fmt: skip
        if self._skeleton is None and Path(folder) == self.folder:
            check_heads(skeleton.config, self.layout.sp)
            skeleton.move_buffers(self.device)
            self._blank = Params({name: t.to("meta") for name, t in params.items()}, skeleton.trainable)
            self._skeleton, self._places = skeleton, self._wrapped(skeleton, params)
            for name, t in params.items():
                empty = DTensor(
                    torch.empty(0, device="meta"), self.layout.spec(t.shape, t.dtype), requires_grad=False
                )
                self._empty[name] = parameter(empty, False)
        else:
            check_same_model(self._built(), skeleton, folder)
        return params

    def _wrapped(self, skeleton: Skeleton, params: Iterable[str]) -> dict[str, Any]:
        """Shard the skeleton, layer by layer; FSDP's record of each parameter, by canonical name.

        Raises:
            ModelError: the model has no list of layers to shard by.
        """
        layers = getattr(skeleton.model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"{self.folder}: {type(skeleton.model).__name__} has no list of layers to shard by")
        policy = MixedPrecisionPolicy(
            param_dtype=None if self.dtype == torch.float32 else self.dtype, reduce_dtype=torch.float32
        )
        for layer in layers:
            if self.compile:
                compile_layer(layer)
            fully_shard(
                layer, mesh=self.layout.mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward
            )
        # The root's own parameters stay gathered until its backward pass: the output layer is used outside a module.
        fully_shard(skeleton, mesh=self.layout.mesh, mp_policy=policy, reshard_after_forward=False)
        names = {id(m): name for name, m in skeleton.model.named_modules(remove_duplicate=False)}
        places = {}
        for module in skeleton.modules():
            if isinstance(module, FSDPModule):
                if self.layout.size > 1:
                    # Rows of all ranks add up, and no denominator is anywhere but in loss_weight.
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
                module.set_reshard_after_backward(self.reshard_after_forward)
                if (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                    self._groups.append(group)
                    places.update({_name_of(place, names, params): place for place in group.fsdp_params})
        return places

    def _built(self) -> Skeleton:
        if self._skeleton is None:
            self._build(self.folder, Key.from_seed(0), pretrained=False)
        assert self._skeleton is not None
        return self._skeleton

    @contextlib.contextmanager
    def _pointing_at(self, params: Params) -> Iterator[dict[str, nn.Parameter]]:
        """FSDP's modules on these shards; gradients gather in the parameters that are given."""
        zeros = lambda shape: self.layout.shard(torch.zeros(shape), self.device)  # noqa: E731
        leaves = self._built().adapters.completed(params, zeros)
        if leaves.keys() != self._places.keys():
            odd = sorted(leaves.keys() ^ self._places.keys())
            raise ValueError(f"the state's parameters are not this model's: {odd[:5]}")
        self.layout.check(params)
        if odd := [name for name, t in params.items() if t.shape != self._blank[name].shape]:
            raise ValueError(f"the state's parameters have other shapes than this model's: {odd[:5]}")
        # Also without gradients: FSDP decides in its first call which dtypes gradients will have.
        trained, held = {*params.trained(), *(leaves.keys() - params.keys())}, {}
        nothing = torch.empty(0, device=self.device)
        try:
            for group in self._groups:
                # FSDP sets these once, by what its first call trains.
                group._orig_dtype = group._reduce_dtype = torch.float32
            for name, place in self._places.items():
                held[name] = parameter(moved(leaves[name], self.device), name in trained)
                place._setattr_on_modules(held[name])
                place.reset_sharded_param()
            yield held
        except BaseException:
            # FSDP stays in the middle of the pass, and would give zeros for gradients from now on.
            self._skeleton, self._places, self._groups, self._empty = None, {}, [], {}
            raise
        for group in self._groups:
            # What is gathered is of these shards; the next call's may be others.
            group.reshard()
        for name, place in self._places.items():
            # Let go of the shards, so that they can be donated.
            place._setattr_on_modules(self._empty[name])
            place.sharded_param = self._empty[name]
            place._sharded_param_data = nothing

    def _agree(self, batch: Batch, wanted: Iterable[str], state: TrainState | None = None) -> None:
        """Refuse what differs between ranks, since they would mix it or wait for each other.

        Raises:
            LayoutError: ranks were given different batches, needs, or states of different steps.
        """
        if self.layout.size > 1:
            about = () if state is None else (state.step, str(state.rng))
            require_same({"batch": of_batch(batch), "needs": sorted(wanted), "state (step and key)": about})

    def _mine(self, batch: Batch, together: str | None = None) -> list[tuple[list[int], Staged]]:
        """This rank's micro-batches, as many as every other rank has; one to fill up is of no weight.

        All are staged before any is computed on: a copy to a GPU waits for what the GPU does.
        """
        check_targets(batch)
        self._built().check_longest(int(batch.lengths.max()))
        found = []
        for rows in deal(batch, self.layout.shares, self.max_tokens, together)[self.layout.share]:
            # One that fills up is a whole group, so that a loss of groups can be computed on it.
            part = batch.take(torch.tensor(rows or groups_of(batch, together)[0]))
            if not rows and "loss_weight" in batch:
                part = part.with_tokens(loss_weight=torch.zeros(part.num_tokens))
            if not rows and "row_weight" in batch:
                part = part.with_rows(row_weight=torch.zeros(len(part)))
            found.append((rows, Staged.of(part, self.device, self.layout.sequence)))
        return found


def _apply(
    optimizer: Optimizer, layout: Layout, state: TrainState, grads: Grads, donated: bool
) -> tuple[TrainState, Metrics]:
    specs = {name: t._spec for name, t in state.params.items()}
    check_update(optimizer, state.params, grads)
    copies = 0
    if donated:
        # Twice: here the DTensors, in apply_update what they hold.
        state, more = donate(state, "apply_update")
        grads, again = donate(grads, "apply_update")
        copies = more + again

    def reduce(total: Tensor) -> Tensor:
        dist.all_reduce(total, group=layout.shard_group)
        return total

    state, grads = locals_of(state), locals_of(grads)
    state, found = apply_update(optimizer, state, grads, donate_inputs=donated, reduce=reduce)
    return with_specs(state, specs), metrics.merge(found, {"perf/residency_copies": Sum(copies)})


def _name_of(place: Any, names: dict[int, str], params: Iterable[str]) -> str:
    """The canonical name of a parameter, of the several that a tied one has."""
    info = place._module_info
    modules = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    found = [canonical(f"{names[id(module)]}.{name}".lstrip(".")) for module, name in modules]
    return next(name for name in found if name in params)


def _gradient(parameter: nn.Parameter, like: DTensor) -> DTensor:
    """The gathered gradient as a value; zeros where the loss does not depend on the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(like, dtype=torch.float32)
    found = parameter.grad._local_tensor
    # The same memory without autograd's tie to the buffer of all gradients of a layer, which would outlive it.
    plain = found.new_empty(0).set_(found.untyped_storage(), found.storage_offset(), found.size(), found.stride())
    return DTensor(plain, like._spec, requires_grad=False)
