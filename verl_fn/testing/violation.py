"""Comparisons for the checks, and the error that they raise when a law is broken."""

from __future__ import annotations

import contextlib
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_fn.algorithms.workers import get_here
from verl_fn.backends.protocol import Handle, TrainBackend
from verl_fn.state import DonatedError, TrainState, snapshot, tree

T = TypeVar("T")
LOW = (torch.bfloat16, torch.float16)


class LawViolation(AssertionError):
    """Raised when a law is broken.

    Example:
        >>> raise LawViolation("Zero", "the gradient is 3.0", "an offset")
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Zero: the gradient is 3.0. Usual cause: an offset.
    """

    def __init__(self, law: str, observation: str, cause: str) -> None:
        """Makes the message.

        Args:
            observation: what was compared and how it differs.
            cause: what usually causes the difference.
        """
        super().__init__(f"{law}: {observation}. Usual cause: {cause}.")
        self.law = law


def require(holds: bool, law: str, observation: str, cause: str) -> None:
    """Raises LawViolation unless ``holds``."""
    if not holds:
        raise LawViolation(law, observation, cause)


def require_equal(law: str, what: str, expected: Any, actual: Any, cause: str) -> None:
    """Raises LawViolation unless two values are bitwise equal. ``BackendCase.read`` reads sharded values first.

    Args:
        expected: the value to compare with.
        cause: what usually causes a difference.

    Example:
        >>> require_equal("Purity", "the sum", {"a": 1.0}, {"a": 1.5}, "chance")
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Purity: the sum differs at ['a'] (1.0 and 1.5). Usual cause: chance.
    """
    path = tree.first_difference(expected, actual)
    if path is not None:
        difference = _difference(tree.paths(expected).get(path), tree.paths(actual).get(path))
        raise LawViolation(law, f"{what} differs{_at(path)} {difference}", cause)


def require_close(
    law: str, what: str, expected: Any, actual: Any, cause: str, *, tolerance: float, floor: float | None = None
) -> None:
    """Requires that two values agree leaf by leaf, relative to the largest element of each leaf.

    Args:
        expected: the value to compare with.
        cause: what usually causes a difference.
        tolerance: the largest relative difference.
        floor: leaves whose elements are all smaller are compared relative to this; by default a thousandth of the
            largest element of all leaves.

    Raises:
        LawViolation: the values differ by more than the tolerance.

    Example:
        >>> require_close("Purity", "the sum", {"a": 2.0}, {"a": 2.5}, "chance", tolerance=0.1)
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Purity: the sum differs at ['a'] by 0.5 (values reach 2.5), ...
    """
    wanted, given = tree.paths(expected), tree.paths(actual)
    if wanted.keys() != given.keys():
        raise LawViolation(law, f"{what} differs in its names: {sorted(wanted.keys() ^ given.keys())[:5]}", cause)
    tops = {path: max(_top(wanted[path]), _top(given[path])) for path in wanted}
    if floor is None:
        floor = 1e-3 * max(tops.values(), default=0.0)
    for path, top in tops.items():
        a, b = torch.as_tensor(wanted[path]), torch.as_tensor(given[path])
        if a.shape != b.shape:
            raise LawViolation(law, f"{what} differs{_at(path)}: shapes {tuple(a.shape)} and {tuple(b.shape)}", cause)
        gap, scale = _largest_gap(a, b), max(top, floor)
        if not gap <= tolerance * scale:  # Also if the gap is nan.
            observation = f"{what} differs{_at(path)} by {gap:.3g} (values reach {scale:.3g})"
            raise LawViolation(law, f"{observation}, beyond the relative tolerance of {tolerance:.3g}", cause)


@contextlib.contextmanager
def untouched(law: str, what: str, read: Callable[[Any], Any] = get_here, **values: Any) -> Iterator[None]:
    """Requires that the block changes neither these values nor the global random generators.

    Args:
        **values: the values by name, or handles to them.

    Raises:
        LawViolation: a value or a generator changed, or a value was donated.
    """
    before = {name: snapshot(read(value)) for name, value in values.items()}
    generators = _generator_states()
    yield
    for name, value in values.items():
        try:
            require_equal(
                law, f"after {what}, its argument {name}", before[name], read(value), "an operation in place"
            )
        except DonatedError:
            cause = "an option that is ignored"
            raise LawViolation("Donation", f"{what} donated its argument {name}", cause) from None
    if _generator_states() != generators:
        raise LawViolation(
            law, f"{what} drew from a global random generator", "dropout or torch.rand without a generator from a Key"
        )


def repeatable(law: str, what: str, fn: Callable[[], T], read: Callable[[Any], Any] = get_here, **values: Any) -> T:
    """Requires that two calls return bitwise equal results, under different global seeds, and returns the first one.

    Raises:
        LawViolation: the results differ, or an argument changed.
    """
    results = []
    for seed in (1, 2):
        with seeded(seed), untouched(law, what, read, **values):
            results.append(fn())
    cause = "state kept between calls, a global random generator, or kernels that are not deterministic"
    first, second = map(read, results)
    require_equal(law, f"{what}, called twice with the same arguments,", first, second, cause)
    return results[0]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators inside the block and restores them after it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=list(devices)):
        # torch.manual_seed would note the whole stack for a CUDA that is not initialized, a hundred times slower.
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _generator_states() -> tuple[object, ...]:
    """Returns the state of every global random generator on the CPU."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Makes a temporary folder; all ranks of a distributed run get the same one."""
    with tempfile.TemporaryDirectory() as folder:
        if dist.is_available() and dist.is_initialized():
            folders = [folder]
            dist.broadcast_object_list(folders, src=0)
            yield folders[0]
            dist.barrier()
        else:
            yield folder


def save_once(backend: TrainBackend, state: Handle[TrainState], folder: str | Path) -> None:
    """Saves a state in a folder that all ranks share.

    If each rank has a backend of one process, only the first rank's saves.

    Args:
        folder: of ``shared_folder``, or a part of it.
    """
    ranks = dist.is_available() and dist.is_initialized()
    together = not ranks or getattr(backend, "several_ranks", False)
    if together or dist.get_rank() == 0:
        backend.save(state, folder)
    if not together:
        dist.barrier()


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _difference(a: Any, b: Any) -> str:
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
    """Returns the largest finite magnitude."""
    t = torch.as_tensor(x).detach().cpu().double().abs()
    return float(torch.where(t.isfinite(), t, 0.0).max()) if t.numel() else 0.0


class _LowPrecision(TorchDispatchMode):
    """Collects the names of operations with a result in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree.leaves(result):
            if isinstance(t, Tensor) and t.dtype in LOW:
                self.operations[str(func)] = t.dtype
        return result


def require_full_precision(what: str, fn: Callable[[], object]) -> None:
    """Raises LawViolation if an operation in a call has a result in bfloat16 or float16.

    Example:
        >>> require_full_precision("the sum", lambda: torch.ones(2).bfloat16().sum())
        Traceback (most recent call last):
        verl_fn.testing.violation.LawViolation: Precision: the sum computes in torch.bfloat16 (aten._to_copy... ...
    """
    with _LowPrecision() as low:
        fn()
    for operation, dtype in low.operations.items():
        cause = "a cast to the compute dtype of the model; losses and estimators compute in float32 or float64"
        raise LawViolation("Precision", f"{what} computes in {dtype} ({operation})", cause)
