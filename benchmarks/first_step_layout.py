"""The layouts of the first step's benchmark: a backend, its ranks and its options."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import runpy
from pathlib import Path
from typing import Any

import attrs

from verl_fn.backends.hf.lora import Lora
from verl_fn.errors import UsageError, did_you_mean
from verl_fn.state import Batch
from verl_fn.steps import Optimizer

BACKENDS = {"local": "Local", "fsdp": "Fsdp", "megatron": "Megatron"}
# The option that moves the state first, and the arguments of a backend that are no options of a layout.
PLACE = "place"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
COUNTS = {"tp", "pp", "cp", "dp", "ep", "replicate", "lora"}
STRINGS = {PLACE, "updates_by"}
ON_CPU = Path(__file__).resolve().parents[1] / "tests/backends/helpers"
DECIDED = {"folder", "optimizer", "head", "dtype", "device", "max_tokens"}


def _value(text: str, key: str, value: str) -> int | bool | str:
    if value.isdigit():
        return int(value)
    if key in STRINGS:
        return value
    if value not in ("true", "false"):
        raise ValueError(f"layout {text!r}: {key} is {value!r}; it must be true, false or a number")
    return value == "true"


def _class(name: str) -> Any:
    return getattr(importlib.import_module(f"verl_fn.backends.{name}"), BACKENDS[name])


def megatron_on_cpu() -> None:
    """Lets megatron-core compute on CPUs in this process; only a checkout of this project has what it needs.

    Raises:
        UsageError: this is an installed package.
    """
    if not ON_CPU.is_dir():
        raise UsageError(
            "Megatron computes on ranks without a GPU only in a checkout of verl_fn, and this is an installed one; "
            "clone the repository, or take no more ranks than there are GPUs"
        )
    runpy.run_path(str(ON_CPU / "megatron_on_cpu.py"))["install"]()


@attrs.frozen
class Layout:
    """A backend, its ranks and its options.

    Example:
        >>> Layout.parse("fsdp:4,sp=2,bf16")
        Layout(text='fsdp:4,sp=2,bf16', name='fsdp', ranks=4, dtype='bfloat16', options={'sp': 2})
        >>> Layout.parse("local:fp32").dtype
        'float32'
        >>> Layout.parse("megatron:tp=2,pp=2").ranks
        4
        >>> Layout.parse("local,place=cpu,lora=8").reference
        'local,lora=8'
        >>> Layout.parse("fsdp:2,spp=2")
        Traceback (most recent call last):
        ValueError: layout 'fsdp:2,spp=2': fsdp takes no option 'spp'; did you mean sp?
    """

    text: str
    name: str
    ranks: int
    dtype: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads a layout.

        Raises:
            ValueError: there is no such backend, or it takes no such option.
        """
        name, *parts = re.split("[:,]", text)
        if name not in BACKENDS:
            raise ValueError(f"layout {text!r}: there is no backend {name!r}; there are {', '.join(BACKENDS)}")
        taken = {PLACE, *inspect.signature(_class(name)).parameters} | ({"dp"} if name == "megatron" else set())
        ranks, dtype, options = 1, "float32", {}
        for part in parts:
            key, equals, value = part.partition("=")
            if equals and key not in taken - DECIDED:
                raise ValueError(
                    f"layout {text!r}: {name} takes no option {key!r}{did_you_mean(key, taken - DECIDED)}"
                )
            elif equals and key in COUNTS and not (value.isdigit() and int(value)):
                raise ValueError(f"layout {text!r}: {key} is {value!r}; it must be a number from 1")
            elif equals and key in options:
                raise ValueError(f"layout {text!r}: {key} is given twice")
            elif equals:
                options[key] = _value(text, key, value)
            elif part.isdigit():
                ranks = int(part)
            elif part in DTYPES:
                dtype = DTYPES[part]
            else:
                names = " nor ".join(DTYPES)
                raise ValueError(f"layout {text!r}: {part!r} is neither a number of ranks nor {names} nor key=value")
        if ranks < 1:
            raise ValueError(f"layout {text!r}: it must have at least one rank")
        if name == "local" and ranks > 1:
            raise ValueError(f"layout {text!r}: local has one rank, and fsdp:2 has two")
        if name == "megatron":
            sizes = math.prod(int(options.get(key, 1)) for key in ("tp", "pp", "cp")) * int(options.pop("dp", 1))
            ranks = max(ranks, sizes, int(options.get("ep", 1)))
        return cls(text, name, ranks, dtype, options)

    @property
    def reference(self) -> str:
        """The layout that it is compared with."""
        return f"local,lora={self.options['lora']}" if "lora" in self.options else "local"

    @property
    def is_local_bf16(self) -> bool:
        """Whether layouts in bf16 are also compared with it."""
        return (self.name, self.dtype) == ("local", "bfloat16") and set(self.options) <= {"lora"}

    def make(self, model: Path, optimizer: Optimizer, head: str, batch: Batch, device: str) -> Any:
        """The backend for a head, with several micro-batches to the batch, whatever its lengths."""
        options = {k: Lora(rank=v) if k == "lora" else v for k, v in self.options.items() if k != PLACE}
        if self.name == "megatron" and device == "cpu":
            megatron_on_cpu()
        return _class(self.name)(
            model, optimizer, head=head, dtype=self.dtype, device=device,
            max_tokens=max(256, 4 * int(batch.lengths.max())), **{"deterministic": True, **options},
        )  # fmt: skip
