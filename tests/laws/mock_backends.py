"""The right training backend that the mutants derive from."""

from verl_fn.backends.mock import Mock
from verl_fn.steps import adamw, constant

VOCAB = 8


def optimizer():
    return adamw(constant(0.01), weight_decay=0.0)


def mock(cls=Mock, *, tx=None, max_tokens=24):
    return cls(VOCAB, optimizer() if tx is None else tx, max_tokens=max_tokens)


class WithoutLossFn(Mock):
    """Offers no loss as a function, so that only differences show what its gradients are."""

    @property
    def loss_fn(self):
        raise AttributeError("this backend has no loss_fn")
