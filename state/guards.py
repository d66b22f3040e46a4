"""Guards of calls: a caller's settings of torch, derivatives that a step has not, arguments, and writes in place."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from verl_fn.errors import ArgumentError, UserError

from . import tree
from .batch import CORE, Batch
from .train import Grads, TrainState

T = TypeVar("T")

AUTOCAST_DEVICES = ("cpu", "cuda")
# Dtypes of batches that NumPy has, too.
_IN_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})
_NAMES: dict[type, str] = {Grads: "the Grads that forward_backward returned"}
_INSTEAD = {
    ("Params", "TrainState"): "pass state.params",
    ("TrainState", "Params"): "pass the whole state; its parameters are taken",
    ("Grads", "tuple"): "it also returned metrics; pass the first of the two",
    ("Optimizer", "NoneType"): "frozen() is one that trains nothing",
    ("Lora", "int"): "write lora=Lora(rank)",
    ("Lora", "dict"): "write lora=Lora(rank=8, alpha=16.0)",
    ("Lora", "LoraConfig"): "write lora=Lora(config.r, config.lora_alpha)",
}


class SharedSetting(Generic[T]):
    """A setting of the whole process that calls in several threads change together.

    The first call to begin saves the caller's value, and the last one to end restores it.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None]) -> None:
        self._read, self._write = read, write
        self._lock = threading.Lock()
        self._before: list[T] = []
        self._users = 0

    @contextlib.contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Sets the value inside."""
        with self._lock:
            if not self._users:
                self._before = [self._read()]
            self._users += 1
            self._write(value)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._write(self._before.pop())


_default_dtype = SharedSetting(torch.get_default_dtype, torch.set_default_dtype)


@contextlib.contextmanager
def isolated(*, gradients: bool | None = False) -> Iterator[None]:
    """Runs a step in the same settings of torch, whatever the caller's are.

    Inside, tensors are ordinary ones, not inference tensors; autocast is off; the default dtype is float32 and
    the default device the CPU.

    Args:
        gradients: whether autograd records; None leaves this and inference mode as they are, for ``torch.func``.

    Example:
        >>> with torch.autocast("cpu"), torch.inference_mode():
        ...     with isolated():
        ...         product = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> product.dtype, product.is_inference()
        (torch.float32, False)
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_default_dtype.set_to(torch.float32))
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        # A default device slows every call of torch down, so it is set only if the caller has set another.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if gradients is not None:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(gradients))
        yield


@contextlib.contextmanager
def with_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Gives a module or a class other values of these attributes inside.

    Example:
        >>> import math
        >>> with with_attributes(math, pi=3):
        ...     math.pi
        3
    """
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits the CPU to one thread, since many threads take longer than one for small operations."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NotDifferentiable(UserError, RuntimeError):
    """A derivative was taken of a function that has none."""


def transforming() -> bool:
    """Returns whether a transformation of ``torch.func`` or forward-mode differentiation is going on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_derivatives(function: str, *values: Any) -> None:
    """Raises an error if a derivative with respect to ``values`` is being taken; without it, that would be 0.

    Args:
        function: the name of the function that has no derivative.

    Raises:
        NotDifferentiable: ``torch.func`` or forward-mode differentiation tracks one of their tensors.

    Example:
        >>> def norm(w):
        ...     refuse_derivatives("norm", {"w": w})
        ...     return w.norm()
        >>> torch.func.grad(norm)(torch.ones(2))
        Traceback (most recent call last):
        verl_fn.state.guards.NotDifferentiable: norm has no derivative, and torch would return 0; ...
    """
    if not transforming():
        return
    if any(_is_tracked(leaf) for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)):
        raise NotDifferentiable(
            f"{function} has no derivative, and torch would return 0; differentiate the function of parameters that "
            "backend.loss_fn(batch, loss) returns"
        )


def _is_tracked(t: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        if functorch.is_gradtrackingtensor(t):
            return True
        t = functorch.get_unwrapped(t)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


@contextlib.contextmanager
def read_only(function: str, error: type[Exception], batch: Batch, **more: Tensor) -> Iterator[None]:
    """Raises an error if the block writes in place into a field of a batch, or into one of ``more``.

    Versions show writes to tensors and to views of them. On the CPU contents are compared as well, since writes to
    ``t.data`` and ``t.numpy()`` count no version; ragged fields, such as images, are too large for that.

    Args:
        function: the function that the block calls, for the error.
        error: the class of the error.
        batch: what the function gets.
        **more: further tensors that it gets, by name.

    Example:
        >>> batch = Batch.from_rows([[1], [2]], per_row={"score": [1.0, 0.0]})
        >>> with read_only("mine", ValueError, batch):
        ...     batch["score"].sub_(0.5)
        Traceback (most recent call last):
        ValueError: mine writes into score in place, which others read after it, such as the metrics; make a new ...
    """
    fields = {**{name: getattr(batch, name) for name in CORE}, **batch.per_token, **batch.per_row, **more}
    ragged = {name: field.values for name, field in batch.ragged.items()}
    read = not transforming()
    before = {name: (t, _stamp(t, read and name in fields)) for name, t in {**fields, **ragged}.items()}
    yield
    if written := [name for name, (t, stamp) in before.items() if _stamp(t, read and name in fields) != stamp]:
        raise error(
            f"{function} writes into {' and '.join(written)} in place, which others read after it, such as the "
            "metrics; make a new tensor (x = x - mean, not x -= mean), and give it to batch.with_tokens or with_rows"
        )


def _stamp(t: Tensor, read: bool) -> tuple[int, int]:
    """Returns the version of a tensor, and if it is to be read and on the host a checksum of its contents."""
    # Tensors of an inference mode count no versions.
    version = 0 if t.is_inference() else t._version
    if not read or not t.is_cpu:
        return version, 0
    t = t.detach()
    # A step stamps every field of a batch several times, and each call of torch takes longer than the checksum.
    if t.dtype not in _IN_NUMPY or not t.is_contiguous():
        t = t.contiguous().reshape(-1).view(torch.uint8)
    return version, zlib.crc32(t.numpy().data)


def expect(function: str, kind: type, value: object) -> None:
    """Raises ArgumentError for an argument of another kind.

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


def expect_tokens(batch: Batch, vocab: int) -> None:
    """Raises ValueError for tokens that a model does not know; a GPU would report it much later.

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
