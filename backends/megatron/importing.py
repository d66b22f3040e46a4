"""Imports megatron-core and Megatron-Bridge, checks their versions, and says where they come from."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.storage

from verl_fn.errors import UserError, install, installed_version

PACKAGES = {"megatron-core": "megatron.core", "megatron-bridge": "megatron.bridge"}
UNTESTED = "VERL_FN_UNTESTED_MEGATRON"  # the environment variable that allows other versions, if it is 1
TESTED = {"megatron-core": ("0.19.2",), "megatron-bridge": ("0.6.2",)}
INSTALL = install(
    "--no-deps megatron-core==0.19.2 megatron-bridge==0.6.2 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3",
    "einops==0.8.2",
)
_load_from_bytes = torch.storage._load_from_bytes
_NEEDS_TE = "import transformer_engine.pytorch as te"
_WITHOUT_TE = "from verl_fn.backends.megatron.importing import no_transformer_engine as te"
_MODULES = ("megatron.bridge", "megatron.bridge.peft.utils", "megatron.core.models.gpt.gpt_layer_specs")
_MODULES_WITH_TE = ("transformer_engine.pytorch", "megatron.core.extensions.transformer_engine")
_IMPORTS_TE = frozenset({"megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora"})


class MegatronMissing(UserError, ImportError):
    """megatron-core or Megatron-Bridge is missing, or of a version that this backend was never tested with."""


no_transformer_engine: Any = types.SimpleNamespace(
    Linear=type("Linear", (), {}),
    LayerNormLinear=type("LayerNormLinear", (), {}),
    GroupedLinear=type("GroupedLinear", (), {}),
    ops=types.SimpleNamespace(Sequential=type("Sequential", (), {})),
)
"""What Megatron-Bridge's LoRA layers get in place of transformer-engine: classes that nothing is an instance of."""


@functools.cache
def has_transformer_engine() -> bool:
    """Returns whether transformer-engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_installed() -> None:
    """Checks what can be known without importing anything.

    Raises:
        MegatronMissing: a package is missing or of another version, or Python is too old.
    """
    if sys.version_info < (3, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        raise MegatronMissing(f"Megatron-Bridge needs Python 3.12, and this is Python {version}")
    for module in ("megatron", *PACKAGES.values(), "omegaconf", "antlr4", "einops"):
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            raise MegatronMissing(f"there is no package {module}; install it with `{INSTALL}`")
    for name, tested in TESTED.items():
        # A build for one platform has a suffix, such as 0.19.2+cu130.
        if (version := _version(name)).partition("+")[0] not in tested and os.environ.get(UNTESTED) != "1":
            raise MegatronMissing(
                f"{name} in {_folder(name)} is {version}, and this backend was tested with {' or '.join(tested)}; it "
                f"uses private names that change between versions: `{INSTALL}`, or set {UNTESTED}=1 to try this one"
            )


def about() -> dict[str, str]:
    """Returns the version and the folder of megatron-core and of Megatron-Bridge, by name; nothing is imported.

    Raises:
        MegatronMissing: as ``check_installed``.
    """
    check_installed()
    return {name: f"{_version(name)} ({_folder(name)})" for name in PACKAGES}


def _version(name: str) -> str:
    """Returns the version of a library, by its own file: another checkout may stand before what was installed."""
    file = _folder(name) / "package_info.py"
    text = file.read_text() if file.exists() else ""
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = \"?([^\"\n]*)", text, re.MULTILINE))
    if {"MAJOR", "MINOR", "PATCH"} <= numbers.keys():
        return "{MAJOR}.{MINOR}.{PATCH}".format_map(numbers) + numbers.get("PRE_RELEASE", "")
    return installed_version(name) or "of an unknown version"


def _folder(name: str) -> Path:
    """Returns the folder that a library is imported from."""
    spec = importlib.util.find_spec(PACKAGES[name])
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def load_bridge() -> Any:
    """Imports Megatron-Bridge and returns its ``AutoBridge``.

    Nothing else of Megatron is imported before. Without transformer-engine, one line of two of Bridge's modules is
    replaced as they are imported, since they import it even where it is not used.

    Raises:
        MegatronMissing: a package is missing or of another version, or Python is too old.
    """
    check_installed()
    if not has_transformer_engine() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    try:
        import_apart(_MODULES + (_MODULES_WITH_TE if has_transformer_engine() else ()))
        from megatron.bridge import AutoBridge
        from megatron.bridge.peft import utils as peft_utils
    except ImportError as error:
        raise MegatronMissing(
            f"Megatron-Bridge cannot be imported: {error}; install what it needs with `{INSTALL}`"
        ) from error
    if not has_transformer_engine():
        # If transformer-engine is missing, megatron-core makes mocks, and Bridge takes them for the library.
        peft_utils.HAVE_TE = False
    # megatron-core puts a function of its own there, whose name would be in every tensor that is pickled: processes
    # without Megatron, such as the driver and rewards, would import it to read them, or could not.
    torch.storage._load_from_bytes = _load_from_bytes
    return AutoBridge


def import_apart(names: Sequence[str]) -> None:
    """Imports modules in a thread of its own, without their output.

    Libraries keep the errors of optional imports. The traceback of such an error refers to the frame of everything
    that waits for the import: a function of the caller that held a training state would hold it until the process
    ends, and the first update would copy it.

    Raises:
        ImportError: a module cannot be imported.
    """
    with quiet(), ThreadPoolExecutor(1, "verl_fn imports") as thread:
        for name in names:
            thread.submit(importlib.import_module, name).result()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what the libraries log, warn about and print as they make a model, such as kernels that are missing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of Bridge that import transformer-engine, and loads them without it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _IMPORTS_TE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        source = self.get_data(self.path).decode()
        return compile(source.replace(_NEEDS_TE, _WITHOUT_TE, 1), self.path, "exec", dont_inherit=True)
