"""AdamW through torch's fused kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from verl_fn.state import Grads, Metrics, Node, Params, Slots, Weighted, node

from .masks import ByName, Mask, as_mask
from .schedules import Schedule, as_schedule
from .transforms import Optimizer, Update, check_slots, laid_out_as, tensors_of


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


def _as_betas(betas: Iterable[float]) -> tuple[float, float]:
    beta1, beta2 = betas
    return beta1, beta2


@attrs.frozen
class AdamW(Optimizer):
    """AdamW; ``adamw`` makes it and describes the settings."""

    schedule: Schedule = attrs.field(converter=as_schedule)
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), converter=_as_betas)
    eps: float = 1e-8
    weight_decay: float = 0.01
    weight_decay_mask: Mask | None = attrs.field(default=None, converter=as_mask)

    @property
    def by_leaf(self) -> bool:
        return True

    def init(self, params: Params) -> AdamState:
        averages = [Slots({name: torch.zeros_like(params[name]) for name in params.trained()}) for _ in range(2)]
        return AdamState(0, *averages)

    def check(self, params: Params, state: Any, position: int) -> None:
        if not isinstance(state, AdamState):
            raise ValueError(f"adamw did not make this state's optimizer tree, a {type(state).__name__}")
        names = params.trained()
        check_slots(state.exp_avg, names, params)
        check_slots(state.exp_avg_sq, names, params)
        if isinstance(self.weight_decay_mask, ByName):
            self.weight_decay_mask.check(names)
        self.schedule(position)

    def update(
        self, grads: Grads, state: AdamState, params: Params, update: Update
    ) -> tuple[Params, AdamState, Metrics]:
        lr = self.schedule(update.position)
        names = list(grads)
        if names:
            # ``full`` fills the scalar on the device. A copy from the host would first wait for the norm.
            step = torch.full((), float(state.count + 1), dtype=torch.float32, device=grads[names[0]].device)
            for decay, group in self._groups(names, params).items():
                weights = tensors_of(params, group)
                torch._fused_adamw_(
                    weights,
                    laid_out_as(tensors_of(grads, group), weights),
                    tensors_of(state.exp_avg, group),
                    tensors_of(state.exp_avg_sq, group),
                    [],
                    [step] * len(group),
                    lr=lr,
                    beta1=self.betas[0],
                    beta2=self.betas[1],
                    weight_decay=decay,
                    eps=self.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=update.divisor,
                    found_inf=update.skip,
                )
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


def adamw(
    schedule: Schedule | float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    weight_decay_mask: Mask | Mapping[str, bool] | None = None,
) -> AdamW:
    """Makes AdamW: Adam with weight decay that bypasses the running averages.

    Args:
        schedule: the learning rate, as a number or as a function of the number of updates applied so far.
        betas: the decay rates of the running averages of the gradient and of its square.
        eps: is added to the denominator.
        weight_decay: each update subtracts this times the learning rate from a weight of 1.
        weight_decay_mask: which parameters decay: a function of canonical name and tensor, such as ``no_decay``
            makes, or a mapping by name; by default all of them.

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
    return AdamW(schedule, betas, eps, weight_decay, weight_decay_mask)
