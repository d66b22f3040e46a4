"""Stochastic gradient descent through torch's fused kernel."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from verl_fn.state import Grads, Metrics, Node, Params, Slots, Weighted, node

from .schedules import Schedule, as_schedule
from .transforms import Optimizer, Update, check_slots, laid_out_as, tensors_of


@node
class SGDState(Node):
    """The state of SGD.

    Attributes:
        momentum: the momentum of each parameter; empty if the optimizer has none.
    """

    momentum: Slots


@attrs.frozen
class SGD(Optimizer):
    """Stochastic gradient descent; ``sgd`` makes it and describes the settings."""

    schedule: Schedule = attrs.field(converter=as_schedule)
    momentum: float = 0.0

    @property
    def by_leaf(self) -> bool:
        return True

    def init(self, params: Params) -> SGDState:
        names = params.trained() if self.momentum else []
        return SGDState(Slots({name: torch.zeros_like(params[name]) for name in names}))

    def check(self, params: Params, state: Any, position: int) -> None:
        if not isinstance(state, SGDState):
            raise ValueError(f"sgd did not make this state's optimizer tree, a {type(state).__name__}")
        if self.momentum:
            check_slots(state.momentum, params.trained(), params)
        self.schedule(position)

    def update(
        self, grads: Grads, state: SGDState, params: Params, update: Update
    ) -> tuple[Params, SGDState, Metrics]:
        lr = self.schedule(update.position)
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


def sgd(schedule: Schedule | float, momentum: float = 0.0) -> SGD:
    """Makes stochastic gradient descent.

    Args:
        schedule: the learning rate, as a number or as a function of the number of updates applied so far.
        momentum: the decay rate of heavy-ball momentum; 0 turns it off.

    Example:
        >>> sgd(0.1, momentum=0.9)
        SGD(schedule=Constant(lr=0.1, warmup_steps=0), momentum=0.9)
    """
    return SGD(schedule, momentum)
