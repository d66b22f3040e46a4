"""Makes skeletons and parameters from Hugging Face folders, and refuses models that a pure step cannot run.

``build`` loads weights with transformers; ``weights.FolderWeights`` reads the files of most folders without it.

The files beside the weights, such as the tokenizer's, are read once, when a model is made from its folder, and are
then written from memory into the folders of its checkpoints. So a save works whatever happens to that folder, and a
setting that transformers reads but would refuse to write is copied as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from verl_fn.backends.hf import experts
from verl_fn.backends.hf.checks import fit_of, kernels_for, wrong_gradients
from verl_fn.backends.hf.config import (
    LOCAL,
    ModelError,
    check_same_config,
    dropout_of,
    longest_row,
    quiet,
    read_config,
    read_json,
    reason,
    refused,
)
from verl_fn.backends.hf.lora import ABOUT, Lora, canonical, load_base
from verl_fn.backends.hf.skeleton import PADDED, Fit, Hollow, Skeleton, unfilled
from verl_fn.backends.hf.tokenizer import END
from verl_fn.backends.hf.vision import attentions, class_of
from verl_fn.backends.hf.weights import HEADS, check_numbers
from verl_fn.backends.tensor_file import Slices, files_of
from verl_fn.errors import install
from verl_fn.state import Key, isolated
from verl_fn.state.guards import with_attributes

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "HEADS", "Hollow", "ModelError", "build", "check_same_config", "check_same_model", "check_weights", "hollow",
    "model_notices", "pads_rows", "quiet", "read_config",
]  # fmt: skip

# Packages of kernels by the modules in them, as sources of transformers' models name them.
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}

# Making a model uses torch's global generator, and settings of torch and transformers.
_making = threading.RLock()
CONFIG = "config.json"
OFFLOAD = "offload"
# Whether layers are recomputed in the backward pass, and where their inputs are until then.
Checkpointing: TypeAlias = bool | Literal["offload"]
# What the tokenizers of transformers read, chat templates, and the settings of generation and processors.
_SUFFIXES = frozenset(
    (".json", ".txt", ".model", ".jinja", ".bpe", ".codes", ".spm", ".tiktoken", ".tokenizer", ".vocab")
)
_TEMPLATES = "additional_chat_templates"
# These speak of weights, or of a training that led to them.
_LEFT = frozenset((CONFIG, ABOUT, "train_state.json", "trainer_state.json", "adapter_config.json", "made_from.json"))


def _one_at_a_time(make: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(make)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _making, isolated():
            return make(*args, **kwargs)

    return alone


@_one_at_a_time
def build(
    folder: str | Path,
    head: str,
    *,
    pretrained: bool,
    key: Key,
    checkpointing: Checkpointing = False,
    lora: Lora | None = None,
    row_layout: str = "auto",
    frozen: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    trained: bool = True,
    freeze_tower: bool = False,
) -> tuple[Skeleton, dict[str, Tensor]]:
    """Returns the skeleton and the parameters of a Hugging Face folder, on the CPU; adapters come last.

    Trained parameters are fp32.

    Args:
        head: ``lm``, or ``value`` for a scalar head; a folder without one gets a head of zeros.
        pretrained: read the weights; otherwise draw them from ``key``.
        key: what random weights and adapters are drawn from.
        checkpointing: recompute each layer in the backward pass; ``"offload"`` keeps their inputs in host memory.
        lora: adapters to put in.
        row_layout: of a micro-batch: ``packed``, ``padded``, or ``auto`` for the first one that is right.
        frozen: the dtype of parameters that are not trained.
        trained: whether a model without adapters is trained.
        freeze_tower: do not train the module that sees images.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
        LoraError: the model cannot have such adapters.
    """
    auto, config, options, fit = _recipe(folder, head, row_layout)
    loaded = None
    with torch.random.fork_rng(devices=[]), quiet(), _refusals(folder), kernels_for(device, auto, config):
        torch.manual_seed(key.seed())
        if pretrained:
            model, loaded = _loaded(auto, config, folder, options)
        else:
            model = auto.from_config(config, **options)
    skeleton, new_head = _prepared(model, folder, head, config, fit, checkpointing, freeze_tower)
    if loaded is not None:
        _check_loaded(skeleton, loaded, new_head, folder)
    if new_head:
        # The folder may have one all the same, as of a classifier of sequences.
        for name, p in skeleton.model.named_parameters():
            if name.startswith(f"{skeleton.output_name}.") and (loaded is None or name in loaded["missing_keys"]):
                nn.init.zeros_(p)
    if not pretrained:
        _read_constants(skeleton, auto, config, options, folder)
    params = {name: p.detach() for name, p in model.named_parameters()}
    if pretrained:
        for name, t in params.items():
            check_numbers(name, t, folder)
    params |= _adapted(skeleton, lora, key, folder)
    skeleton.trained = trained
    _to_meta(model)
    return skeleton, _masters(skeleton, params, frozen)


@_one_at_a_time
def model_notices(folder: str | Path, head: str, row_layout: str = "auto", device: str = "cpu") -> list[str]:
    """Returns sentences about what a folder's config asks for, if a pure step does something else or slowly.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
    """
    sentences = []
    if rates := dropout_of(folder):
        named = ", ".join(f"{name} = {rate:g}" for name, rate in rates.items())
        sentences.append(f"{folder}/config.json sets {named}; dropout is turned off, since a step is a pure function")
    auto, config, _, fit = _recipe(folder, head, row_layout)
    kernels = kernels_of(auto._model_mapping[type(config)]) if device == "cuda" else {}
    if "fla" in kernels and wrong_gradients():
        sentences.append(
            f"{folder}: with this Triton flash-linear-attention's kernels have no gradients on Hopper GPUs, so its "
            f"layers run as transformers' own code, far slower: {install('tilelang')}"
        )
    if missing := [package for module, package in kernels.items() if importlib.util.find_spec(module) is None]:
        sentences.append(
            f"{folder}: {' and '.join(missing)} would compute layers of {config.model_type} much faster than "
            f"transformers' own code: {install(*missing)}"
        )
    if fit.why:
        sentences.append(
            f"rows of {folder} are padded to the longest of their micro-batch, since packed rows cannot be had: "
            f"{fit.why}"
        )
    return sentences


def kernels_of(model: type) -> dict[str, str]:
    """Returns the packages by module that a model of transformers takes kernels from if they are installed.

    They are for linear attention and state-space layers on GPUs.

    Example:
        >>> from transformers import Qwen2ForCausalLM
        >>> kernels_of(Qwen2ForCausalLM)
        {}
    """
    source = inspect.getsource(sys.modules[model.__module__])
    return {module: package for module, package in KERNELS.items() if re.search(rf"\b({module}|{package})\b", source)}


@_one_at_a_time
def check_weights(folder: str | Path, head: str, row_layout: str = "auto", *, scores: bool = False) -> Skeleton:
    """Checks that a folder holds the weights of its model, from the names and shapes in its files.

    Args:
        head: ``lm``, or ``value`` for a scalar head; the folder may lack it.
        row_layout: of a micro-batch; see ``build``.
        scores: the folder is a reward model's and must not lack the head.

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
    if scores and f"{skeleton.output_name}.weight" in loaded["missing_keys"]:
        raise without_head(folder)
    _check_loaded(skeleton, loaded, new_head, folder)
    return skeleton


def without_head(folder: str | Path) -> ModelError:
    """Returns the error about a folder that is no reward model's."""
    return ModelError(
        f"algorithm.reward_model: {folder} has no value head, so it gives no scores; train one with "
        "algorithm.name=reward_model"
    )


def pads_rows(folder: str | Path, head: str, row_layout: str = "auto") -> bool:
    """Returns whether rows of a folder's model are padded to the longest of their micro-batch.

    Args:
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
    own = {"config": config, "generation_config": transformers.GenerationConfig(), "ignore_mismatched_sizes": True}
    return load_base(auto, folder, {**options, **own, **LOCAL})


@_one_at_a_time
def hollow(
    folder: str | Path,
    head: str,
    *,
    key: Key,
    checkpointing: Checkpointing = False,
    lora: Lora | None = None,
    row_layout: str = "auto",
    frozen: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    trained: bool = True,
    freeze_tower: bool = False,
) -> Hollow:
    """Returns the model of a Hugging Face folder as ``build`` does, but without memory for its weights.

    Raises:
        ModelError: the folder, the architecture or one of its settings cannot be used.
        LoraError: the model cannot have such adapters.
    """
    auto, config, options, fit = _recipe(folder, head, row_layout)
    with (
        kernels_for(device, auto, config), torch.random.fork_rng(devices=[]), quiet(), _refusals(folder),
        _parameters_on_meta(),
    ):  # fmt: skip
        model = auto.from_config(copy.deepcopy(config), **options)
    skeleton, new_head = _prepared(model, folder, head, config, fit, checkpointing, freeze_tower)
    _read_constants(skeleton, auto, config, options, folder)
    skeleton.trained = trained
    shapes = {name: p.detach() for name, p in model.named_parameters()}
    adapters: dict[str, Tensor] = {}
    if lora is not None:
        # PEFT makes an adapter on the device of the layer's weight, and draws its values only on a real device.
        _replace(model, lambda p: torch.zeros(()).expand(p.shape))
        adapters = _adapted(skeleton, lora, key, folder)
        _to_meta(model)
        shapes |= {name: t.to("meta") for name, t in adapters.items()}
    return Hollow(skeleton, _masters(skeleton, shapes, frozen), adapters, new_head)


def _masters(skeleton: Skeleton, params: dict[str, Tensor], frozen: torch.dtype) -> dict[str, Tensor]:
    """Returns parameters as a state holds them: the ones that are not trained in the dtype ``frozen``."""
    trained = params if skeleton.trainable is None else skeleton.trainable
    return {name: t if name in trained else t.to(frozen) for name, t in params.items()}


def _recipe(folder: str | Path, head: str, row_layout: str) -> tuple[Any, Any, dict[str, Any], Fit]:
    """Returns transformers' class for the model, its config, the options that it is made with, and how it is run."""
    config = read_config(folder)
    auto = class_of(config, head, folder)
    if head == "value":
        config.num_labels = 1
    # A classifier makes its body in the dtype of the config, and its head in the one that it is asked for.
    config.dtype = config.get_text_config().dtype = torch.float32
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    fit = fit_of(auto, config, head, folder, row_layout)
    return auto, config, options | {"attn_implementation": attentions(config, fit.attention)}, fit


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
        except ImportError as error:
            quantized = read_json(Path(folder) / "config.json").get("quantization_config")
            if not quantized:
                raise
            raise ModelError(
                f"{folder}: its weights are quantized ({quantized.get('quant_method')}), and transformers does not "
                f"turn them back into whole ones here ({reason(error)}); take the checkpoint with whole weights"
            ) from error


def _prepared(
    model: Any,
    folder: str | Path,
    head: str,
    config: Any,
    fit: Fit,
    checkpointing: Checkpointing,
    freeze_tower: bool = False,
) -> tuple[Skeleton, bool]:
    """Returns the model as a skeleton, and whether its output layer is new."""
    model.config.use_cache = False
    model.eval()
    experts.use_grouped(model)
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
            if module.training and checkpointing == OFFLOAD:
                module._gradient_checkpointing_func = _offloading(module._gradient_checkpointing_func)
    has_value_head = any("TokenClassification" in name for name in config.architectures or ())
    skeleton = Skeleton(model, head, longest_row(config), fit)
    skeleton.files = carried(folder, model)
    skeleton.freeze_tower(freeze_tower, folder)
    return skeleton, head == "value" and not has_value_head


def _offloading(recompute: Callable[P, T]) -> Callable[P, T]:
    """Wraps transformers' function that recomputes a layer, so that the layer's inputs are kept in host memory."""

    def offloaded(*args: P.args, **kwargs: P.kwargs) -> T:
        pinned = any(isinstance(value, Tensor) and value.is_cuda for value in args)
        # Within the layer, its own hooks discard what it keeps, so only its inputs are moved.
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return recompute(*args, **kwargs)

    return offloaded


def _read_constants(skeleton: Skeleton, auto: Any, config: Any, options: dict[str, Any], folder: str | Path) -> None:
    """Copies the folder's values of buffers that its weights contain, such as the biases of routers."""
    constants = skeleton.constants
    with refused(f"{folder}: its weights cannot be read"):
        files = files_of(Path(folder)) if constants else {}
        if not constants or not (files or any(Path(folder).glob("pytorch_model*.bin"))):
            return
        if constants.keys() <= files.keys():
            opened = functools.cache(Slices)
            stored = {name: opened(files[name]).rows(name, 0, max(1, *b.shape, 1)) for name, b in constants.items()}
        else:
            # Pickled, or under other names that transformers knows.
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
        loaded: transformers' report on the weights that it loaded.
        new_head: the output layer is new, so the folder need not have it.
    """
    own = skeleton.output_name
    if skeleton.head == "value" and (
        sizes := {name: size for name, size, _ in loaded["mismatched_keys"] if name.startswith(f"{own}.")}
    ):
        name = min(sizes)
        raise ModelError(
            f"{folder}: {name} has the shape {list(sizes[name])}, and a value head gives one number; take a folder "
            "whose head has one label, or one without a head to begin with zeros"
        )
    differing = {
        "missing": (n for n in loaded["missing_keys"] if not (new_head and n.startswith(f"{own}."))),
        "of another shape": (n for n, *_ in loaded["mismatched_keys"]),
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
    params = dict(skeleton.model.named_parameters(remove_duplicate=False))
    for one, other in skeleton.model.get_expanded_tied_weights_keys(all_submodels=True).items():
        # transformers keeps both if their values differ, and engines take the embedding twice.
        if params.get(one) is not params.get(other):
            raise ModelError(
                f"{folder} holds {one} with other values than {other}, and its config.json ties them; set "
                "tie_word_embeddings to false there, or remove the tensor"
            )


def check_same_model(skeleton: Skeleton, other: Skeleton, folder: str | Path) -> None:
    """Raises an error unless two skeletons compute the same with the same parameters.

    Args:
        other: the config of ``folder``.

    Raises:
        ModelError: their configs differ, or buffers that no state holds, such as rotary frequencies.
    """
    check_same_config(skeleton, folder)
    fixed, of_states = dict(skeleton.model.named_buffers()), skeleton.constants.keys()
    for name, b in other.model.named_buffers():
        if name not in of_states and not torch.equal(b.cpu(), fixed[name].cpu()):
            raise ModelError(f"{folder} holds another {name} than the model this backend was made for")


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Makes modules register every parameter on the meta device; buffers keep their device."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then draws no values
        register(self, name, param)

    # Memory that is allocated and never written costs nothing.
    with with_attributes(nn.Module, register_parameter=on_meta), unfilled():
        yield


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


def is_carried(name: str) -> bool:
    """Returns whether a file of a model folder goes into the folders of its checkpoints.

    Example:
        >>> [is_carried(n) for n in ("tekken.json", "model.safetensors", "model.safetensors.index.json")]
        [True, False, False]
    """
    return Path(name).suffix in _SUFFIXES and name not in _LEFT and not name.endswith(".index.json")


def carried(folder: str | Path, model: Any) -> dict[str, bytes]:
    """Returns the contents of the files, by path in the folder.

    Args:
        model: transformers' model that was made from it.

    Raises:
        ModelError: a file cannot be read.
    """
    folder = Path(folder)
    with refused(f"{folder} cannot be read"):
        files = [path for path in folder.iterdir() if is_carried(path.name) and path.is_file()]
        files += (folder / _TEMPLATES).glob("*.jinja")
        contents = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}
        config = saved_config(model, read_json(folder / CONFIG))
    return contents | {CONFIG: _as_file(config)}


def computed_in(dtype: torch.dtype, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns files of ``carried`` whose ``config.json`` names a dtype, also of a model inside another."""
    config = json.loads(contents[CONFIG])
    for part in (config, *(part for part in config.values() if isinstance(part, dict) and "dtype" in part)):
        part["dtype"] = str(dtype).removeprefix("torch.")
    return {**contents, CONFIG: _as_file(config)}


def _as_file(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def saved_config(model: Any, read: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what ``config.json`` says of a model.

    Args:
        read: the content of the ``config.json`` that it was made from.
    """
    config = json.loads(model.config.to_json_string()) | {
        "architectures": [type(model).__name__],
        "dtype": str(model.dtype).removeprefix("torch."),
        "use_cache": True,  # training turns it off, here and elsewhere
    }
    # Code is not copied and never run. An architecture's default end token may be another than the tokenizer's.
    config.pop("auto_map", None)
    inner = read.get("text_config")
    if END not in read and not (isinstance(inner, Mapping) and END in inner):
        config.pop(END, None)
    return config


def write_carried(contents: Mapping[str, bytes], folder: Path) -> None:
    """Writes files into a folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
