"""AdamW and SGD through torch's fused kernels, their learning-rate schedules, and masks for weight decay.

A schedule is a function of the number of updates applied so far, with readable settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from verl_fn.errors import ArgumentError, takes
from verl_fn.state import Grads, Metrics, Node, Params, Slots, Weighted, node

from .transforms import Optimizer, Update, check_slots, laid_out_as, tensors_of

MOMENTS = (None, torch.bfloat16)  # dtypes of the running averages; None is the parameters' own
Mask: TypeAlias = Callable[[str, Tensor], bool]
Schedule: TypeAlias = Callable[[int], float]


@attrs.frozen
class Constant:
    """A constant learning rate after a warm-up. A plain number is the same schedule without a warm-up.

    Attributes:
        warmup_steps: the number of updates in which the learning rate grows linearly from 0.

    Example:
        >>> [constant(1.0, warmup_steps=2)(i) for i in range(4)]
        [0.0, 0.5, 1.0, 1.0]
        >>> constant(0.1) == as_schedule(0.1)
        True
    """

    lr: float = attrs.field(validator=attrs.validators.ge(0))
    warmup_steps: int = 0

    def __call__(self, count: int) -> float:
        return self.lr * _warmup(count, self.warmup_steps)


@attrs.frozen
class Linear:
    """A linear decay after a warm-up.

    Attributes:
        lr: the learning rate after the warm-up.
        total_steps: the update at which the decay ends.
        warmup_steps: the number of updates in which the learning rate grows linearly from 0.
        min_lr_ratio: the learning rate at the end, as a fraction of ``lr``.

    Example:
        >>> [linear(1.0, 4)(i) for i in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """

    lr: float = attrs.field(validator=attrs.validators.ge(0))
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    def __call__(self, count: int) -> float:
        done = min(1.0, max(0, count - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        ratio = self.min_lr_ratio + (1.0 - self.min_lr_ratio) * self.rest(done)
        return self.lr * _warmup(count, self.warmup_steps) * ratio

    def rest(self, done: float) -> float:
        """Returns what is left of the learning rate when this fraction of the decay is done."""
        return 1.0 - done


@attrs.frozen
class Cosine(Linear):
    """A decay like the first half of a cosine after a warm-up; its attributes are the ones of ``Linear``.

    Example:
        >>> [round(cosine(1.0, 4)(i), 3) for i in (0, 2, 4)]
        [1.0, 0.5, 0.0]

    Source: Loshchilov & Hutter 2017 (arXiv 1608.03983).
    """

    def rest(self, done: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * done))


constant = Constant
linear = Linear
cosine = Cosine


def as_schedule(schedule: Schedule | float) -> Schedule:
    """Converts a number to a constant schedule; a schedule stays as it is."""
    return schedule if callable(schedule) else Constant(float(schedule))


def _rate(schedule: Schedule, count: int) -> float:
    """Returns the learning rate of an update.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not 0 <= (lr := float(schedule(count))) < math.inf:
        raise ValueError(f"the learning rate of update {count} is {lr}; it must be finite and not negative")
    return lr


def _warmup(count: int, warmup_steps: int) -> float:
    return min(1.0, count / warmup_steps) if warmup_steps > 0 else 1.0


@attrs.frozen
class NoDecay:
    """A mask that excludes parameters by parts of their names; ``no_decay`` makes it."""

    parts: tuple[str, ...]

    def __call__(self, name: str, tensor: Tensor) -> bool:
        return not any(part in name for part in self.parts)


def no_decay(*parts: str) -> NoDecay:
    """Makes a mask that decays each parameter unless its canonical name contains one of ``parts``.

    Example:
        >>> import torch
        >>> mask = no_decay("bias", "norm")
        >>> mask, mask("model.norm.weight", torch.zeros(1)), mask("lm_head.weight", torch.zeros(1))
        (NoDecay(parts=('bias', 'norm')), False, True)
    """
    return NoDecay(parts)


def matrices(name: str, tensor: Tensor) -> bool:
    """Decays parameters of two and more dimensions: no biases and no weights of norms.

    Example:
        >>> import torch
        >>> matrices("model.norm.weight", torch.zeros(4)), matrices("lm_head.weight", torch.zeros(4, 4))
        (False, True)

    Source: Megatron-LM exempts the same parameters from weight decay.
    """
    return tensor.ndim > 1


@attrs.frozen
class ByName:
    """A mask that lists all parameters; ``as_mask`` makes it from a mapping."""

    decays: dict[str, bool] = attrs.field(hash=False)

    def __call__(self, name: str, tensor: Tensor) -> bool:
        if name not in self.decays:
            raise ValueError(f"weight_decay_mask has no value for {name}; give it one for every trained parameter")
        return self.decays[name]


def as_mask(mask: Mask | Mapping[str, bool] | None) -> Mask | None:
    """Converts a mapping by name to a mask; a function of name and tensor, or None for all, stays as it is.

    On sharded backends the function gets this process's shard of a tensor. It has as many dimensions as the whole
    tensor, but another first size.

    Raises:
        ArgumentError: it is something else.

    Example:
        >>> as_mask({"w": True, "b": False}) == as_mask({"b": False, "w": True})
        True
        >>> as_mask({"w": True, "b": False})
        ByName(decays={'b': False, 'w': True})
    """
    if isinstance(mask, Mapping):
        return ByName({name: bool(decays) for name, decays in sorted(mask.items())})
    if mask is not None and not takes(mask, ["name", "tensor"]):
        raise ArgumentError(
            f"weight_decay_mask is a function of name and tensor or a mapping by name, not {mask!r}; "
            "no_decay('bias', 'norm') leaves out parameters with these parts in their names"
        )
    return mask


@node
class AdamState(Node):
    """The state of AdamW.

    Attributes:
        count: the number of updates so far.
        exp_avg: the running average of each gradient.
        exp_avg_sq: the running average of each gradient's square.
    """

    count: int
    exp_avg: Slots
    exp_avg_sq: Slots


# Elements of a leaf that are updated at a time if their averages are in bf16, so that wide copies take little memory.
PIECE = 2**24


def rounded(values: Tensor, seed: int) -> Tensor:
    """Rounds fp32 to bf16 up or down at random, so that the mean of many roundings is the value.

    What is drawn for an element depends on its value and the seed only: not on its place in the tensor, so shards of
    a tensor are rounded as the whole is, nor on torch's generators.

    Args:
        values: fp32.
        seed: other seeds give other draws.

    Example:
        >>> kept = rounded(torch.tensor([1.0, float("inf"), 0.0]), 7)
        >>> kept.dtype, kept.tolist()
        (torch.bfloat16, [1.0, inf, 0.0])
        >>> one = torch.tensor([1.0 + 2**-9])
        >>> sum(rounded(one, seed).item() > 1.0 for seed in range(1000)) // 100
        2

    Source: Gupta et al. 2015 (arXiv 1502.02551); the draws are Wellons' hash lowbias32 of an element's bits and the
    seed (https://nullprogram.com/blog/2018/07/31/).
    """
    bits = values.view(torch.int32)
    drawn = bits ^ (seed * 0x9E3779B1 % 2**31)
    # The masks remove the copies of the sign that shifts of signed numbers bring in. Products wrap around.
    drawn = (drawn ^ (drawn >> 16 & 0xFFFF)) * 0x7FEB352D
    drawn = (drawn ^ (drawn >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    drawn ^= drawn >> 16 & 0xFFFF
    # bf16 has the first half of the bits, and the carry of the second one rounds up.
    return ((bits + (drawn & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _as_betas(betas: Iterable[float]) -> tuple[float, float]:
    beta1, beta2 = betas
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas are at least 0 and below 1, and not {beta1} and {beta2}")
    return beta1, beta2


@attrs.frozen
class AdamW(Optimizer):
    """AdamW: Adam with weight decay that bypasses the running averages.

    Attributes:
        schedule: the learning rate, as a number or as a function of the number of updates applied so far.
        betas: the decay rates of the running averages of the gradient and of its square.
        eps: is added to the denominator.
        weight_decay: each update subtracts this times the learning rate from a weight of 1.
        weight_decay_mask: which parameters decay: a function of canonical name and tensor, such as ``no_decay``
            makes, or a mapping by name; by default all of them.
        moments: the dtype of the running averages, by default the parameters' own. ``torch.bfloat16`` takes half the
            memory of fp32: each update is computed in the parameters' dtype, and then the averages are rounded at
            random (``rounded``).

    Example:
        >>> params = Params({"w": torch.tensor([1.0])})
        >>> tx = adamw(0.1, weight_decay=0.0)
        >>> tx.betas, tx == adamw(0.1, weight_decay=0.0)
        ((0.9, 0.999), True)
        >>> update = Update.of(torch.tensor(3.0), position=0)
        >>> new, opt_state, _ = tx.update(Grads({"w": torch.tensor([3.0])}), tx.init(params), params, update)
        >>> round(new["w"].item(), 4), opt_state.count
        (0.9, 1)

    Source: Loshchilov & Hutter 2019 (arXiv 1711.05101).
    """

    schedule: Schedule = attrs.field(converter=as_schedule)
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), converter=_as_betas)
    eps: float = attrs.field(default=1e-8, validator=attrs.validators.ge(0))
    weight_decay: float = attrs.field(default=0.01, validator=attrs.validators.ge(0))
    weight_decay_mask: Mask | None = attrs.field(default=None, converter=as_mask)
    moments: torch.dtype | None = attrs.field(default=None, validator=attrs.validators.in_(MOMENTS))

    by_leaf = True

    def init(self, params: Params) -> AdamState:
        names = params.trained()
        zeros = [{name: torch.zeros_like(params[name], dtype=self.moments) for name in names} for _ in range(2)]
        return AdamState(0, *map(Slots, zeros))

    def check(self, params: Params, state: Any, position: int) -> None:
        if not isinstance(state, AdamState):
            raise ValueError(f"adamw did not make this state's optimizer tree, a {type(state).__name__}")
        names = params.trained()
        check_slots(state.exp_avg, names, params, self.moments)
        check_slots(state.exp_avg_sq, names, params, self.moments)
        if isinstance(self.weight_decay_mask, ByName):
            self._groups(names, params)
        _rate(self.schedule, position)

    def update(
        self, grads: Grads, state: AdamState, params: Params, update: Update
    ) -> tuple[Params, AdamState, Metrics]:
        lr = _rate(self.schedule, update.position)
        names = list(grads)
        if names:
            # ``full`` fills the scalar on the device. A copy from the host would first wait for the norm.
            step = torch.full((), float(state.count + 1), dtype=torch.float32, device=grads[names[0]].device)
            settings: dict[str, Any] = {
                "lr": lr, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, "amsgrad": False,
                "maximize": False, "grad_scale": update.divisor, "found_inf": update.skip,
            }  # fmt: skip
            for decay, group in self._groups(names, params).items():
                weights = tensors_of(params, group)
                gradients = laid_out_as(tensors_of(grads, group), weights)
                averages = tensors_of(state.exp_avg, group), tensors_of(state.exp_avg_sq, group)
                settings["weight_decay"] = decay
                if self.moments is None:
                    torch._fused_adamw_(weights, gradients, *averages, [], [step] * len(group), **settings)
                else:
                    _in_pieces(state.count, step, settings, weights, gradients, *averages)
        return params, attrs.evolve(state, count=state.count + 1), {"lr": Weighted(lr, 1.0)}

    def _groups(self, names: list[str], params: Params) -> dict[float, list[str]]:
        """Groups names by their weight decay, since a call of the kernel takes a single value of it."""
        if self.weight_decay_mask is None or self.weight_decay == 0.0:
            return {self.weight_decay: names}
        groups: dict[float, list[str]] = {}
        for name in names:
            decay = self.weight_decay if self.weight_decay_mask(name, params[name]) else 0.0
            groups.setdefault(decay, []).append(name)
        return groups


def _in_pieces(count: int, step: Tensor, settings: Mapping[str, Any], *tensors: list[Tensor]) -> None:
    """Updates leaves piece by piece: averages are widened, updated, and rounded into the state's own."""
    for leaf in zip(*tensors, strict=True):
        dense = all(map(Tensor.is_contiguous, leaf))
        pieces = [t.view(-1).split(PIECE) if dense else (t,) for t in leaf]
        for weight, gradient, *averages in zip(*pieces, strict=True):
            wide = [average.to(weight.dtype) for average in averages]
            torch._fused_adamw_([weight], [gradient], wide[:1], wide[1:], [], [step], **settings)
            for number, (average, new) in enumerate(zip(averages, wide, strict=True)):
                average.copy_(rounded(new.float(), 2 * count + number))


@node
class SGDState(Node):
    """The state of SGD.

    Attributes:
        momentum: the momentum of each parameter; empty if the optimizer has none.
    """

    momentum: Slots


@attrs.frozen
class SGD(Optimizer):
    """Stochastic gradient descent.

    Attributes:
        schedule: the learning rate, as a number or as a function of the number of updates applied so far.
        momentum: the decay rate of heavy-ball momentum; 0 turns it off.

    Example:
        >>> sgd(0.1, momentum=0.9)
        SGD(schedule=Constant(lr=0.1, warmup_steps=0), momentum=0.9)
    """

    schedule: Schedule = attrs.field(converter=as_schedule)
    momentum: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))

    by_leaf = True

    def init(self, params: Params) -> SGDState:
        names = params.trained() if self.momentum else []
        return SGDState(Slots({name: torch.zeros_like(params[name]) for name in names}))

    def check(self, params: Params, state: Any, position: int) -> None:
        if not isinstance(state, SGDState):
            raise ValueError(f"sgd did not make this state's optimizer tree, a {type(state).__name__}")
        if self.momentum:
            check_slots(state.momentum, params.trained(), params)
        elif len(state.momentum):
            raise ValueError("this state's optimizer tree has momentum, and this sgd has none; give it momentum")
        _rate(self.schedule, position)

    def update(
        self, grads: Grads, state: SGDState, params: Params, update: Update
    ) -> tuple[Params, SGDState, Metrics]:
        lr = _rate(self.schedule, update.position)
        if names := list(grads):
            weights = tensors_of(params, names)
            torch._fused_sgd_(
                weights,
                laid_out_as(tensors_of(grads, names), weights),
                tensors_of(state.momentum, names) if self.momentum else [],
                weight_decay=0.0,
                momentum=self.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                grad_scale=update.divisor,
                found_inf=update.skip,
            )
        return params, state, {"lr": Weighted(lr, 1.0)}


adamw = AdamW
sgd = SGD
