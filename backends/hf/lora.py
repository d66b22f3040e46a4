"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): which layers have them, and how they are merged and saved.

PEFT adds them to a model and writes their format. Parameters keep the names of the model without adapters, and each
adapted layer ``m`` has ``m.lora_A.weight`` and ``m.lora_B.weight`` beside its own.

The model that adapters were added to has frozen weights. A checkpoint refers to its folder and does not hold them, if
they still are what was read from the folder's files. It keeps the size and the CRC-32 of each file; whoever reads the
checkpoint compares them first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from verl_fn.atomic import crc_of
from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.tensor_file import TENSORS, checksum
from verl_fn.errors import UserError, install, raised_as
from verl_fn.state import Key, Params, isolated
from verl_fn.state.node import FrozenDict

ADAPTERS = "adapter_model.safetensors"  # PEFT's name
PEFT_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."  # of the names in that file
ABOUT = "lora.json"
# What reading a damaged one raises.
_DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
ALL = "all-linear"

Stamp = tuple[tuple[str, int, int, int], ...]


class LoraError(UserError, ValueError):
    """Adapters cannot be made, or differ from a folder's."""


def _check_rank(lora: Lora, _: Any, rank: Any) -> None:
    if type(rank) is not int or rank < 1:
        raise LoraError(f"the rank of LoRA is {rank!r}; it must be a whole number of at least 1")


def _check_alpha(lora: Lora, _: Any, alpha: Any) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise LoraError(f"alpha of LoRA is {alpha!r}; it must be a positive, finite number")


def _names(targets: Any) -> tuple[str, ...]:
    if isinstance(targets, str):
        raise LoraError(
            f"targets of LoRA is the string {targets!r}; give a tuple or list of names, such as ({targets!r},)"
        )
    return tuple(targets)


def itself(t: Tensor) -> Tensor:
    """Returns the tensor."""
    return t


@attrs.frozen
class Lora:
    """Which adapters to train: a layer computes with ``W + alpha / rank * B @ A`` in place of ``W``.

    Attributes:
        rank: the rows of A and columns of B.
        alpha: the adapters' scale is ``alpha / rank``.
        targets: names of layers, or ends of names such as ``q_proj``; ``all-linear`` takes every linear layer but the
            output layer.

    Raises:
        LoraError: one of the attributes has an impossible value.

    Example:
        >>> Lora(rank=8, alpha=16.0).scale
        2.0
    """

    rank: int = attrs.field(validator=_check_rank)
    alpha: float = attrs.field(default=16.0, validator=_check_alpha)
    targets: tuple[str, ...] = attrs.field(default=(ALL,), converter=_names)

    @property
    def scale(self) -> float:
        """The factor of ``B @ A``."""
        return self.alpha / self.rank


@attrs.frozen
class Adapters:
    """The adapters of a model; without ``lora`` it has none.

    Attributes:
        lora: the settings that the adapters were made from.
        layers: the adapted layers, in the model's order.
        transposed: the layers whose weight is stored as [in, out].

    Example:
        >>> adapters = Adapters(Lora(rank=1, alpha=2.0), ("m",))
        >>> params = Params({"m.weight": torch.zeros(1, 1)} | {name: torch.ones(1, 1) for name in adapters.names()})
        >>> {name: float(t) for name, t in adapters.merged(params)}
        {'m.weight': 2.0}
    """

    lora: Lora | None = None
    layers: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Returns the names of the adapters' own parameters, in the model's order."""
        return [f"{layer}.{part}.weight" for layer in self.layers for part in ("lora_A", "lora_B")]

    def completed(self, params: Params, zeros: Callable[[tuple[int, int]], Tensor]) -> dict[str, Tensor]:
        """Returns the leaves of ``params``, with ``zeros(shape)`` for adapters that it lacks."""
        leaves = dict(params.leaves)
        for layer in self.layers:
            assert self.lora is not None
            shape = params[f"{layer}.weight"].shape
            rows, columns = reversed(shape) if layer in self.transposed else shape
            for part, size in (("lora_A", (self.lora.rank, columns)), ("lora_B", (rows, self.lora.rank))):
                name = f"{layer}.{part}.weight"
                if name not in leaves:
                    leaves[name] = zeros(size)
        return leaves

    def merged(
        self, params: Params, rows: Callable[[Tensor], Tensor] = itself, whole: Callable[[Tensor], Tensor] = itself
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter of the model without adapters, with the adapters added to it in fp32.

        Args:
            rows: returns the rows of a leaf to compute: of a weight, and of B with the same rows.
            whole: returns a whole leaf.
        """
        adapted = {f"{layer}.weight": layer for layer in self.layers}
        for name, t in self.without(params).items():
            layer = adapted.get(name)
            if layer is None or f"{layer}.lora_A.weight" not in params:
                yield name, rows(t)
            else:
                assert self.lora is not None
                a, b = (params[f"{layer}.{part}.weight"] for part in ("lora_A", "lora_B"))
                left, right = (whole(a).T, whole(b).T) if layer in self.transposed else (rows(b), whole(a))
                with isolated():
                    whole_weight = torch.addmm(rows(t).float(), left, right, alpha=self.lora.scale)
                yield name, whole_weight

    def merged_like(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what has the shapes and dtypes of the tensors that ``merged`` yields for ``leaves``."""
        adapted = {f"{layer}.weight" for layer in self.layers if f"{layer}.lora_A.weight" in leaves}
        return {
            name: torch.empty(t.shape, device="meta") if name in adapted else t
            for name, t in self.without(leaves).items()
        }

    def without(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the leaves that do not belong to adapters."""
        own = set(self.names())
        return {name: t for name, t in leaves.items() if name not in own}

    def own(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the leaves that belong to adapters."""
        return {name: leaves[name] for name in self.names() if name in leaves}

    def unmerged(self, params: Params) -> Params:
        """Returns what the merged model cannot restore: the adapters, and the weights that they were added to."""
        names = {f"{layer}.weight" for layer in self.layers} | set(self.names())
        return Params({name: t for name, t in params.items() if name in names}, params.trainable)

    def joined(self, like: Params, merged: Mapping[str, Tensor], unmerged: Params) -> Params:
        """Returns parameters with the structure of ``like``, from the merged model and the unmerged leaves."""
        return attrs.evolve(like, leaves={n: unmerged[n] if n in unmerged else merged[n] for n in like})

    def write(self, folder: Path, base: Path, more: Mapping[str, Any] = FrozenDict()) -> None:
        """Writes into ``folder`` which adapters its training state has, and the model ``base`` that they adapt."""
        if self.lora is not None:
            about = attrs.asdict(self.lora) | {"layers": self.layers, "transposed": sorted(self.transposed)}
            (folder / ABOUT).write_text(json.dumps({"base_model": str(base), **about, **more}, indent=1))

    def check(self, folder: Path) -> None:
        """Compares these adapters with the adapters of the training state in ``folder``.

        Raises:
            LoraError: the state has other adapters.
        """
        saved, _ = read(folder) or (Adapters(), "")
        if saved._identity() != self._identity():
            raise LoraError(
                f"{folder} holds a training state {saved._described()}, and was to be restored {self._described()}; "
                f"give the same settings, or start again from the merged model that it holds (model.path={folder})"
            )

    def _identity(self) -> tuple[object, ...]:
        """Returns a value that is equal for adapters that compute the same, however their targets were named."""
        return self.lora and (self.lora.rank, self.lora.alpha), self.layers, self.transposed

    def _described(self) -> str:
        if self.lora is None:
            return "without LoRA"
        of = ", ".join(self.lora.targets)
        return f"with LoRA of rank {self.lora.rank}, alpha {self.lora.alpha:g}, on {of} ({len(self.layers)} layers)"


def read(folder: Path) -> tuple[Adapters, str] | None:
    """Returns the adapters of the training state in ``folder`` and the model that they adapt; None without any.

    Raises:
        LoraError: the description of the adapters cannot be read.
    """
    with raised_as(LoraError, f"{folder / ABOUT} cannot be read", *_DAMAGES):
        if (about := _about(folder)) is None:
            return None
        lora = Lora(about["rank"], about["alpha"], about["targets"])
        return Adapters(lora, tuple(about["layers"]), frozenset(about["transposed"])), about["base_model"]


def _about(folder: Path) -> Any:
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / ABOUT).read_text())
    return None


def inject(
    model: nn.Module, lora: Lora, output: nn.Module, key: Key, folder: str | Path, *, without: nn.Module | None = None
) -> Adapters:
    """Adds adapters to a transformers model; A is drawn from ``key``, and B is zero.

    Args:
        output: the model's output layer: it is used without being called, so it cannot have adapters.
        without: a module of the model that stays as it is.

    Raises:
        LoraError: PEFT is not installed, or the targets name no linear layer of the model.
    """
    peft = _peft()
    layers = target_layers(model, lora, output, folder, without=without)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of weights stored as [in, out], but handles them correctly.
        warnings.simplefilter("ignore")
        torch.manual_seed(key.seed())
        with raised_as(LoraError, str(folder), ValueError):
            peft.inject_adapter_in_model(config, model)
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    return Adapters(lora, tuple(adapted), frozenset(name for name, m in adapted.items() if m.fan_in_fan_out))


def target_layers(
    model: nn.Module, lora: Lora, output: nn.Module, folder: str | Path, *, without: nn.Module | None = None
) -> list[str]:
    """Returns the names of the layers that get adapters, in the model's order; none of them lies in ``without``.

    Raises:
        LoraError: a target names none.
    """
    from transformers.pytorch_utils import Conv1D

    excluded = {output, *(() if without is None else without.modules())}
    linear = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m not in excluded]
    there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if not linear:
        raise LoraError(f"{folder}: {type(model).__name__} has no linear layers, so it can have no adapters")
    chosen: set[str] = set()
    for target in lora.targets:
        matching = [name for name in linear if target == ALL or f".{name}".endswith(f".{target}")]
        if not matching:
            raise LoraError(
                f"{folder}: target_modules names {target!r}: no linear layer that can have an adapter; "
                f"there are {ALL}, {there}"
            )
        chosen.update(matching)
    if not chosen:
        raise LoraError(f"{folder}: target_modules is empty; there are {ALL}, {there}")
    return [name for name in linear if name in chosen]


def canonical(name: str) -> str:
    """Returns the public name of a parameter of a model with adapters.

    Example:
        >>> canonical("m.q_proj.base_layer.weight"), canonical("m.q_proj.lora_A.default.weight")
        ('m.q_proj.weight', 'm.q_proj.lora_A.weight')
    """
    name = name.replace(".base_layer.", ".")
    return name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")


def is_adapter(name: str) -> bool:
    """Returns whether a tensor belongs to an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def in_peft(name: str) -> str:
    """Returns the name of an adapter's parameter, or of a value head's, in PEFT's file.

    Example:
        >>> in_peft("m.q_proj.lora_A.weight")
        'base_model.model.m.q_proj.lora_A.weight'
    """
    return f"{_PREFIX}{name}"


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Returns what PEFT's file in ``folder`` holds, by name in the model.

    Raises:
        LoraError: the file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with raised_as(LoraError, f"{folder / ADAPTERS} cannot be read", OSError, SafetensorError):
        return {name.removeprefix(_PREFIX): t for name, t in load_file(folder / ADAPTERS).items()}


def write_adapter(tensors: Mapping[str, Tensor], adapters: Adapters, base: str, out: Path, head: str = "") -> None:
    """Writes the adapters' parameters as a folder that ``peft.PeftModel.from_pretrained(base_model, out)`` loads.

    Args:
        tensors: the adapters and the head, by name.
        base: the model that they adapt.
        head: the name of a value head among ``tensors``; empty for a language model.
    """
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    write_peft_config(adapters, base, out, head)
    named = {in_peft(name): t.contiguous() for name, t in tensors.items()}
    save_file(named, out / ADAPTERS, metadata={"format": "pt"})


def write_peft_config(adapters: Adapters, base: str, out: Path, head: str = "") -> None:
    """Writes PEFT's description of adapters; see ``write_adapter``."""
    assert adapters.lora is not None
    config = _peft().LoraConfig(
        r=adapters.lora.rank,
        lora_alpha=adapters.lora.alpha,
        lora_dropout=0.0,
        fan_in_fan_out=bool(adapters.transposed),
        task_type="TOKEN_CLS" if head else "CAUSAL_LM",
        modules_to_save=[head] if head else None,
        base_model_name_or_path=base,
    )
    config.inference_mode = True
    config.target_modules = list(adapters.layers)  # the config would keep a set of them, in no order
    config.save_pretrained(out)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise LoraError("LoRA needs PEFT; it is not installed here: " + install("'verl_fn[lora]'")) from error
    return peft


@attrs.frozen
class Reference:
    """What a checkpoint of adapters says about the weights that it does not hold.

    Attributes:
        base: the model folder that they were read from; relative to the checkpoint, if both were moved together.
        dtype: torch's name for the dtype that the state held them in.
        files: size and CRC-32 of each file of the folder that holds weights.
    """

    base: Path
    dtype: str
    files: Mapping[str, tuple[int, int]]

    @classmethod
    def read(cls, folder: str | Path) -> Reference | None:
        """Returns the reference of the training state in ``folder``; None if the folder holds all of its weights.

        Raises:
            LoraError: it cannot be read.
        """
        with raised_as(LoraError, f"{Path(folder) / ABOUT} cannot be read", *_DAMAGES):
            if (content := _about(Path(folder))) is None or "files" not in content:
                return None
            files = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
            base, beside = Path(content["base_model"]), Path(folder, content["beside"])
            return cls(base if base.is_dir() or not beside.is_dir() else beside, str(content["dtype"]), files)

    def check(self, checkpoint: str | Path, base: str | Path | None = None) -> Path:
        """Compares the files of a model folder with the files that the adapters were trained on.

        Args:
            checkpoint: the folder with this reference, for errors.
            base: the model folder; by default the one that is referred to.

        Returns:
            The model folder.

        Raises:
            ModelError: a file is missing, or was changed.
        """
        folder = self.base if base is None else Path(base)
        for name, (size, crc) in self.files.items():
            file = folder / name
            if not file.is_file():
                problem = f"{file} does not exist"
            elif file.stat().st_size != size or _checksum(file, _stamp(file)) != crc:
                problem = f"{file} is another file than it was"
            else:
                continue
            raise ModelError(
                f"{checkpoint} holds adapters, and their frozen weights are the ones that {self.base} had, but "
                f"{problem}: bring them back, or to continue a run set model.path to where they are"
            )
        return folder


@attrs.frozen(eq=False)
class FrozenBase:
    """The frozen weights of a state as they were read from a folder.

    Attributes:
        folder: the model folder.
        stamp: its files before they were read.
        prints: the dtype and the checksum of each tensor; of shards, only of this rank's.
    """

    folder: Path
    stamp: Stamp
    prints: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, folder: Path, stamp: Stamp, weights: Mapping[str, Tensor]) -> FrozenBase:
        """Returns the weights that were read from a folder since ``stamp``."""
        return cls(folder.resolve(), stamp, _prints(weights))

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        """Returns whether these are the weights in the folder, in one dtype."""
        if not self.stamp or stamp_of(self.folder) != self.stamp:
            return False
        return _prints(weights) == self.prints and len({dtype for dtype, _ in self.prints.values()}) <= 1

    def about(self, checkpoint: Path) -> dict[str, Any]:
        """Returns what a checkpoint in a folder says about these weights; see ``Reference``.

        Raises:
            ModelError: the files are being changed.
        """
        (dtype,) = {dtype for dtype, _ in self.prints.values()}
        files = {name: (size, _checksum(self.folder / name, tuple(rest))) for name, size, *rest in self.stamp}
        if stamp_of(self.folder) != self.stamp:
            raise ModelError(f"files of {self.folder} change while a checkpoint that refers to them is saved")
        return {"beside": os.path.relpath(self.folder, checkpoint.resolve()), "dtype": dtype, "files": files}


def load_base(auto: Any, folder: str | Path, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model with the weights of a folder, and its report on them.

    If the folder is a checkpoint that refers to frozen weights, its adapters are merged into these in fp32, and the
    sum is cast to the dtype that the options name.

    Raises:
        LoraError: the folder's description of its adapters, or their file, is damaged.
        ModelError: the folder refers to weights that were changed or moved.
    """
    if (reference := Reference.read(folder)) is None:
        model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
        return model, report
    model, report = load_base(auto, reference.check(folder), {**options, "dtype": torch.float32})
    adapters, _ = read(Path(folder)) or (Adapters(), "")
    trained = read_adapter(Path(folder))
    if lacking := set(adapters.names()) - trained.keys():
        raise LoraError(f"{Path(folder) / ADAPTERS} lacks {len(lacking)} adapters, such as {min(lacking)}")
    own = dict(model.named_parameters())
    if not any(p.is_meta for p in own.values()):
        held = getattr(torch, reference.dtype)
        frozen = {name: p.detach().to(held) for name, p in own.items() if name not in trained}
        for name, t in adapters.merged(Params({**frozen, **trained})):
            own[name].data.copy_(t)
    missing = [name for name in report["missing_keys"] if name not in trained]
    if (dtype := options.get("dtype", "auto")) != "auto":
        model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    # The frozen weights are the ones that were trained on, and what was not of the model then is not now.
    return model, {**report, "missing_keys": missing, "unexpected_keys": []}


def chain_of(folder: str | Path) -> list[Path]:
    """Returns a model folder and the folders that it refers to; the last one holds all of its weights."""
    reference = Reference.read(folder)
    return [Path(folder), *(() if reference is None else chain_of(reference.base))]


def stamp_of(folder: Path) -> Stamp:
    """Returns the files of a model folder that hold weights, with size, time of the last change, and number."""
    files = [path for pattern in ("*.safetensors", "*.bin", ABOUT) for path in folder.glob(pattern)]
    return tuple((path.name, path.stat().st_size, *_stamp(path)) for path in sorted(files) if path.name != TENSORS)


def _stamp(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_mtime_ns, about.st_ino


@functools.lru_cache(maxsize=4096)
def _checksum(file: Path, stamp: tuple[int, ...]) -> int:
    return crc_of(file)


def _prints(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    return {name: (str(t.dtype).removeprefix("torch."), checksum(t)) for name, t in weights.items()}
