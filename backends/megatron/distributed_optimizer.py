"""Updates that Megatron's own distributed optimizer computes, with the settings and on the tensors of a state.

Megatron's optimizer makes masters and moments of its own and changes them in place. Here its tensors are
empty between calls. During an update they are the tensors of the state, and ``apply_update`` lets it overwrite them.
So a state stays a value, no second copy of it exists, and one optimizer serves any number of states.

The gradients are copied into Megatron's buffer, where its step looks for them. It clips them by its own norm, calls
its Adam (transformer-engine's or Apex's, otherwise torch's), and copies the new masters into the buffer of
parameters. Ranks do not exchange these then: the next call fills that buffer from the state that it is given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from verl_fn.backends.megatron.importing import quiet
from verl_fn.backends.megatron.shards import Piece, Resident
from verl_fn.state import Grads, Metrics, Params, Weighted
from verl_fn.steps import AdamState, AdamW, Chain, ClipByGlobalNorm, Frozen, Optimizer, Update

UPDATES_BY = ("verl_fn", "megatron")
# Megatron's norm has squares in fp32, and these overflow above 2**64.
LARGEST_EXPONENT = 60


def check_updates_by(name: str, optimizer: Optimizer) -> None:
    """Raises an error for an optimizer whose updates cannot be computed by ``name``.

    Raises:
        ValueError: there is no such name, Megatron's optimizer cannot compute what this one does, or its moments are
            in bf16.

    Example:
        >>> from verl_fn.steps import adamw, chain, sgd
        >>> check_updates_by("megatron", chain(adamw(1e-6)))
        >>> check_updates_by("megatron", sgd(0.1))
        Traceback (most recent call last):
        ValueError: Megatron's own optimizer cannot compute SGD(schedule=Constant(lr=0.1, warmup_steps=0), ...
    """
    if name not in UPDATES_BY:
        raise ValueError(f"updates_by = {name!r} must be one of {', '.join(UPDATES_BY)}")
    if optimizer.moments is not None:
        raise ValueError(
            "states of Megatron have moments in fp32: leave out moments=torch.bfloat16 (actor.optim.moments_dtype, "
            "or the critic's), or train with fsdp"
        )
    if name == "megatron" and not isinstance(optimizer, Frozen):
        _translated(optimizer)


def _translated(optimizer: Any) -> tuple[float, AdamW]:
    """Returns the norm above which gradients are clipped, 0 for none as Megatron says it, and AdamW's settings.

    Raises:
        ValueError: the optimizer does something else too.
    """
    clipped, last = 0.0, optimizer
    while isinstance(last, Chain):
        for part in last.parts[:-1]:
            # A class of a user's that inherits from these may do anything.
            if type(part) is not ClipByGlobalNorm or part.max_norm <= 0 or clipped:
                raise _refusal(part)
            clipped = 0.0 if math.isinf(part.max_norm) else part.max_norm
        last = last.parts[-1]
    if type(last) is not AdamW:
        raise _refusal(last)
    return clipped, last


def _refusal(part: Any) -> ValueError:
    return ValueError(
        f"Megatron's own optimizer cannot compute {part}: it computes adamw after at most one "
        'clip_by_global_norm; set updates_by="verl_fn" (actor.megatron.optimizer=verl_fn in a config)'
    )


@attrs.frozen(eq=False)
class _Shard:
    """What Megatron's optimizer updates of one leaf.

    Attributes:
        tensor: the tensor in a group of ``inner``, empty between updates.
        inner: the optimizer of torch, transformer-engine or Apex that Megatron's wraps.
    """

    tensor: Tensor
    inner: Any


@attrs.frozen(eq=False)
class Distributed(Optimizer):
    """An optimizer of ``steps`` whose updates Megatron's distributed optimizer computes; ``of`` makes it.

    Its state is the one of the optimizer of ``steps``.

    Attributes:
        optimizer: the optimizer of ``steps``.
        max_norm: the norm above which it clips, or 0.
        adamw: its last part.
        theirs: Megatron's.
        shards: what it updates, by leaf; leaves of which this rank owns nothing have none.
        resident: which values Megatron's buffers hold.
    """

    optimizer: Optimizer
    max_norm: float
    adamw: AdamW
    theirs: Any
    shards: Mapping[str, _Shard]
    resident: Resident

    @classmethod
    def of(cls, optimizer: Optimizer, resident: Resident, dtype: torch.dtype) -> Distributed:
        """Makes Megatron's optimizer; all ranks call it together.

        Args:
            optimizer: for this rank's leaves.
            resident: the model's buffers and this rank's pieces of them.
        """
        from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
        from megatron.core.optimizer.optimizer_config import ParamPredicate

        max_norm, adamw = _translated(optimizer)
        config = OptimizerConfig(
            lr=adamw.schedule(0),
            weight_decay=adamw.weight_decay,
            adam_beta1=adamw.betas[0],
            adam_beta2=adamw.betas[1],
            adam_eps=adamw.eps,
            clip_grad=max_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        pieces, mask = resident.pieces, adamw.weight_decay_mask
        kept = {piece.param for name, piece in pieces.items() if mask is not None and not mask(name, piece.param)}
        # Without overrides of ours, Megatron's leave out biases and norms.
        overrides = {ParamKey(predicate=ParamPredicate("weight_decay_mask", kept.__contains__)): {"wd_mult": 0.0}}
        with resident.layout.active(), torch.no_grad(), quiet():
            theirs = get_megatron_optimizer(config, [resident.ddp], overrides, use_gloo_process_groups=False)
        shards = dict(_shards(theirs.chained_optimizers, pieces))
        return cls(optimizer, max_norm, adamw, theirs, shards, resident)

    def with_settings_of(self, optimizer: Optimizer) -> Distributed:
        """Returns the same optimizer with the hyperparameters of another one, for this rank's leaves.

        Raises:
            ValueError: Megatron's optimizer cannot compute what ``optimizer`` does, or other parameters decay.
        """
        check_updates_by("megatron", optimizer)
        max_norm, adamw = _translated(optimizer)
        if adamw.weight_decay_mask != self.adamw.weight_decay_mask:
            raise ValueError(
                "Megatron's own optimizer keeps the weight_decay_mask that it was made with; give that mask, or set "
                'updates_by="verl_fn" (actor.megatron.optimizer=verl_fn in a config)'
            )
        return attrs.evolve(self, optimizer=optimizer, max_norm=max_norm, adamw=adamw)

    def init(self, params: Params) -> Any:
        return self.optimizer.init(params)

    def check(self, params: Params, state: Any, position: int) -> None:
        self.optimizer.check(params, state, position)

    def update(self, grads: Grads, state: Any, params: Params, update: Update) -> tuple[Params, Any, Metrics]:
        """Returns the next values; see ``Optimizer``. ``grad_norm`` is the norm by which Megatron clips."""
        adam, lr = _last(state), self.adamw.schedule(update.position)
        reported: Metrics = {"lr": Weighted(lr, 1.0)}
        # Megatron's optimizer would apply gradients that are not finite.
        if not bool(update.skip):
            self.resident.forget()
            self.resident.weights.allocate()
            self.resident.gradients.allocate()
            with self.resident.layout.active(), self._lent(adam, params, lr):
                scale = self._scale(float(update.norm))
                if own := [name for name in grads if name in self.shards]:
                    gradients = [self.resident.pieces[name].gradient for name in own]
                    torch._foreach_copy_(gradients, [grads[name] for name in own])
                    if scale != 1.0:
                        torch._foreach_mul_(gradients, scale)
                _, norm, _ = self.theirs.step()
            reported["grad_norm"] = Weighted(float(norm) / scale, 1.0)
        return params, _with_last(state, attrs.evolve(adam, count=adam.count + 1)), reported

    def _scale(self, norm: float) -> float:
        """Returns by what to multiply gradients so that Megatron's norm is finite, where clipping undoes it."""
        exponent, clips = math.frexp(norm)[1], 0.0 < self.max_norm < 2.0 ** (LARGEST_EXPONENT - 1)
        return 2.0 ** (LARGEST_EXPONENT - exponent) if clips and exponent > LARGEST_EXPONENT else 1.0

    @contextlib.contextmanager
    def _lent(self, adam: AdamState, params: Params, lr: float) -> Iterator[None]:
        """Lends these tensors to Megatron's optimizer inside, and sets its position and its hyperparameters."""
        for part in self.theirs.chained_optimizers:
            part.config.clip_grad = self.max_norm
        for group in self.theirs.param_groups:
            group["lr"], group["betas"], group["eps"] = lr, self.adamw.betas, self.adamw.eps
            # As Megatron's scheduler does.
            group["weight_decay"] = self.adamw.weight_decay * group["wd_mult"]
            # transformer-engine's and Apex's Adam count in the group, torch's with each tensor.
            group["step"] = adam.count
        placed: list[tuple[Tensor, Tensor]] = []

        def on_device(t: Tensor, shard: _Shard) -> Tensor:
            placed.append((t, t.to(shard.tensor.device)))
            return placed[-1][1]

        try:
            for name, shard in self.shards.items():
                shard.tensor.data = on_device(params[name], shard)
                shard.inner.state[shard.tensor] = {
                    "step": torch.tensor(float(adam.count)),
                    "exp_avg": on_device(adam.exp_avg[name], shard),
                    "exp_avg_sq": on_device(adam.exp_avg_sq[name], shard),
                }
            yield
            for given, used in placed:
                if used is not given:
                    given.copy_(used)
        finally:
            for shard in self.shards.values():
                _empty(shard.tensor)
                shard.inner.state.clear()


def _shards(parts: Iterable[Any], pieces: Mapping[str, Piece]) -> Iterator[tuple[str, _Shard]]:
    """Yields what Megatron's optimizers update by leaf, after limiting each to the elements that this rank owns.

    Megatron's own division differs in two places. All ranks of tensor parallelism update all of a parameter that each
    of them holds, and the last stage of a pipeline updates its copy of an embedding. Here each element is updated
    once, and filling the buffers copies it.

    Args:
        parts: Megatron's distributed optimizers, for parameters outside and inside of experts.
    """
    leaves = {piece.param: name for name, piece in pieces.items() if piece.stop > piece.start}
    for part in parts:
        # Filling the buffers exchanges parameters, but the step would do so before they are complete.
        part._defer_param_sync = True
        if part.is_stub_optimizer:
            continue
        for models, mains in (
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                own = [pair for pair in zip(model_group, main_group, strict=True) if pair[0] in leaves]
                model_group[:], main_group[:] = [param for param, _ in own], [main for _, main in own]
                for param, main in own:
                    piece = pieces[leaves[param]]
                    _limit(part._get_model_param_range_map(param), piece)
                    if piece.replicated:
                        # Otherwise only the first rank of tensor parallelism would count it in the norm.
                        main.tensor_model_parallel = True
                    _empty(main)
                    yield leaves[param], _Shard(main, part.optimizer)
        for group, *mains in zip(
            part.optimizer.param_groups, part.shard_fp32_groups, part.shard_fp32_from_float16_groups, strict=True
        ):
            group["params"] = [*mains[0], *mains[1]]


def _limit(ranges: dict[str, Any], piece: Piece) -> None:
    """Limits the ranges of a parameter that Megatron's optimizer reads and writes to a piece's ranges."""
    start = ranges["gbuf_world_in_bucket"].start - ranges["param"].start
    kind = type(ranges["param"])
    ranges["gbuf_world_in_bucket"] = kind(start + piece.start, start + piece.stop)
    ranges["param"] = kind(piece.start, piece.stop)


def _empty(t: Tensor) -> None:
    t.grad = None
    t.data = torch.empty(0, dtype=t.dtype, device=t.device)


def _last(state: Any) -> Any:
    return _last(state[-1]) if isinstance(state, tuple) else state


def _with_last(state: Any, last: AdamState) -> Any:
    return (*state[:-1], _with_last(state[-1], last)) if isinstance(state, tuple) else last
