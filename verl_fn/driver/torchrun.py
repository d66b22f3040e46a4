"""Training under torchrun: the first process runs the command, and the others repeat the calls of its backends.

So the first process is an ordinary run in one process. ``Leader.call`` sends each call of a backend to the others,
and each of them has its own shards of every state. Values that a call returned travel as numbers, batches and losses
travel whole. A process drops a value when the first process has dropped it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from verl_fn.backends.weight_sync.source import Weights
from verl_fn.config import ConfigError
from verl_fn.config.plan import Plan
from verl_fn.state import DonatedError, Grads, Params, Slots, TrainState

from .errors import ActorDied, ActorHangs
from .ranks import backends, device, torchrun_rank, torchrun_size

# The first process may read data or wait for a download for hours before it makes a call.
_PATIENCE = timedelta(days=30)
ENGINE = "rollout"  # the name of the engine among the backends that ``Leader.make`` makes
_AT_ONCE = signal.default_int_handler
_leader: Leader | None = None


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[Leader | None]:
    """Opens the process group that training in this process needs, and closes it at the end.

    Under torchrun all its processes form the group, and only the first one enters the body; the others follow it and
    exit. Otherwise ``fsdp`` and ``megatron`` need a group with this process only, and ``local`` needs none.

    Yields:
        What makes calls on all of torchrun's processes; None without torchrun.

    Raises:
        ConfigError: torchrun started several processes for a plan that cannot use them.
        SystemExit: on all of torchrun's processes but the first, when the first one has left the body.
    """
    global _leader
    size = torchrun_size()
    if size > 1:
        _check_plan(plan, size)
    if _leader is not None or (
        size == 1 and (plan.driver.kind == "ray" or all(role.strategy == "local" for role in plan.roles.values()))
    ):
        yield _leader
        return
    with _initialized(plan, size):
        if size == 1:
            yield None
            return
        import torch.distributed as dist

        calls = dist.new_group(backend="gloo", timeout=_PATIENCE)
        if torchrun_rank() > 0:
            raise SystemExit(_follow(calls))
        _leader = Leader(calls)
        try:
            yield _leader
        finally:
            _leader.end()
            _leader = None


@contextlib.contextmanager
def _initialized(plan: Plan, size: int) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    from verl_fn.backends.rendezvous import use_loopback

    if dist.is_initialized():
        yield
        return
    kind = device(plan.driver)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=plan.ray.timeout)
    if size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        use_loopback("127.0.0.1")
    if size > 1:
        dist.init_process_group(backends(kind), timeout=timeout)
    else:
        dist.init_process_group(backends(kind), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_plan(plan: Plan, size: int) -> None:
    if plan.driver.kind == "ray":
        raise ConfigError(
            "driver.kind=ray starts its training processes itself: run it without torchrun and set ray.ranks, or set "
            "driver.kind=local for an algorithm that samples nothing, such as sft, under torchrun"
        )
    if plan.learns_from == "samples":
        raise ConfigError(
            f"torchrun trains algorithms that sample nothing, such as sft; for {plan.algorithm} set driver.kind=ray "
            f"and ray.ranks={size}, and run it without torchrun"
        )


class Leader:
    """Makes calls on all of torchrun's processes, from the first one.

    Args:
        calls: the process group through which calls are sent.
    """

    def __init__(self, calls: Any) -> None:
        self._calls, self._count = calls, 0
        self._backends: dict[str, Any] = {}
        # What other processes know by a number, and the numbers of values that nobody has any more.
        self._known: dict[int, tuple[Any, weakref.ref[Any]]] = {}
        self._dropped: list[Any] = []
        self._in_step = True  # whether the others wait for the next call

    def make(self, fn: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """Calls a function that returns backends by name in every process, and returns them for the first process.

        All methods of a training backend run in every process. Of an engine only ``publish`` does, since the ranks
        read weights together.
        """
        with self._repeated(None, fn, args, {}):
            self._backends = fn(*args)
        return {name: _Led(self, name, inner) for name, inner in self._backends.items()}

    def call(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a backend in every process, and returns the result of the first.

        Raises:
            Exception: the error of this process, or else the error of the first one that failed.
            ActorHangs: a process did not answer within ``ray.timeout``.
            ActorDied: a process has ended.
        """
        with self._repeated(name, method, args, kwargs):
            own = (arg._inner if isinstance(arg, _Led) else arg for arg in args)
            result = getattr(self._backends[name], method)(*own, **kwargs)
        for part, value in enumerate(result if isinstance(result, tuple) else (result,)):
            number = self._count, part
            if _sharded(value) or kwargs.get("keep"):
                self._known[id(value)] = number, weakref.ref(value)
                weakref.finalize(value, self._drop, id(value), number).atexit = False
            else:
                self._dropped.append(number)
        return result

    def end(self) -> None:
        """Lets the other processes end."""
        if self._in_step:
            with contextlib.suppress(RuntimeError):  # they have ended
                _broadcast(None, self._calls)

    @contextlib.contextmanager
    def _repeated(self, *call: Any) -> Iterator[None]:
        """Sends a call to the other processes, for the body in which this one makes it."""
        self._count += 1
        dropped, self._dropped = self._dropped, []
        message = _pickled((self._count, dropped, *call), self._number)
        self._in_step = False
        try:
            _broadcast(message, self._calls)
        except RuntimeError as error:
            raise _ended(error) from error
        try:
            with _together():
                yield
        except (ActorDied, ActorHangs):
            raise
        except Exception:
            self._in_step = True
            raise
        self._in_step = True

    def _drop(self, identity: int, number: Any) -> None:
        # A later call may have returned the same value under another number.
        if identity in self._known and self._known[identity][0] == number:
            del self._known[identity]
        self._dropped.append(number)

    def _number(self, value: Any) -> Any:
        """Returns the call, the result and the field that stand for a value; None for one that travels whole.

        Raises:
            TypeError: it is a state, or a part of one, that no call returned.
        """
        if isinstance(value, _Led):
            return value._name
        if (known := self._known.get(id(value))) is not None and known[1]() is value:
            return *known[0], ""
        if not _sharded(value):
            return None
        for number, ref in self._known.values():
            for field in ("params", "base", "params.base"):
                with contextlib.suppress(AttributeError, ValueError, DonatedError):
                    part = operator.attrgetter(field)(ref())
                    if part.keys() == value.keys() and all(part[name] is t for name, t in value.items()):
                        return *number, field
        raise TypeError(
            f"this {type(value).__name__} was made outside of a backend, so torchrun's other processes do not have "
            "their part of it; make it by backend.map(..., keep=True)"
        )


class _Led:
    """A backend of the first process whose calls all processes make; it stands for the backend in arguments too."""

    def __init__(self, leader: Leader, name: str, inner: Any) -> None:
        self._leader, self._name, self._inner = leader, name, inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or (self._name == ENGINE and name != "publish"):
            return value
        return functools.partial(self._leader.call, self._name, name)


def _follow(calls: Any) -> int:
    """Makes the calls of the first process until it ends, and returns the exit status of this one."""
    known: dict[Any, Any] = {}
    stops: list[int] = []
    if threading.current_thread() is threading.main_thread():
        # The first process decides when to stop, and saves first.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stops.append(number))
    try:
        while (message := _broadcast(None, calls)) is not None:
            try:
                with _together(stops):
                    _repeat(message, known)
            except (ActorDied, ActorHangs):
                raise
            except Exception:
                continue  # the first process has the error too, and ends the run
    except RuntimeError as error:
        # Another process has ended. If this one ended now, torchrun would end the first before that has told why.
        time.sleep(2.0)
        if isinstance(error, ActorHangs):
            raise
        return 1
    return 0


def _repeat(message: bytes, known: dict[Any, Any]) -> None:
    """Makes a call of the first process; ``known`` has this process's part of each value."""

    def value_of(number: Any) -> Any:
        if isinstance(number, str):
            return known[number]
        *number, field = number
        value = known[tuple(number)]
        return operator.attrgetter(field)(value) if field else value

    count, dropped, name, method, args, kwargs = _Unpickler(message, value_of).load()
    for number in dropped:
        known.pop(number, None)
    if name is None:
        known |= method(*args)
        return
    result = getattr(known[name], method)(*args, **kwargs)
    known |= {(count, part): value for part, value in enumerate(result if isinstance(result, tuple) else (result,))}


@contextlib.contextmanager
def _together(stops: list[int] | None = None) -> Iterator[None]:
    """Raises an error of any process in all of them, and passes a request to stop on to the first process.

    Args:
        stops: the signals that this process got; None in the first process, which handles its own.
    """
    from verl_fn.backends import agreement

    def gather(error: Exception | None) -> list[Exception | None]:
        try:
            both = agreement.gathered((error, bool(stops)))
        except RuntimeError as failure:
            raise _ended(failure, error) from failure
        # A second signal would stop the run at once.
        if stops is None and any(stop for _, stop in both) and signal.getsignal(signal.SIGTERM) != _AT_ONCE:
            os.kill(os.getpid(), signal.SIGTERM)
        return [error for error, _ in both]

    with agreement.agreed(gather):
        yield


def _ended(*errors: Exception | None) -> Exception:
    """Returns what errors of gloo mean; their type is the same for each, so only the messages tell."""
    if any("timed out" in str(error).lower() for error in errors):
        return ActorHangs(
            f"rank {torchrun_rank()} waited for another of torchrun's processes for longer than ray.timeout; raise "
            "ray.timeout if that one was still at work, such as reading a model or writing a checkpoint"
        )
    return ActorDied("another of torchrun's processes has ended; its output, or torchrun's, shows the reason")


def _broadcast(message: bytes | None, calls: Any) -> bytes | None:
    """Returns the first process's message in every process."""
    import torch.distributed as dist

    messages = [message]
    dist.broadcast_object_list(messages, src=0, group=calls)
    return messages[0]


def _sharded(value: Any) -> bool:
    """Returns whether each process has its own part of a value."""
    return isinstance(value, (TrainState, Params, Grads, Slots, Weights))


def _pickled(call: Any, number: Callable[[Any], Any]) -> bytes:
    """Pickles a call, functions included; ``number`` returns what stands for a value, or None."""
    from ray.cloudpickle import Pickler

    class Numbered(Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return number(obj)

    file = io.BytesIO()
    Numbered(file).dump(call)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    """Reads what ``_pickled`` wrote; ``value`` returns what a number stands for."""

    def __init__(self, message: bytes, value: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(message))
        self._value = value

    def persistent_load(self, number: Any) -> Any:
        return self._value(number)
