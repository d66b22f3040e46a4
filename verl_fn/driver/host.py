"""What runs inside a Ray actor: components by name, and the values that stay with them."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from verl_fn.schema import Config


@attrs.frozen
class Stored:
    """Stands for a value that stays in its actor: its number, and a field of it if only that is meant."""

    id: int
    field: str | None = None


class Host:
    """Holds components and values; every method is called by the driver through Ray.

    The driver numbers the values and says with each call which numbers nobody holds any more, so what is
    alive is decided in one place.
    """

    def __init__(self, cfg: Config) -> None:
        from . import build

        faulthandler.enable()
        build.set_up_process(cfg)
        self.cfg = cfg
        self.components: dict[str, Any] = {}
        self.values: dict[int, Any] = {}

    def build(self, name: str, factory: Callable[..., Any], *args: Any) -> None:
        """Make a component: ``factory(cfg, *args)``."""
        self.components[name] = factory(self.cfg, *args)

    def about(self) -> dict[str, Any]:
        """This process, and the files that its output goes to."""
        logs = []
        for fd in (1, 2):
            try:
                logs.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return {"pid": os.getpid(), "logs": logs}

    def invoke(
        self, component: str, method: str, keep: tuple[int | None, ...], drop: Iterable[int], kwargs: dict[str, Any],
        *args: Any,
    ) -> Any:  # fmt: skip
        """Call a component's method. Results with a number in ``keep`` stay here, the others are returned."""
        for number in drop:
            self.values.pop(number, None)
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

    def call(self, fn: Callable[..., Any], kwargs: dict[str, Any], as_list: bool, *args: Any) -> Any:
        """Apply a function; a component's name as ``fn`` applies that component."""
        found = (self.components[fn] if isinstance(fn, str) else fn)(*(self._open(a) for a in args), **kwargs)
        if not as_list:
            return found
        results = list(found)
        return results[0] if len(results) == 1 else results

    def named_tensors(self, component: str, params: Stored) -> list[tuple[str, Any]]:
        """Whole tensors under canonical names, for an engine in another process."""
        return [(name, t.cpu()) for name, t in self.components[component].named_tensors(self._open(params))]

    def alive(self) -> list[int]:
        """The numbers of the values held here."""
        return list(self.values)

    def watch(self) -> None:
        """Never returns: its end tells the driver that this process has ended."""
        import threading

        threading.Event().wait()

    def _open(self, value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        held = self.values[value.id]
        return held if value.field is None else getattr(held, value.field)
