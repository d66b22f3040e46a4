"""Training states as folders that are also Hugging Face model folders, written and read by all ranks at once.

``from_pretrained`` reads ``model.safetensors``, ``config.json`` and the tokenizer; ``train_state.safetensors`` and
``train_state.json`` hold the rest of the state, under canonical names. Experts are stacked, as models compute with
them; ``export_model`` writes them as the hub does. The same state gives the same bytes for every number of ranks, but
for the last bits of weights that adapters are merged into. If the model has adapters, and the state's frozen weights
are the ones in the model's folder, the files do not hold them: PEFT's ``adapter_model.safetensors`` takes the place
of ``model.safetensors``, and ``lora.json`` names the model's folder (``hf.lora``).

Files are written in a folder of their own and renamed when all are complete, ``train_state.json`` last, so a folder
without that file holds no state, even after a kill. An export is read again and compared with what there was, by name
and by bit, before it moves to its folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn import atomic
from verl_fn.atomic import check_empty, replaced_folder
from verl_fn.backends import tensor_file
from verl_fn.backends.agreement import Gather, agreed, alone
from verl_fn.backends.hf import lora
from verl_fn.backends.hf.config import LOCAL, ModelError, quiet, read_config, refused
from verl_fn.backends.hf.folder import carried, computed_in, write_carried
from verl_fn.backends.hf.lora import ABOUT, ADAPTERS, PEFT_CONFIG, FrozenBase, Reference, load_base, write_peft_config
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.hf.tokenizer import GENERATION, read_tokenizer
from verl_fn.backends.tensor_file import SINGLE, TENSORS, Rows, Span
from verl_fn.errors import UsageError, UserError, raised_as
from verl_fn.state import Buffers, TrainState, tree
from verl_fn.state.tree import Scalar, flatten, unflatten

MODEL, SCALARS = SINGLE, "train_state.json"
_ASIDE = ".writing"

T = TypeVar("T")

Writing: TypeAlias = Callable[[], None]
"""Makes the folder of a save that has begun whole; all ranks call it together.

Raises:
    OSError: some rank cannot write; all ranks raise it, and the folder keeps its state. If renaming files fails,
        ``restore`` refuses the folder.
"""

_PARAM = ".params['"
# What transformers calls the output layers of classifiers.
_VALUE_HEADS = ("score", "classifier")


class CheckpointError(UserError, ValueError):
    """A folder does not hold a complete training state."""


def check_restorable(state: TrainState, made: Any = ()) -> None:
    """Raises an error for a state that could be written and not restored.

    Args:
        made: a tree as the optimizer makes it, with the tensors that ``restore`` expects; float32 for what it lacks.

    Raises:
        ValueError: a trained parameter is not in float32, or moments are missing, too many or in another dtype than
            they were made in.
    """

    def named(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    def moments(optimizer: Any) -> dict[str, Tensor]:
        return {f"optimizer{path}": t for path, t in tree.paths(optimizer).items() if isinstance(t, Tensor)}

    dtypes = {place: t.dtype for place, t in moments(made).items()}
    held = moments(state.optimizer)
    if made and (differing := sorted(dtypes.keys() ^ held.keys())):
        what = "lacks tensors that" if differing[0] in dtypes else "has other tensors than"
        raise ValueError(
            f"the state {what} its backend's optimizer makes, such as state.{differing[0]}: a checkpoint of this "
            "state could not be restored; make new moments with "
            "attrs.evolve(state, optimizer=backend.optimizer.init(state.params))"
        )
    trained = {f"params[{name!r}]": state.params[name] for name in state.params.trained()}
    for place, t in (trained | held).items():
        wanted = dtypes.get(place, torch.float32)
        if t.is_floating_point() and t.dtype != wanted:
            narrow = wanted != torch.float32
            rule = f"the optimizer's moments are {named(wanted)}" if narrow else "what is trained is float32"
            way = "do not cast the optimizer's state" if narrow else "make the state with .float() of it"
            raise ValueError(
                f"state.{place} is {named(t.dtype)}, and {rule}: a checkpoint of this state could not be restored; "
                f"{way}"
            )


def _finish(folder: Path, written: Callable[[], None], gather: Gather, rank: int) -> None:
    """Waits until this rank's parts are written, and moves the files to their places."""
    aside = folder / _ASIDE
    try:
        with agreed(gather):
            written()
        with agreed(gather):
            if rank == 0:
                # The folder has no `train_state.json` while it holds a mixture of two states.
                stale = [ABOUT, MODEL, ADAPTERS, PEFT_CONFIG]
                atomic.move_files(aside, folder, last=SCALARS, stale=stale)
    finally:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _fill(aside: Path, files: Mapping[str, Mapping[str, Span]]) -> None:
    for name, parts in files.items():
        tensor_file.fill(aside / name, parts)


def begin_save(
    folder: str | Path,
    model: Mapping[str, Span],
    rest: Mapping[str, Span],
    scalars: Mapping[str, Scalar],
    describe: Callable[[Path], None] = lambda folder: None,
    *,
    file: str = MODEL,
    gather: Gather = alone,
    rank: int = 0,
    later: bool = False,
) -> Writing:
    """Begins to write a state into ``folder``; all ranks call it together, each with its own parts.

    Args:
        folder: is made if it does not exist.
        model: the tensors of ``file``, under transformers' or PEFT's names.
        rest: the other tensors, under any names.
        scalars: the parts of the state that are not tensors.
        describe: writes the files that belong beside the weights into a folder, on the first rank.
        file: ``model.safetensors``, or PEFT's file.
        rank: the number of this process.
        later: write in a thread, from copies of the parts on the CPU: the state may be updated and donated meanwhile.

    Raises:
        OSError: the first rank cannot write; all ranks raise it, and the folder keeps its state.
    """
    folder, aside = Path(folder), Path(folder) / _ASIDE
    files = {file: model, TENSORS: rest}
    try:
        with agreed(gather):
            if rank == 0:
                # A killed save leaves such a folder.
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
                describe(aside)
                for name, parts in files.items():
                    tensor_file.start(aside / name, parts)
                (aside / SCALARS).write_text(json.dumps(scalars, indent=1))
    except BaseException:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    written: Callable[[], None] = functools.partial(_fill, aside, files)
    if later:
        held = {name: {n: span.on_cpu() for n, span in parts.items()} for name, parts in files.items()}
        thread = ThreadPoolExecutor(1, "verl_fn save")
        written = thread.submit(_fill, aside, held).result
        thread.shutdown(wait=False)
    return functools.partial(_finish, folder, written, gather, rank)


def read_state(
    folder: str | Path,
    model: Mapping[str, Tensor],
    rest: T,
    *,
    file: str = MODEL,
    rows: Rows = lambda count: (0, count),
    device: str | torch.device = "cpu",
    gather: Gather = alone,
    frozen: Iterable[str] = (),
) -> tuple[dict[str, Tensor], T]:
    """Reads the tensors of ``file`` and the rest of the state in ``folder``, bitwise.

    Parameters that are not trained get the dtype that the backend holds them in, if they were saved in another one.

    Args:
        model: the tensors that ``file`` must hold, on the meta device.
        rest: the structure of the rest, with whole tensors on the meta device.
        file: ``model.safetensors``, or PEFT's file.
        rows: returns the rows of a tensor that this rank reads, given the number of all rows.
        frozen: names of parameters that are not trained.

    Raises:
        CheckpointError: on all ranks, if the save was not finished, or a file is missing, damaged, or of another
            model or optimizer.
    """
    folder, device = Path(folder), torch.device(device)
    # The names of frozen parameters in both files.
    cast = {name for param in frozen for name in (param, f".params[{param!r}]")}
    with agreed(gather):
        check_finished(folder)
        # Of a damaged file, JSON can be nested too deeply or hold other types than were written.
        damage = (OSError, ValueError, TypeError, RecursionError, SafetensorError)
        with raised_as(CheckpointError, f"{folder} does not hold this training state", *damage):
            weights = tensor_file.read(folder / file, model, rows, device, cast)
            tensors = tensor_file.read(folder / TENSORS, flatten(rest)[0], rows, device, cast)
            scalars = json.loads((folder / SCALARS).read_text())
            hollow = unflatten(tree.map_tensors(lambda t: None, rest), {}, scalars)
    return weights, pytree.tree_map_with_path(lambda path, leaf: tensors.get(pytree.keystr(path), leaf), hollow)


Read: TypeAlias = Callable[[str, int, int], Tensor]
"""Returns rows of a tensor: by name, from the first to the one before the last."""


def open_state(
    folder: str | Path,
    model: Mapping[str, Tensor],
    rest: T,
    *,
    file: str = MODEL,
    gather: Gather = alone,
    frozen: Iterable[str] = (),
) -> tuple[Read, Read, T]:
    """Checks a state in ``folder`` as ``read_state`` does, and returns functions that read its tensors.

    Args:
        frozen: names of parameters that are not trained; they may be read in another dtype than ``model`` has.

    Returns:
        What reads ``file``, what reads the rest by path, and the rest with None for every tensor.

    Raises:
        CheckpointError: as ``read_state``.
    """
    _, state = read_state(folder, model, rest, file=file, rows=lambda count: (0, 0), gather=gather, frozen=frozen)
    weights, others = (tensor_file.Slices(Path(folder) / name) for name in (file, TENSORS))
    return weights.rows, others.rows, tree.map_tensors(lambda t: None, state)


def read_buffers(folder: str | Path, like: Buffers) -> Buffers:
    """Returns the buffers that ``save`` wrote, on the devices of ``like``; ``read_state`` checks the file."""
    if not like:
        return like
    model = tensor_file.Slices(Path(folder) / MODEL)
    rows = {name: model.rows(name, 0, len(b) if b.dim() else 0) for name, b in like.items()}
    return Buffers({name: t.to(like[name].device, like[name].dtype, copy=True) for name, t in rows.items()})


def check_finished(folder: str | Path) -> None:
    """Raises CheckpointError unless a save of a training state into ``folder`` was finished."""
    if not Path(folder).is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if not (Path(folder) / SCALARS).is_file():
        raise CheckpointError(
            f"{folder} does not hold this training state: it has no {SCALARS}, so its save was not finished, or it "
            f"is only a model"
        )


def about(folder: str | Path) -> bytes:
    """Returns bytes that identify the training state in ``folder``; none where there is no state."""
    file = Path(folder) / SCALARS
    return file.read_bytes() if file.is_file() else b""


def describe_model(
    folder: Path, skeleton: Skeleton, made_from: Path, dtype: torch.dtype, base: FrozenBase | None = None
) -> None:
    """Writes what belongs beside a model's weights: its config, its tokenizer and its adapters' settings.

    Args:
        dtype: what the model computes in. A run that begins from the folder computes in it too, though the weights
            are fp32: small updates can be lost in bf16, and then the model answers otherwise in fp32.
        base: the weights that the folder refers to; None if it holds all of them.
    """
    write_carried(computed_in(dtype, skeleton.files), folder)
    if base is None:
        skeleton.adapters.write(folder, made_from)
    else:
        skeleton.adapters.write(folder, base.folder, base.about(folder.parent))
        write_peft_config(skeleton.adapters, str(base.folder), folder, skeleton.trained_head)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Replaces safetensors' errors about a disk by the ``OSError`` behind them."""
    try:
        yield
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Copies a model and its tokenizer into ``out``, cast to ``dtype`` if given; a failure leaves ``out`` as it was.

    The model keeps its head: a critic or a reward model stays one.

    Raises:
        UsageError: ``out`` is not empty.
        ModelError: ``source`` has no tokenizer, lacks weights or has others than its model, or cannot be loaded or
            copied, or the copy is not the model.
    """
    out = Path(out)
    check_empty(out)
    config = read_config(source)
    read_tokenizer(source)
    with refused(f"{source} cannot be copied to {out}"), replaced_folder(out) as aside, quiet():
        model = _loaded(source, config, dtype or "auto")
        # Where config.json names a narrower dtype than the weights have, "as it is" is the dtype of the weights.
        held = dtype_of_weights(Path(source)) if dtype is None else None
        if held is not None and held.itemsize > model.dtype.itemsize:
            model = _loaded(source, config, held)
        # Checkpoints have the layout that models compute with (experts stacked), so reading one records no
        # conversion; None makes transformers write the layout that files of this architecture have.
        model._weight_conversions = getattr(model, "_weight_conversions", None) or None
        model.save_pretrained(aside)
        with contextlib.suppress(FileNotFoundError):  # only models that generate have such settings
            (aside / GENERATION).unlink()
        write_carried(carried(source, model), aside)
        written = _loaded(aside, read_config(aside), "auto")
        _compare(model.state_dict(), written.state_dict())
    return out


def _loaded(folder: str | Path, config: Any, dtype: Any) -> Any:
    """Returns transformers' model of a folder, of the class that its config names.

    Raises:
        ModelError: the folder lacks weights of the model, or has others.
    """
    import transformers

    name = next(iter(config.architectures or ()), "")
    # transformers refuses some settings of generation; the source's settings are copied as they are.
    options = {"config": config, "dtype": dtype, "generation_config": transformers.GenerationConfig(), **LOCAL}
    model, loaded = load_base(getattr(transformers, name, None) or transformers.AutoModelForCausalLM, folder, options)
    # transformers has drawn the missing ones at random, and left the others out.
    for problem, names in (
        ("lacks {} weights of the model", loaded["missing_keys"]),
        (f"has {{}} weights that {type(model).__name__} has not", loaded["unexpected_keys"]),
    ):
        if names:
            raise ModelError(f"{folder} {problem.format(len(names))}, such as {min(names)}")
    return model


def dtype_of_weights(folder: Path) -> torch.dtype | None:
    """Returns the dtype of most numbers in the files of a model's weights; None if no safetensors can be read."""
    counts: Counter[Any] = Counter()
    for path in folder.glob("*.safetensors"):
        if path.name != TENSORS:
            with contextlib.suppress(SafetensorError, OSError):
                file = tensor_file.Slices(path)
                for dtype, shape in map(file.about, file.names()):
                    counts[dtype] += math.prod(shape)
    kinds = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return next((kinds[name] for name, _ in counts.most_common() if name in kinds), None)


def _compare(expected: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
    """Raises ModelError unless the written tensors are the given ones, bit for bit."""
    differing = [name for name in {**expected, **written} if not tree.equal(expected.get(name), written.get(name))]
    if differing:
        raise ModelError(
            f"{len(differing)} tensors are lost, added or changed in what was written, such as {differing[0]}, by an "
            "error of the program or of the disk; nothing is exported"
        )


def export_adapter(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Writes the adapters of a checkpoint's model into ``out`` in PEFT's format, cast to ``dtype`` if given.

    ``peft.PeftModel.from_pretrained(model, out)`` adds them to the model that the run began with. The value head of a
    critic or a reward model is trained beside its adapters, so it is written with them.

    Raises:
        UsageError: ``out`` is not empty, or ``source`` has no adapters.
        LoraError: PEFT is not installed, or the checkpoint is damaged.
    """
    source, out = Path(source), Path(out)
    check_empty(out)
    saved = lora.read(source)
    if saved is None:
        raise UsageError(
            f"{source} has no adapters: it is no checkpoint of a run with actor.lora_rank above 0; "
            f"leave out --adapter to copy the model"
        )
    adapters, base = saved
    what = f"the adapters of {source} cannot be written to {out}"
    with raised_as(lora.LoraError, what, OSError, SafetensorError):
        tensors, head = _trained(source, adapters)
        if dtype is not None:
            tensors = {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}
        with replaced_folder(out) as aside:
            lora.write_adapter(tensors, adapters, base, aside, head)
            _compare(tensors, lora.read_adapter(aside))
    return out


def _trained(source: Path, adapters: lora.Adapters) -> tuple[dict[str, Tensor], str]:
    """Returns what a LoRA run trained: the adapters, and a value head; and the name of that head, or nothing.

    Raises:
        LoraError: the training state lacks adapters that it says it has, or has others.
    """
    if Reference.read(source) is not None:
        place, saved = source / lora.ADAPTERS, lora.read_adapter(source)
        heads = {name: t for name, t in saved.items() if not lora.is_adapter(name)}
    else:
        place, end = source / TENSORS, "']"
        found = _tensors(place, lambda name: name.startswith(_PARAM) and lora.is_adapter(name.removesuffix(end)))
        saved = {name.removeprefix(_PARAM).removesuffix(end): t for name, t in found.items()}
        heads = _tensors(source / MODEL, lambda name: name.partition(".")[0] in _VALUE_HEADS)
    held = {name for name in saved if lora.is_adapter(name)}
    if differing := sorted(held.symmetric_difference(adapters.names())):
        raise lora.LoraError(
            f"{place} does not hold the adapters that {lora.ABOUT} lists: {len(differing)} differ, such as "
            f"{differing[0]}; one of the files is of another checkpoint"
        )
    return {name: saved[name] for name in adapters.names()} | heads, next(iter(heads), "").partition(".")[0]


def _tensors(file: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
