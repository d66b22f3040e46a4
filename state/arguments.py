"""Checks the kinds of the values that a step is called with, since another kind would fail obscurely."""

from __future__ import annotations

from verl_fn.errors import ArgumentError

from .batch import Batch
from .train import Grads, Params, TrainState

_NAMES: dict[type, str] = {Grads: "the Grads that forward_backward returned"}
_INSTEAD = {
    ("Params", "TrainState"): "pass state.params",
    ("TrainState", "Params"): "pass the whole state; its parameters are taken",
    ("Grads", "tuple"): "it also returned metrics; pass the first of the two",
    ("Optimizer", "NoneType"): "frozen() is one that trains nothing",
}


def expect(function: str, kind: type, value: object) -> None:
    """Raises an error for an argument of another kind.

    Args:
        function: the name of the function that was called.
        kind: the class that it takes.
        value: what it was given.

    Raises:
        ArgumentError: ``value`` is not a ``kind``.

    Example:
        >>> expect("forward", Batch, [[1, 2]])
        Traceback (most recent call last):
        verl_fn.errors.ArgumentError: forward takes a Batch, not a list
    """
    if not isinstance(value, kind):
        hint = _INSTEAD.get((kind.__name__, type(value).__name__))
        wanted = _NAMES.get(kind, f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}")
        raise ArgumentError(
            f"{function} takes {wanted}, not a {type(value).__name__}" + (f": {hint}" if hint else "")
        )


def expect_params(function: str, params: object, batch: object) -> None:
    """Checks the arguments of ``forward``."""
    expect(function, Params, params)
    expect(function, Batch, batch)


def expect_state(function: str, state: object, batch: object) -> None:
    """Checks the arguments of ``forward_backward``."""
    expect(function, TrainState, state)
    expect(function, Batch, batch)


def expect_tokens(batch: Batch, vocab: int) -> None:
    """Checks that a model knows the tokens of a batch; a GPU would report it much later.

    Raises:
        ValueError: it does not.

    Example:
        >>> expect_tokens(Batch.from_rows([[1], [2, 9]]), vocab=8)
        Traceback (most recent call last):
        ValueError: row 1 of the batch has the token id 9, and the model's are 0 to 7
    """
    # One on a GPU would have to be waited for.
    if not batch.tokens.is_cpu:
        return
    unknown = (batch.tokens < 0) | (batch.tokens >= vocab)
    if bool(unknown.any()):
        row, token = int(batch.row_ids[unknown][0]), int(batch.tokens[unknown][0])
        raise ValueError(f"row {row} of the batch has the token id {token}, and the model's are 0 to {vocab - 1}")


def expect_update(state: object, grads: object) -> None:
    """Checks the arguments of ``apply_update``."""
    expect("apply_update", TrainState, state)
    expect("apply_update", Grads, grads)
