"""What a training backend promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from verl_fn.state import Batch, Grads, Key, Metrics, Params, TokenOutputs, TrainState
from verl_fn.steps import Loss


class TrainBackend(Protocol):
    """Pure functions over training state. The laws that they obey are in ``verl_fn.testing``."""

    def init(self, key: Key) -> TrainState:
        """A state with random parameters drawn from ``key``."""
        ...

    def load_pretrained(self, folder: str | Path, key: Key) -> TrainState:
        """A fresh state around the parameters of a Hugging Face folder."""
        ...

    def forward(self, params: Params, batch: Batch, needs: Iterable[str]) -> TokenOutputs:
        """What ``needs`` names, for every token with ``response_mask``, without gradients."""
        ...

    def forward_backward(self, state: TrainState, batch: Batch, loss: Loss) -> tuple[Grads, Metrics]:
        """The gradient of ``(batch["loss_weight"] * per_token).sum()`` and the loss's metrics, with ``loss``."""
        ...

    def apply_update(self, state: TrainState, grads: Grads, *, donate: bool = True) -> tuple[TrainState, Metrics]:
        """The next state; ``state`` and ``grads`` are donated unless ``donate`` is off."""
        ...

    def place(self, state: TrainState, *, params: str | None = None, optimizer: str | None = None) -> TrainState:
        """The same state with parameters or optimizer tree on another device."""
        ...

    def save(self, state: TrainState, folder: str | Path) -> None:
        """Write the state; the folder is then also a Hugging Face model folder."""
        ...

    def restore(self, folder: str | Path) -> TrainState:
        """The state that ``save`` wrote, bitwise."""
        ...

    def named_tensors(self, params: Params) -> Iterable[tuple[str, Tensor]]:
        """Whole tensors under canonical names, for ``RolloutBackend.publish``."""
        ...

    def map(self, fn: Callable[..., Any], *values: Any, keep: bool = False) -> Any:
        """``fn(*values)`` where the values lie, on every shard: to compare, edit, add or digest them.

        Where values stay with their workers, so does the result of ``fn`` with ``keep``; else it is returned.
        """
        ...
