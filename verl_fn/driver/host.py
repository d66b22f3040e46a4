"""What runs inside a Ray actor: components by name, and the values that stay with them."""

from __future__ import annotations

import faulthandler
import operator
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import attrs
import torch

from verl_fn.backends.protocol import Freed
from verl_fn.backends.weight_sync.channel import Inlet, Outlet, send
from verl_fn.config.schema import DriverConfig

from . import identity
from .parcels import Argument, Parcels


@attrs.frozen
class Stored:
    """Stands for a value that stays in its actor: its number, and a field (or a field's field) if that is meant.

    Attributes:
        group: the name of the group whose ranks hold it.
    """

    id: int
    group: str
    field: str | None = None


@attrs.frozen
class Pulse:
    """What a rank is at.

    Attributes:
        busy: whether it is in a call of the driver.
        calls: how many it has begun and ended.
        collectives: how many it has begun, of all process groups.
        place: stands for the line of code that it is at.
    """

    busy: bool
    calls: int
    collectives: int
    place: int


class Host:
    """Holds components and values; every method is called by the driver through Ray.

    The driver numbers the values and says which numbers nobody holds any more, so what is alive is decided in one
    place.
    """

    def __init__(self) -> None:
        faulthandler.enable()
        self.components: dict[str, Any] = {}
        self.values: dict[int, Any] = {}
        self.parcels = Parcels()
        self._speaks = True
        self._thread: int | None = None
        self._calls = 0
        self._inlet: Inlet | None = None
        self._outlets: dict[tuple[str, int], Outlet] = {}

    def about(self, code: Sequence[str] = ()) -> dict[str, Any]:
        """This process, the files that its output goes to, and what it imports.

        Args:
            code: references to the user's own objects.
        """
        import ray

        logs = []
        for fd in (1, 2):
            try:
                logs.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        node = ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "logs": logs, "node": node, "identity": identity.identity(code)}

    def run(self, method: str, returns: int, places: Sequence[Argument], *flat: Any) -> tuple[Any, ...]:
        """Call a method of this class: its results, and None as a last one, which is quick to fetch.

        Ranks after the first return nothing else.

        Args:
            places: of the arguments in ``flat``.
        """
        self._thread = threading.get_ident()
        self._calls += 1
        try:
            args, columns = self.parcels.arguments(places, list(flat))
            result = getattr(self, method)(*args)
            results = result if returns > 1 else (result,)
            return (*(self.parcels.out(r, columns) if self._speaks else None for r in results), None)
        finally:
            self._thread = None
            self._calls += 1

    def set_up(self, driver: DriverConfig, ranks: int) -> None:
        """Make this process as the config asks.

        Args:
            ranks: training processes, which share the cores.
        """
        from . import build

        build.set_up_process(driver, ranks)

    def open_store(self, address: str, size: int, timeout: float) -> tuple[str, int]:
        """Where the ranks of a process group can meet, which this process holds: address and port."""
        from . import ranks

        self._store = ranks.open_store(address, size, timeout)
        return address, self._store.port

    def join(self, place: tuple[str, int], rank: int, size: int, timeout: float, device: str) -> None:
        """Become a rank of the process group that meets there."""
        from . import ranks

        self._speaks = rank == 0
        ranks.join(place, rank, size, timeout, device, getattr(self, "_store", None))

    def build(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        """Make a component: ``factory(*args)``."""
        self.components[name] = factory(*args)

    def attribute(self, component: str, name: str) -> Any:
        """An attribute of a component."""
        return getattr(self.components[component], name)

    def drop(self, numbers: Iterable[int]) -> None:
        """Let go of values."""
        for number in numbers:
            self.values.pop(number, None)

    def invoke(
        self, component: str, method: str, keep: tuple[int | None, ...], kwargs: dict[str, Any], *args: Any
    ) -> Any:
        """Call a component's method. Results with a number in ``keep`` stay here, the others are returned."""
        found = getattr(self.components[component], method)(*(self._open(a) for a in args), **kwargs)
        if not keep:
            return found
        results = found if len(keep) > 1 else (found,)
        returned = []
        for number, result in zip(keep, results, strict=True):
            if number is None:
                returned.append(result)
            else:
                self.values[number] = result
        return returned[0] if returned else None

    def map(self, fn: Callable[..., Any], keep: int | None, *args: Any) -> Any:
        """Apply a function to values that are here. Its result stays under the number ``keep``, if there is one."""
        found = fn(*(self._open(a) for a in args))
        if keep is None:
            return found
        self.values[keep] = found
        return None

    def call(self, fn: Callable[..., Any], kwargs: dict[str, Any], as_list: bool, *args: Any) -> Any:
        """Apply a function."""
        result = fn(*args, **kwargs)
        if not as_list:
            return result
        results = list(result)
        return results[0] if len(results) == 1 else results

    def named(self, component: str, value: Stored) -> dict[str, Any] | None:
        """Whole tensors under canonical names, on the CPU; all ranks go through them."""
        tensors = dict(self.components[component].named(self._open(value)))
        return {name: t.cpu() for name, t in tensors.items()} if self._speaks else None

    def listen(self, component: str, secret: bytes) -> tuple[str, int]:
        """Where the weights for a rollout engine of this process are to be sent."""
        import ray

        if self._inlet is None:
            self._inlet = Inlet(ray.util.get_node_ip_address(), secret, _device_of(self.components[component]))
        return self._inlet.address

    def receive(self, component: str, version: int) -> None:
        """Publish the weights that the next sender sends."""
        assert self._inlet is not None
        engine = self.components[component]
        self._inlet.receive(version, lambda source: engine.publish(version, source))

    def send(
        self, component: str, params: Stored, version: int, addresses: Sequence[tuple[str, int]], secret: bytes
    ) -> None:
        """Send weights to rollout engines of other processes; all ranks gather them, and the first one sends."""
        source = self.components[component].weights(self._open(params))
        if not self._speaks:
            for _ in source.read():
                pass
            return
        for address in addresses:
            if address not in self._outlets:
                self._outlets[address] = Outlet(address, secret, _device_of(self.components[component]))
        send([self._outlets[address] for address in addresses], version, source)

    def publish_here(self, component: str, params: Stored, engine: str, version: int) -> None:
        """Publish weights to a rollout engine of the first rank's own process."""
        source = self.components[component].weights(self._open(params))
        if self._speaks:
            self.components[engine].publish(version, source)
        else:
            for _ in source.read():
                pass

    def traffic(self) -> tuple[dict[str, int], int]:
        """How often each tensor was fetched, and the bytes of all."""
        return dict(self.parcels.fetched), self.parcels.nbytes

    def alive(self) -> list[int]:
        """The numbers of the values held here."""
        return list(self.values)

    def watch(self) -> None:
        """Never returns: its end tells the driver that this process has ended."""
        threading.Event().wait()

    def pulse(self) -> Pulse:
        """What this rank is at, told while a call runs."""
        from . import ranks

        frame = self._frame()
        lines = traceback.walk_stack(frame) if frame else ()
        at = hash(tuple((f.f_code.co_filename, line) for f, line in lines))
        return Pulse(self._thread is not None, self._calls, ranks.collectives(), at)

    def stack(self) -> traceback.StackSummary:
        """Where the call that runs is, outermost line first, without Ray's own; empty where none runs."""
        lines = traceback.extract_stack(frame) if (frame := self._frame()) else []
        inside = max((i + 1 for i, line in enumerate(lines) if line.filename == __file__), default=0)
        return traceback.StackSummary.from_list(lines[inside:])

    def _frame(self) -> FrameType | None:
        """Of the call that runs."""
        return sys._current_frames().get(self._thread or 0)

    def _open(self, value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        if value.id not in self.values:
            raise Freed(f"value {value.id} is not here: the call that should have made it failed, or it was dropped")
        held = self.values[value.id]
        return held if value.field is None else operator.attrgetter(value.field)(held)


def _device_of(component: Any) -> torch.device:
    """The device that a backend computes on; the CPU for one that does not say."""
    return torch.device(getattr(component, "device", "cpu"))
