"""How the checks compare, and what they say when a law is broken."""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl_fn.state import DonatedError, snapshot, tree

T = TypeVar("T")


class LawViolation(AssertionError):
    """A law was broken.

    Attributes:
        law: its name.

    Example:
        >>> raise LawViolation("Zero", "the gradient is 3.0", "an offset")
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Zero: the gradient is 3.0. Usual cause: an offset.
    """

    def __init__(self, law: str, found: str, cause: str) -> None:
        super().__init__(f"{law}: {found}. Usual cause: {cause}.")
        self.law = law


def require(holds: bool, law: str, found: str, cause: str) -> None:
    """Raise where ``holds`` is false.

    Raises:
        LawViolation: it is.
    """
    if not holds:
        raise LawViolation(law, found, cause)


def require_equal(law: str, what: str, expected: Any, found: Any, cause: str) -> None:
    """Two values, bitwise.

    Example:
        >>> require_equal("Purity", "the sum", {"a": 1.0}, {"a": 1.5}, "chance")
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Purity: the sum differs at ['a'] (1.0 and 1.5). Usual cause: chance.
    """
    expected, found = whole(expected), whole(found)
    path = tree.first_difference(expected, found)
    if path is not None:
        by = _distance(tree.paths(expected).get(path), tree.paths(found).get(path))
        raise LawViolation(law, f"{what} differs{_at(path)} {by}", cause)


def require_close(
    law: str, what: str, expected: Any, found: Any, cause: str, *, tolerance: float, floor: float | None = None
) -> None:
    """Two values of one structure, leaf by leaf, relative to the leaf's largest element.

    Args:
        tolerance: how much may differ.
        floor: the least that differences are relative to; by default a thousandth of the largest leaf.

    Example:
        >>> require_close("Purity", "the sum", {"a": 2.0}, {"a": 2.5}, "chance", tolerance=0.1)
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Purity: the sum differs at ['a'] by 0.5 where values reach 2.5, ...
    """
    mine, theirs = tree.paths(whole(expected)), tree.paths(whole(found))
    if mine.keys() != theirs.keys():
        raise LawViolation(law, f"{what} differs in its names: {sorted(mine.keys() ^ theirs.keys())[:5]}", cause)
    tops = {path: max(_top(mine[path]), _top(theirs[path])) for path in mine}
    if floor is None:
        floor = 1e-3 * max(tops.values(), default=0.0)
    for path, top in tops.items():
        a, b = torch.as_tensor(mine[path]), torch.as_tensor(theirs[path])
        if a.shape != b.shape:
            raise LawViolation(law, f"{what} differs{_at(path)}: shapes {tuple(a.shape)} and {tuple(b.shape)}", cause)
        by, scale = _largest_gap(a, b), max(top, floor)
        if not by <= tolerance * scale:
            where = f"{what} differs{_at(path)} by {by:.3g} where values reach {scale:.3g}"
            raise LawViolation(law, f"{where}, beyond the relative tolerance of {tolerance:.3g}", cause)


def itself(value: Any) -> Any:
    """How values are read that lie in this process."""
    return value


@contextlib.contextmanager
def untouched(law: str, what: str, read: Callable[[Any], Any] = itself, **values: Any) -> Iterator[None]:
    """Nothing inside changes these values or the process's random generators; ``what`` names who ran.

    ``read`` gives what a value holds, for values that are handles.
    """
    before = {name: snapshot(read(value)) for name, value in values.items()}
    dice = _dice()
    yield
    for name, value in values.items():
        try:
            require_equal(
                law, f"after {what}, its argument {name}", before[name], read(value), "an operation in place"
            )
        except DonatedError:
            cause = "an option that is passed over"
            raise LawViolation("Donation", f"{what} donated its argument {name}", cause) from None
    if _dice() != dice:
        raise LawViolation(
            law, f"{what} drew from a global random generator", "dropout or torch.rand without a generator from a Key"
        )


def repeatable(law: str, what: str, fn: Callable[[], T], read: Callable[[Any], Any] = itself, **values: Any) -> T:
    """The result of ``fn``, which gives it twice, bitwise, under different global seeds and leaves ``values`` alone."""
    results = []
    for seed in (1, 2):
        with seeded(seed), untouched(law, what, read, **values):
            results.append(fn())
    cause = "state kept between calls, a global random generator, or kernels that are not deterministic"
    once, twice = map(read, results)
    require_equal(law, f"{what}, called twice with the same arguments,", once, twice, cause)
    return results[0]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Global random generators start from ``seed`` inside, and go on as before outside."""
    theirs, numpys = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(theirs)
            np.random.set_state(numpys)


def _dice() -> tuple[object, ...]:
    """The state of every global random generator on the CPU."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state(legacy=False))


def same(a: Any, b: Any) -> bool:
    """Whether two values are bitwise equal, on all ranks together."""
    return tree.equal(whole(a), whole(b))


def whole(value: Any) -> Any:
    """Shards put together, so that all ranks compare the same tensors and none is left waiting for another."""
    return tree.map_tensors(lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t, value)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A temporary folder; one for all ranks where there are several."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        if dist.is_available() and dist.is_initialized():
            told = [folder]
            dist.broadcast_object_list(told, src=0)
            yield told[0]
            dist.barrier()
        else:
            yield folder


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _distance(a: Any, b: Any) -> str:
    if a is None or b is None:
        return "(only one has it)"
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
        return f"({a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)})"
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return f"by {_largest_gap(a, b):.3g}"
    return f"({a!r} and {b!r})"


def _largest_gap(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(gap.max()) if gap.numel() else 0.0


def _top(x: Any) -> float:
    """The largest finite magnitude."""
    t = torch.as_tensor(x).detach().cpu().double().abs()
    top = float(torch.where(t.isfinite(), t, 0.0).max()) if t.numel() else 0.0
    return top if math.isfinite(top) else 0.0
