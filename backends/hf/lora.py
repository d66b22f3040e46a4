"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): which layers have them, and what is merged, kept and written.

PEFT puts them into a model and knows their format; parameters keep the names of the model without adapters, and
each adapted layer ``m`` has ``m.lora_A.weight`` and ``m.lora_B.weight`` beside its own.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from verl_fn.errors import UserError
from verl_fn.state import Key, Params

ABOUT = "lora.json"
ALL = "all-linear"


class LoraError(UserError, ValueError):
    """Adapters that cannot be made, or that are not those of a folder."""


def _check_rank(lora: Lora, _: Any, rank: Any) -> None:
    if type(rank) is not int or rank < 1:
        raise LoraError(f"the rank of LoRA is {rank!r}; it must be a whole number of at least 1")


def _check_alpha(lora: Lora, _: Any, alpha: Any) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise LoraError(f"alpha of LoRA is {alpha!r}; it must be a positive, finite number")


def _names(targets: Any) -> tuple[str, ...]:
    if isinstance(targets, str):
        raise LoraError(
            f"targets of LoRA is the text {targets!r}; give a tuple or list of names, such as ({targets!r},)"
        )
    return tuple(targets)


def _itself(t: Tensor) -> Tensor:
    return t


@attrs.frozen
class Lora:
    """What adapters to train: ``W + alpha / rank * B @ A`` in place of ``W``.

    Attributes:
        rank: rows of A, columns of B.
        alpha: the adapters' scale is ``alpha / rank``.
        targets: names of layers, or ends of them such as ``q_proj``; ``all-linear`` takes every linear layer but the
            output layer.

    Raises:
        LoraError: one of them cannot be.

    >>> Lora(rank=8, alpha=16.0).scale
    2.0
    """

    rank: int = attrs.field(validator=_check_rank)
    alpha: float = attrs.field(default=16.0, validator=_check_alpha)
    targets: tuple[str, ...] = attrs.field(default=(ALL,), converter=_names)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@attrs.frozen
class Adapters:
    """The adapters of a model; without ``lora`` it has none.

    Attributes:
        lora: what was asked for.
        layers: the adapted layers, in the model's order.
        transposed: those of them that keep their weight as [in, out].

    >>> adapters = Adapters(Lora(rank=1, alpha=2.0), ("m",))
    >>> params = Params({"m.weight": torch.zeros(1, 1)} | {name: torch.ones(1, 1) for name in adapters.names()})
    >>> {name: float(t) for name, t in adapters.merged(params)}
    {'m.weight': 2.0}
    """

    lora: Lora | None = None
    layers: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """The names of the adapters' own parameters, in the model's order."""
        return [f"{layer}.{part}.weight" for layer in self.layers for part in ("lora_A", "lora_B")]

    def completed(self, params: Params, zeros: Callable[[tuple[int, int]], Tensor]) -> dict[str, Tensor]:
        """The leaves of ``params``, with ``zeros(shape)`` for adapters that it lacks: they add nothing."""
        found = dict(params.leaves)
        for layer in self.layers:
            assert self.lora is not None
            shape = params[f"{layer}.weight"].shape
            rows, columns = reversed(shape) if layer in self.transposed else shape
            for part, size in (("lora_A", (self.lora.rank, columns)), ("lora_B", (rows, self.lora.rank))):
                name = f"{layer}.{part}.weight"
                if name not in found:
                    found[name] = zeros(size)
        return found

    def merged(
        self, params: Params, rows: Callable[[Tensor], Tensor] = _itself, whole: Callable[[Tensor], Tensor] = _itself
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model without adapters, one after the other, with the adapters added in.

        Args:
            rows: the rows of a leaf that are wanted: of the weight, and of B, which has as many.
            whole: a whole leaf.
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
                yield name, torch.addmm(rows(t), left, right, alpha=self.lora.scale)

    def filed(
        self, params: Params, rows: Callable[[Tensor], Tensor] = _itself, whole: Callable[[Tensor], Tensor] = _itself
    ) -> dict[str, Tensor]:
        """The merged model for its file. What is made for it goes to the CPU at once: a GPU need not hold all of it."""
        made = {f"{layer}.weight" for layer in self.layers}
        return {name: t.cpu() if name in made else t for name, t in self.merged(params, rows, whole)}

    def without(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leaves that are not of the adapters."""
        own = set(self.names())
        return {name: t for name, t in leaves.items() if name not in own}

    def kept(self, params: Params) -> Params:
        """What cannot be told from the merged model: the adapters, and the weights that they were added to."""
        names = {f"{layer}.weight" for layer in self.layers} | set(self.names())
        return attrs.evolve(params, leaves={name: t for name, t in params.items() if name in names})

    def joined(self, like: Params, merged: Mapping[str, Tensor], kept: Params) -> Params:
        """The parameters with the structure of ``like``, from the merged model and what was ``kept`` beside it."""
        return attrs.evolve(like, leaves={n: kept[n] if n in kept else merged[n] for n in like})

    def write(self, folder: Path, base: Path) -> None:
        """Note in ``folder`` what adapters its training state has, and the model ``base`` that they were put into."""
        if self.lora is None:
            (folder / ABOUT).unlink(missing_ok=True)
        else:
            about = attrs.asdict(self.lora) | {"layers": self.layers, "transposed": sorted(self.transposed)}
            (folder / ABOUT).write_text(json.dumps({"base_model": str(base), **about}, indent=1))

    def check(self, folder: Path) -> None:
        """Compare with the adapters that the training state in ``folder`` has.

        Raises:
            LoraError: it has others, or none, or has some where these are none.
        """
        found, _ = read(folder) or (Adapters(), "")
        if found._same() != self._same():
            raise LoraError(
                f"{folder} holds a training state {found._told()}, and was to be restored {self._told()}; give the "
                f"same settings, or begin anew from the merged model that it holds (model.path={folder})"
            )

    def _same(self) -> tuple[Any, ...]:
        """What is the same for adapters that compute the same, however their targets were named."""
        return self.lora and (self.lora.rank, self.lora.alpha), self.layers, self.transposed

    def _told(self) -> str:
        if self.lora is None:
            return "without LoRA"
        of = ", ".join(self.lora.targets)
        return f"with LoRA of rank {self.lora.rank}, alpha {self.lora.alpha:g}, on {of} ({len(self.layers)} layers)"


def read(folder: Path) -> tuple[Adapters, str] | None:
    """The adapters of the training state in ``folder`` and the model that they were put into; None without any.

    Raises:
        LoraError: the note cannot be read.
    """
    try:
        about = json.loads((folder / ABOUT).read_text())
        lora = Lora(about["rank"], about["alpha"], about["targets"])
        return Adapters(lora, tuple(about["layers"]), frozenset(about["transposed"])), about["base_model"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoraError(f"{folder / ABOUT} cannot be read: {error}") from error


def inject(model: nn.Module, lora: Lora, output: nn.Module, key: Key, folder: str | Path) -> Adapters:
    """Put adapters into a transformers model, drawn from ``key``: A at random, B zero.

    Args:
        output: the model's output layer, which is used without calling it and so cannot have adapters.
        folder: where the model comes from, for errors.

    Raises:
        LoraError: PEFT is not installed, or the targets name no linear layer of the model.
    """
    peft = _peft()
    layers = target_layers(model, lora, output, folder)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT tells of weights that lie as [in, out], for which it does the right thing.
        warnings.simplefilter("ignore")
        torch.manual_seed(key.seed())
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise LoraError(f"{folder}: {error}") from error
    made = {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    return Adapters(lora, tuple(made), frozenset(name for name, m in made.items() if m.fan_in_fan_out))


def target_layers(model: nn.Module, lora: Lora, output: nn.Module, folder: str | Path) -> list[str]:
    """Returns the names of the layers that get adapters, in the model's order.

    Raises:
        LoraError: a target names none.
    """
    from transformers.pytorch_utils import Conv1D

    named = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not output]
    linear = [name for name, _ in named]
    there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if not linear:
        raise LoraError(f"{folder}: {type(model).__name__} has no linear layers, so it can have no adapters")
    chosen: set[str] = set()
    for target in lora.targets:
        found = [name for name in linear if target == ALL or f".{name}".endswith(f".{target}")]
        if not found:
            raise LoraError(
                f"{folder}: target_modules names {target!r}, which is no linear layer that can have an adapter; "
                f"there are {ALL}, {there}"
            )
        chosen.update(found)
    if not chosen:
        raise LoraError(f"{folder}: target_modules is empty; there are {ALL}, {there}")
    return [name for name in linear if name in chosen]


def canonical(name: str) -> str:
    """The public name of a parameter of a model with adapters.

    >>> canonical("m.q_proj.base_layer.weight"), canonical("m.q_proj.lora_A.default.weight")
    ('m.q_proj.weight', 'm.q_proj.lora_A.weight')
    """
    name = name.replace(".base_layer.", ".")
    return name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")


def write_adapter(tensors: Mapping[str, Tensor], adapters: Adapters, base: str, out: Path) -> None:
    """Write the adapters' parameters as a folder that ``peft.PeftModel.from_pretrained(base_model, out)`` loads."""
    from safetensors.torch import save_file

    assert adapters.lora is not None
    config = _peft().LoraConfig(
        r=adapters.lora.rank, lora_alpha=adapters.lora.alpha, lora_dropout=0.0,
        fan_in_fan_out=bool(adapters.transposed), task_type="CAUSAL_LM", base_model_name_or_path=base,
    )  # fmt: skip
    config.inference_mode = True
    config.target_modules = list(adapters.layers)  # PEFT made a set of them, in no order
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    save_file({f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()},
              out / "adapter_model.safetensors", metadata={"format": "pt"})  # fmt: skip


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise LoraError("LoRA needs PEFT, which is not installed here: pip install 'verl_fn[lora]'") from error
    return peft
