"""The class of all Ray actors: components by name, and the values that stay with them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch

from verl_fn import build
from verl_fn.backends.protocol import Freed
from verl_fn.backends.weight_sync.inlet import Inlet
from verl_fn.backends.weight_sync.outlet import Outlet, send
from verl_fn.state import Request, Sample

from .serialization import opened, packed

# The driver reports a hang after ray.timeout. Collectives must time out later than that, or the ranks that wait would
# fail first and be reported in place of the one that hangs.
PATIENCE = 2.0


@attrs.frozen
class Stored:
    """Refers to a value that stays on the ranks of a group, by its number."""

    id: int


@attrs.frozen
class Component:
    """Refers to a component of an actor by its name."""

    name: str


@attrs.frozen
class Heartbeat:
    """The progress of a rank.

    Attributes:
        busy: whether it runs a call of the driver.
        calls: how many calls it has started and ended.
        collectives: how many collectives it has started, in all process groups.
        stack: of the running call without Ray's lines, outermost first; empty if none runs.
        steps: how many decoding steps its engine has made; None while it draws nothing.
    """

    busy: bool
    calls: int
    collectives: int
    stack: traceback.StackSummary
    steps: int | None = None


class Host:
    """Holds components, and values that the driver numbers and drops; it calls every method through Ray."""

    def __init__(self) -> None:
        faulthandler.enable()
        self._drawing: Any = None
        self.components: dict[str, Any] = {}
        self.values: dict[Any, Any] = {}
        self._first = True
        # Of the running calls, the oldest first: a publication may run beside a call that draws.
        self._threads: list[int] = []
        self._calls = 0
        self._store: Any = None  # opened here, where the ranks of a process group meet
        self._inlet: Inlet | None = None
        self._outlets: dict[tuple[str, int], Outlet] = {}

    def about(self, code: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the id, node, log files and code of this process; ``code`` refers to the user's own objects."""
        import ray

        logs = [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)]
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "logs": logs, "node": node, "identity": build.code_identity(code)}

    def run(self, method: str, *args: Any) -> tuple[Any, None]:
        """Calls a method of this class with arguments as they travel, and returns its result on the first rank.

        The second None is there to wait for the end of the call.
        """
        with self._busy():
            # These do not write to their batch, which lies in shared memory; each rank copies its own rows.
            shared = method == "invoke" and args[1] in ("forward", "forward_backward")
            result = getattr(self, method)(*(opened(arg, shared=shared) for arg in args))
            return packed(result) if self._first else None, None

    def stream(self, component: str, version: int | None, requests: Sequence[Request]) -> Iterator[Sample]:
        """Yields the samples of a rollout engine as they end."""
        with self._busy(), self._draws(component):
            # Ray calls methods of generators that other iterators lack.
            for sample in self.components[component].stream(requests, version=version):  # noqa: UP028
                yield sample

    def open_store(self, address: str, size: int, timeout: float) -> tuple[str, int]:
        """Opens a store in which the ranks of a process group meet, and returns its address and port."""
        from verl_fn.backends.agreement import open_store

        self._store = open_store(address, size, timedelta(seconds=timeout))
        return address, self._store.port

    def join(self, place: tuple[str, int], rank: int, size: int, timeout: float, device: str) -> None:
        """Joins the process group whose store is at ``place``, a host and a port."""
        import torch.distributed as dist

        from verl_fn.backends.agreement import use_loopback

        from .ranks import backends

        self._first = rank == 0
        use_loopback(place[0])
        if self._store is None:
            self._store = dist.TCPStore(*place, size, is_master=False, timeout=timedelta(seconds=timeout))
        patience = timedelta(seconds=PATIENCE * timeout + 60)
        dist.init_process_group(backends(device), store=self._store, rank=rank, world_size=size, timeout=patience)

    def build(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        """Makes a component: ``factory(*args)``."""
        self.components[name] = factory(*args)

    def drop(self, numbers: Iterable[int]) -> None:
        """Drops values."""
        for number in numbers:
            self.values.pop(number, None)

    def invoke(
        self, component: str, method: str, keep: tuple[int | None, ...], kwargs: dict[str, Any], *args: Any
    ) -> Any:
        """Calls a component's method; results with a number in ``keep`` stay here, the one with None is returned."""
        with self._draws(component) if method == "generate" else contextlib.nullcontext():
            result = getattr(self.components[component], method)(*(self._open(a) for a in args), **kwargs)
        if not keep:
            return result
        results = dict(zip(keep, result if len(keep) > 1 else (result,), strict=True))
        returned = results.pop(None, None)
        self.values.update(results)
        return returned

    def map(self, fn: Callable[..., Any], keep: int | None, *args: Any) -> Any:
        """Applies a function to values of this actor; its result stays under the number ``keep``, if there is one."""
        result = fn(*(self._open(a) for a in args))
        if keep is None:
            return result
        self.values[keep] = result
        return None

    def listen(self, component: str, address: str, secret: bytes) -> tuple[str, int]:
        """Returns the host and port to which weights for a rollout engine are sent, by senders with the secret."""
        if self._inlet is None:
            engine = self.components[component]
            self._inlet = Inlet(address, secret, _device_of(engine), getattr(engine, "dtype", torch.float32))
        return self._inlet.address

    def receive(self, component: str, version: int) -> None:
        """Publishes the weights that the next sender sends."""
        assert self._inlet is not None
        engine = self.components[component]
        self._inlet.receive(version, lambda source: engine.publish(version, source))

    def send(
        self, component: str, params: Stored, version: int, addresses: Sequence[tuple[str, int]], secret: bytes
    ) -> None:
        """Sends weights to rollout engines of other processes.

        Each rank sends the rows that it holds. Where a backend shares out no rows, all ranks gather the tensors one
        by one, and the first rank sends them.
        """
        source = self.components[component].weights(self._open(params))
        if (held := getattr(source, "held", None)) is not None:
            source = held
        elif not self._first:
            addresses = []
        for address in addresses:
            if address not in self._outlets:
                self._outlets[address] = Outlet(address, secret, _device_of(self.components[component]))
        send([self._outlets[address] for address in addresses], version, source)

    def watch(self) -> None:
        """Waits for ever, so that this call ends only with the process, and the driver notices that."""
        threading.Event().wait()

    def heartbeat(self) -> Heartbeat:
        """Returns the progress of this rank, also while a call runs."""
        # The innermost frame of the oldest running call.
        frame = sys._current_frames().get(next(iter(self._threads), 0))
        lines = traceback.extract_stack(frame) if frame else []
        inside = max((i + 1 for i, line in enumerate(lines) if line.filename == __file__), default=0)
        stack = traceback.StackSummary.from_list(lines[inside:])
        steps = getattr(self._drawing, "steps", None)
        return Heartbeat(bool(self._threads), self._calls, collectives(), stack, steps)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Marks this thread as the running call's."""
        thread = threading.get_ident()
        self._threads.append(thread)
        self._calls += 1
        try:
            yield
        finally:
            self._threads.remove(thread)
            self._calls += 1

    @contextlib.contextmanager
    def _draws(self, component: str) -> Iterator[None]:
        """Marks an engine as one that draws, whose steps ``heartbeat`` counts."""
        self._drawing = self.components[component]
        try:
            yield
        finally:
            self._drawing = None

    def _open(self, value: Any) -> Any:
        if isinstance(value, Component):
            return self.components[value.name]
        if not isinstance(value, Stored):
            return value
        if value.id not in self.values:
            raise Freed(f"value {value.id} is not here: the call that should have made it failed, or it was dropped")
        return self.values[value.id]


def collectives() -> int:
    """Returns how many collectives this process has begun; a rank that others wait for has begun fewer."""
    # A process that has not imported torch.distributed has begun none, and importing it here would take long.
    dist = sys.modules.get("torch.distributed.distributed_c10d")
    groups = () if dist is None else tuple(dist._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def _device_of(component: Any) -> torch.device:
    """Returns the device that a backend computes on; the CPU for a backend without that attribute."""
    return torch.device(getattr(component, "device", "cpu"))
