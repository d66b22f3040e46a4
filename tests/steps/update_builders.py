"""States of a small model with a frozen leaf, and gradients for them."""

import numpy as np
import torch

from verl_fn.state import Grads, Key, Params, TrainState
from verl_fn.steps import Optimizer

SHAPES = {"a.weight": (2, 3), "base.weight": (4,), "b.bias": (3,)}
TRAINED = ["a.weight", "b.bias"]


def start(optimizer: Optimizer, seed: int = 0, dtype: torch.dtype = torch.float64, scheduler: int = 0) -> TrainState:
    """A new state without other references to its leaves; ``base.weight`` is frozen."""
    rng = np.random.default_rng(seed)
    params = Params(
        {name: torch.tensor(rng.normal(size=shape), dtype=dtype) for name, shape in SHAPES.items()},
        trainable=frozenset(TRAINED),
    )
    return TrainState(params, optimizer.init(params), scheduler, Key.from_seed(seed), step=0)


def gradients(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Grads:
    rng = np.random.default_rng(1000 + seed)
    return Grads({name: torch.tensor(scale * rng.normal(size=SHAPES[name]), dtype=dtype) for name in TRAINED})


def arrays(leaves) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy().copy() for name, tensor in leaves.items()}
