"""Makes skeletons and parameters from Hugging Face folders, and refuses models that a pure step cannot run."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor, nn

from verl_fn.backends.hf.carried import carried
from verl_fn.backends.hf.checks import fit_of
from verl_fn.backends.hf.config import (
    LOCAL,
    ModelError,
    check_same_config,
    dropout_of,
    longest_row,
    quiet,
    read_config,
    reason,
    refused,
)
from verl_fn.backends.hf.lora import Lora, canonical
from verl_fn.backends.hf.skeleton import PADDED, Fit, Skeleton
from verl_fn.backends.tensor_file import Slices, files_of
from verl_fn.state import Key, isolated

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "HEADS", "Hollow", "ModelError", "build", "check_same_config", "check_same_model", "check_weights", "hollow",
    "model_notices", "pads_rows", "quiet", "read_config",
]  # fmt: skip

# What transformers calls the output layers of language models and of classifiers.
HEADS = frozenset({"lm_head", "embed_out", "output_projection", "score", "classifier"})

LARGEST_WEIGHT = 1e18

# Making a model uses torch's global generator, and settings of torch and transformers.
_making = threading.RLock()


def _one_at_a_time(make: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(make)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _making, isolated():
            return make(*args, **kwargs)

    return alone


@attrs.frozen(eq=False)
class Hollow:
    """A model without its weights.

    Attributes:
        skeleton: on the meta device, except for constants such as rotary frequencies.
        shapes: every parameter by canonical name, on the meta device; adapters come last.
        adapters: the values of LoRA's adapters.
        new_head: the output layer is new and of zeros, so the folder need not have it.
    """

    skeleton: Skeleton
    shapes: dict[str, Tensor]
    adapters: dict[str, Tensor]
    new_head: bool


@_one_at_a_time
def build(
    folder: str | Path,
    head: str,
    *,
    pretrained: bool,
    key: Key,
    checkpointing: bool = False,
    lora: Lora | None = None,
    row_layout: str = "auto",
) -> tuple[Skeleton, dict[str, Tensor]]:
    """Returns the skeleton and the parameters of a Hugging Face folder, fp32, on the CPU; adapters come last.

    Args:
        folder: a Hugging Face model folder.
        head: ``lm``, or ``value`` for a scalar head; a folder without one gets a head of zeros.
        pretrained: read the weights; otherwise draw them from ``key``.
        key: what random weights and adapters are drawn from.
        checkpointing: recompute each layer in the backward pass.
        lora: adapters to put in.
        row_layout: of a micro-batch: ``packed``, ``padded``, or ``auto`` for the first one that is right.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
        LoraError: the model cannot have such adapters.
    """
    auto, config, options, fit = _recipe(folder, head, row_layout)
    loaded = None
    with torch.random.fork_rng(devices=[]), quiet(), _refusals(folder):
        torch.manual_seed(key.seed())
        if pretrained:
            model, loaded = _loaded(auto, config, folder, options)
        else:
            model = auto.from_config(config, **options)
    skeleton, new_head = _prepared(model, folder, head, config, fit, checkpointing)
    if loaded is not None:
        _check_loaded(skeleton, loaded, new_head, folder)
    if new_head:
        for p in skeleton.output_layer.parameters():
            nn.init.zeros_(p)
    if not pretrained:
        _read_constants(skeleton, auto, config, options, folder)
    params = {name: p.detach() for name, p in model.named_parameters()}
    if pretrained:
        for name, t in params.items():
            check_numbers(name, t, folder)
    params |= _adapted(skeleton, lora, key, folder)
    _to_meta(model)
    return skeleton, params


def check_numbers(name: str, weight: Tensor, place: str | Path) -> None:
    """Checks that float32 holds the squares of weights, since norms and moments are made of squares.

    A bias may have -inf, by which an output layer excludes tokens.

    Args:
        name: of the parameter.
        weight: some or all of its rows.
        place: the folder or file that they come from, for the error.

    Raises:
        ModelError: a weight is not finite, or too large.

    Example:
        >>> check_numbers("norm.weight", torch.tensor([1.0, 1e38]), "model")
        Traceback (most recent call last):
        verl_fn.backends.hf.config.ModelError: model: norm.weight has the value 1e+38, and weights beyond 1e+18 make
        every step useless; copy the file again, or correct the weight
    """
    top = float(torch.linalg.vector_norm(weight, float("inf"))) if weight.numel() else 0.0
    if top <= LARGEST_WEIGHT:
        return
    wrong = ~(weight.abs() <= LARGEST_WEIGHT)
    if name.endswith("bias"):
        wrong &= weight != -torch.inf
    if wrong.any():
        raise ModelError(
            f"{place}: {name} has the value {float(weight[wrong][0]):g}, and weights beyond {LARGEST_WEIGHT:g} make "
            "every step useless; copy the file again, or correct the weight"
        )


@_one_at_a_time
def model_notices(folder: str | Path, head: str, row_layout: str = "auto") -> list[str]:
    """Returns sentences about what a folder's config asks for, if a pure step does something else.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
    """
    sentences = []
    if rates := dropout_of(folder):
        named = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items())
        sentences.append(f"{folder}/config.json sets {named}; dropout is turned off, since a step is a pure function")
    *_, fit = _recipe(folder, head, row_layout)
    if fit.why:
        sentences.append(
            f"rows of {folder} are padded to the longest of their micro-batch, since packed rows cannot be had: "
            f"{fit.why}"
        )
    return sentences


@_one_at_a_time
def check_weights(folder: str | Path, head: str, row_layout: str = "auto") -> Skeleton:
    """Checks that a folder holds the weights of its model, from the names and shapes in its files.

    Args:
        folder: a Hugging Face model folder.
        head: ``lm``, or ``value`` for a scalar head; the folder may lack it.
        row_layout: of a micro-batch; see ``build``.

    Returns:
        The model without its weights.

    Raises:
        ModelError: weights are missing, of another shape, or of another model, or a file cannot be read.
    """
    auto, config, options, fit = _recipe(folder, head, row_layout)
    with torch.random.fork_rng(devices=[]), quiet(), _refusals(folder):
        # On the meta device, transformers reads only the headers of the files.
        model, loaded = _loaded(auto, config, folder, options | {"device_map": "meta"})
    skeleton, new_head = _prepared(model, folder, head, config, fit, checkpointing=False)
    _check_loaded(skeleton, loaded, new_head, folder)
    return skeleton


def pads_rows(folder: str | Path, head: str, row_layout: str = "auto") -> bool:
    """Returns whether rows of a folder's model are padded to the longest of their micro-batch.

    Args:
        folder: a Hugging Face model folder.
        head: ``lm`` or ``value``.
        row_layout: as asked for; see ``build``.

    Raises:
        ModelError: the model cannot be run so.
    """
    return _recipe(folder, head, row_layout)[3].layout == PADDED


def _loaded(auto: Any, config: Any, folder: str | Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model with the weights of a folder, and its report on them.

    ``_check_loaded`` refuses weights that do not fit, all of them by name.
    """
    import transformers

    # The folder's own settings of generation are not used, and some of them would be refused.
    model, report = auto.from_pretrained(
        folder,
        config=config,
        generation_config=transformers.GenerationConfig(),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options | LOCAL,
    )
    return model, report


@_one_at_a_time
def hollow(
    folder: str | Path,
    head: str,
    *,
    key: Key,
    checkpointing: bool = False,
    lora: Lora | None = None,
    row_layout: str = "auto",
) -> Hollow:
    """Returns the model of a Hugging Face folder as ``build`` does, but without memory for its weights.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
        LoraError: the model cannot have such adapters.
    """
    auto, config, options, fit = _recipe(folder, head, row_layout)
    model = _without_weights(auto, config, options, folder)
    skeleton, new_head = _prepared(model, folder, head, config, fit, checkpointing)
    _read_constants(skeleton, auto, config, options, folder)
    shapes = {name: p.detach() for name, p in model.named_parameters()}
    adapters: dict[str, Tensor] = {}
    if lora is not None:
        # PEFT makes an adapter on the device of the layer's weight, and draws its values only on a real device.
        _replace(model, lambda p: torch.zeros(()).expand(p.shape))
        adapters = _adapted(skeleton, lora, key, folder)
        _to_meta(model)
        shapes |= {name: t.to("meta") for name, t in adapters.items()}
    return Hollow(skeleton, shapes, adapters, new_head)


def _recipe(folder: str | Path, head: str, row_layout: str) -> tuple[Any, Any, dict[str, Any], Fit]:
    """Returns transformers' class for the model, its config, the options that it is made with, and how it is run."""
    import transformers

    config = read_config(folder)
    auto: Any = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForTokenClassification
    if head == "value":
        config.num_labels = 1
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    # A damaged config may describe a model that no memory can hold.
    _without_weights(auto, config, options | {"attn_implementation": "eager"}, folder)
    fit = fit_of(auto, config, head, folder, row_layout)
    return auto, config, options | {"attn_implementation": fit.attention}, fit


def _without_weights(auto: Any, config: Any, options: dict[str, Any], folder: str | Path) -> Any:
    """Returns transformers' model with its parameters on the meta device.

    Raises:
        ModelError: it cannot be made, or is larger than the folder's weights.
    """
    with torch.random.fork_rng(devices=[]), quiet(), _refusals(folder), _parameters_on_meta():
        model = auto.from_config(copy.deepcopy(config), **options)
    files = [path for pattern in ("*.safetensors", "*.bin") for path in Path(folder).glob(pattern)]
    described, held = sum(p.numel() for p in model.parameters()), sum(path.stat().st_size for path in files)
    # Quantized weights take more than a bit each, too.
    if files and described > 8 * held:
        raise ModelError(
            f"{folder}/config.json describes a model of {described:,} parameters, and the folder's weights have only "
            f"{held:,} bytes; copy the folder again"
        )
    return model


@contextlib.contextmanager
def _refusals(folder: str | Path) -> Iterator[None]:
    """Replaces errors of transformers by ones that name the folder."""
    with refused(str(folder)):
        try:
            yield
        except RuntimeError as error:
            # The rest of the message refers to a report that is not shown.
            why = reason(error).partition(" For details")[0]
            raise ModelError(f"{folder}: its weights cannot be converted for this model: {why}") from error


def _prepared(
    model: Any, folder: str | Path, head: str, config: Any, fit: Fit, checkpointing: bool
) -> tuple[Skeleton, bool]:
    """Returns the model as a skeleton, and whether its output layer is new."""
    model.config.use_cache = False
    model.eval()
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(
                f"{folder}: {type(model).__name__} cannot compute its layers again in the backward pass; set "
                "enable_gradient_checkpointing to false"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # Only these modules are told to train: routers, for example, would add noise.
        for module in model.modules():
            module.training = bool(getattr(module, "gradient_checkpointing", False))
    has_value_head = any("TokenClassification" in name for name in config.architectures or ())
    skeleton = Skeleton(model, head, longest_row(config), fit)
    skeleton.files = carried(folder, model)
    return skeleton, head == "value" and not has_value_head


def _read_constants(skeleton: Skeleton, auto: Any, config: Any, options: dict[str, Any], folder: str | Path) -> None:
    """Copies the folder's values of buffers that its weights contain, such as the biases of routers."""
    constants = skeleton.constants
    with refused(f"{folder}: its weights cannot be read"):
        files = files_of(Path(folder)) if constants else {}
        if not files:
            return
        if constants.keys() <= files.keys():
            opened = {file: Slices(file) for file in {files[name] for name in constants}}
            stored = {name: opened[files[name]].rows(name, 0, max(1, *b.shape, 1)) for name, b in constants.items()}
        else:
            # Under other names that transformers knows.
            with quiet():
                stored = dict(auto.from_pretrained(folder, config=config, **options | LOCAL).named_buffers())
        for name, b in constants.items():
            b.copy_(stored[name])


def _adapted(skeleton: Skeleton, lora: Lora | None, key: Key, folder: str | Path) -> dict[str, Tensor]:
    """Adds the adapters of ``lora`` to a skeleton, and returns their values."""
    if lora is None:
        return {}
    skeleton.adapt(lora, key.fold_in("lora"), folder)
    values = {canonical(name): p.detach() for name, p in skeleton.model.named_parameters()}
    return {name: values[name] for name in skeleton.adapters.names()}


def _check_loaded(skeleton: Skeleton, loaded: dict[str, Any], new_head: bool, folder: str | Path) -> None:
    """Raises an error for a folder that lacks weights of the model, or has others.

    transformers would draw missing weights at random.

    Args:
        skeleton: the model.
        loaded: transformers' report on the weights that it loaded.
        new_head: the output layer is new, so the folder need not have it.
        folder: where the weights come from.
    """
    layer = skeleton.output_layer
    own = next(name for name, module in skeleton.model.named_modules() if module is layer)

    def needed(name: str) -> bool:
        return not (new_head and name.startswith(f"{own}."))

    differing = {
        "missing": filter(needed, loaded["missing_keys"]),
        "of another shape": filter(needed, (name for name, *_ in loaded["mismatched_keys"])),
        "not of this model": (n for n in loaded["unexpected_keys"] if n.partition(".")[0] not in HEADS - {own}),
    }
    problems = []
    for problem, differing_names in differing.items():
        if names := sorted(differing_names):
            problems.append(f"{len(names)} {problem} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})")
    if problems:
        raise ModelError(
            f"{folder} does not hold the weights of {type(skeleton.model).__name__}: {'; '.join(problems)}; copy the "
            f"folder again, or give it the config.json of its weights"
        )


def check_same_model(skeleton: Skeleton, other: Skeleton, folder: str | Path) -> None:
    """Raises an error unless two skeletons compute the same with the same parameters.

    Args:
        skeleton: the backend's own.
        other: the config of ``folder``.
        folder: a model folder.

    Raises:
        ModelError: their configs or their constants differ.
    """
    check_same_config(skeleton, folder)
    constants = dict(skeleton.named_buffers())
    for name, b in other.named_buffers():
        if not torch.equal(b.cpu(), constants[name].cpu()):
            raise ModelError(f"{folder} holds another {name} than the model this backend was made for")


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Makes modules register every parameter on the meta device; buffers keep their device."""
    # The module replaces itself by an object with this property; a type checker cannot see that.
    deterministic: Any = torch.utils.deterministic

    register, fills = nn.Module.register_parameter, deterministic.fill_uninitialized_memory

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    # Memory that is allocated and never written costs nothing. Deterministic algorithms would write it.
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        deterministic.fill_uninitialized_memory = fills


def _to_meta(model: nn.Module) -> None:
    """Drops the storage of all parameters; a tied weight stays one parameter."""
    _replace(model, lambda p: torch.empty_like(p, device="meta"))


def _replace(model: nn.Module, by: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter; a tied weight stays one parameter."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if p not in replacements:
                    replacements[p] = nn.Parameter(by(p.detach()))
                module._parameters[name] = replacements[p]
