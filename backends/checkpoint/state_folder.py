"""Training states as folders that are also Hugging Face model folders, written and read by all ranks at once.

``from_pretrained`` reads ``model.safetensors``, ``config.json`` and the tokenizer; ``train_state.safetensors`` and
``train_state.json`` hold the rest of the state, under canonical names. Experts are stacked, as models compute with
them; ``verl-fn export`` writes them as the hub does. The same state gives the same bytes for every number of ranks,
but for the last bits of weights that adapters are merged into. If the model has adapters, and the state's frozen
weights are the ones in the model's folder, the files do not hold them: PEFT's ``adapter_model.safetensors`` takes the
place of ``model.safetensors``, and ``lora.json`` names the model's folder (``hf.frozen_base``).

Files are written in a folder of their own and renamed when all are complete, ``train_state.json`` last, so a folder
without that file holds no state, even after a kill.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from verl_fn import atomic
from verl_fn.backends import tensor_file
from verl_fn.backends.agreement import Gather, agreed, alone
from verl_fn.backends.hf.folder import write_carried
from verl_fn.backends.hf.frozen_base import FrozenBase
from verl_fn.backends.hf.lora import ABOUT, ADAPTERS, PEFT_CONFIG, write_peft_config
from verl_fn.backends.hf.skeleton import Skeleton
from verl_fn.backends.tensor_file import SINGLE, TENSORS, Rows, Span
from verl_fn.errors import UserError
from verl_fn.state import Buffers, TrainState, tree
from verl_fn.state.tree import Scalar, flatten, unflatten

MODEL, SCALARS = SINGLE, "train_state.json"
_ASIDE = ".writing"

T = TypeVar("T")


class CheckpointError(UserError, ValueError):
    """A folder does not hold a complete training state."""


def check_dtypes(state: TrainState, made: Any = ()) -> None:
    """Raises an error for a state that could be written and not restored.

    Args:
        state: the state.
        made: a tree as the optimizer makes it, whose dtypes ``restore`` expects; float32 for what it lacks.

    Raises:
        ValueError: a trained parameter is not in float32, or a moment in another dtype than it was made in.
    """

    def named(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    def moments(optimizer: Any) -> dict[str, Tensor]:
        return {f"optimizer{path}": t for path, t in tree.paths(optimizer).items() if isinstance(t, Tensor)}

    dtypes = {place: t.dtype for place, t in moments(made).items()}
    trained = {f"params[{name!r}]": state.params[name] for name in state.params.trained()}
    for place, t in (trained | moments(state.optimizer)).items():
        wanted = dtypes.get(place, torch.float32)
        if t.is_floating_point() and t.dtype != wanted:
            narrow = wanted != torch.float32
            rule = f"the optimizer's moments are {named(wanted)}" if narrow else "what is trained is float32"
            way = "do not cast the optimizer's state" if narrow else "make the state with .float() of it"
            raise ValueError(
                f"state.{place} is {named(t.dtype)}, and {rule}: a checkpoint of this state could not be restored; "
                f"{way}"
            )


class Writing:
    """A save that has begun; ``finish`` makes the folder whole.

    If the save may end later, a thread writes what this rank has. It has copies of the tensors on the CPU, so the
    state may be updated and donated meanwhile.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, Mapping[str, Span]], gather: Gather, rank: int, later: bool
    ) -> None:
        self._folder, self._gather, self._rank = folder, gather, rank
        if later:
            held = {name: {n: span.on_cpu() for n, span in parts.items()} for name, parts in files.items()}
            thread = ThreadPoolExecutor(1, "verl_fn save")
            self._written: Callable[[], None] = thread.submit(_fill, folder / _ASIDE, held).result
            thread.shutdown(wait=False)
        else:
            self._written = functools.partial(_fill, folder / _ASIDE, files)

    def finish(self) -> None:
        """Waits until this rank's parts are written, and moves the files to their places; all ranks call it together.

        Raises:
            OSError: some rank cannot write; all ranks raise it, and the folder keeps its state. If renaming files
                fails, ``restore`` refuses the folder.
        """
        aside = self._folder / _ASIDE
        try:
            with agreed(self._gather):
                self._written()
            with agreed(self._gather):
                if self._rank == 0:
                    # The folder has no `train_state.json` while it holds a mixture of two states.
                    stale = [ABOUT, MODEL, ADAPTERS, PEFT_CONFIG]
                    atomic.move_files(aside, self._folder, last=SCALARS, stale=stale)
        finally:
            if self._rank == 0:
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
        gather: returns the values of all ranks, by rank.
        rank: the number of this process.
        later: write in a thread, from copies of the parts.

    Returns:
        The save. Call its ``finish``.

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
    return Writing(folder, files, gather, rank, later)


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
        folder: where ``save`` wrote a state.
        model: the tensors that ``file`` must hold, on the meta device.
        rest: the structure of the rest, with whole tensors on the meta device.
        file: ``model.safetensors``, or PEFT's file.
        rows: returns the rows of a tensor that this rank reads, given the number of all rows.
        device: where the tensors go.
        gather: returns the values of all ranks, by rank.
        frozen: names of parameters that are not trained.

    Raises:
        CheckpointError: on all ranks, if the save was not finished, or a file is missing, damaged, or of another
            model or optimizer.
    """
    folder, device, cast = Path(folder), torch.device(device), _either(frozen)
    with agreed(gather):
        check_finished(folder)
        try:
            weights = tensor_file.read(folder / file, model, rows, device, cast)
            tensors = tensor_file.read(folder / TENSORS, flatten(rest)[0], rows, device, cast)
            scalars = json.loads((folder / SCALARS).read_text())
            hollow = unflatten(tree.map_tensors(lambda t: None, rest), {}, scalars)
        # Of a damaged file, JSON can be nested too deeply or hold other types than were written.
        except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
            raise CheckpointError(f"{folder} does not hold this training state: {error}") from error
    return weights, pytree.tree_map_with_path(lambda path, leaf: tensors.get(pytree.keystr(path), leaf), hollow)


@attrs.frozen(eq=False)
class Opened(Generic[T]):
    """A state in a folder, whose tensors are read when they are asked for.

    Attributes:
        model: returns rows of a tensor of the model's file: by name, from the first to the one before the last.
        rest: the same for the rest of the state, by path.
        hollow: the rest of the state, with None for every tensor.
    """

    model: Callable[[str, int, int], Tensor]
    rest: Callable[[str, int, int], Tensor]
    hollow: T


def _either(frozen: Iterable[str]) -> frozenset[str]:
    """Returns the names of frozen parameters in both files of a state."""
    return frozenset(name for param in frozen for name in (param, f".params[{param!r}]"))


def open_state(
    folder: str | Path,
    model: Mapping[str, Tensor],
    rest: T,
    *,
    file: str = MODEL,
    gather: Gather = alone,
    frozen: Iterable[str] = (),
) -> Opened[T]:
    """Checks a state in ``folder`` as ``read_state`` does, and returns functions that read its tensors.

    Args:
        folder: where ``save`` wrote a state.
        model: the tensors that ``file`` must hold, on the meta device.
        rest: the structure of the rest, with whole tensors on the meta device.
        file: ``model.safetensors``, or PEFT's file.
        gather: returns the values of all ranks, by rank.
        frozen: names of parameters that are not trained; they may be read in another dtype than ``model`` has.

    Raises:
        CheckpointError: as ``read_state``.
    """
    folder, cpu, cast = Path(folder), torch.device("cpu"), _either(frozen)

    def none(count: int) -> tuple[int, int]:
        return 0, 0

    with agreed(gather):
        check_finished(folder)
        try:
            tensor_file.read(folder / file, model, none, cpu, cast)
            tensor_file.read(folder / TENSORS, flatten(rest)[0], none, cpu, cast)
            weights, others = (tensor_file.Slices(folder / name) for name in (file, TENSORS))
            scalars = json.loads((folder / SCALARS).read_text())
            hollow = unflatten(tree.map_tensors(lambda t: None, rest), {}, scalars)
        # Of a damaged file, JSON can be nested too deeply or hold other types than were written.
        except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
            raise CheckpointError(f"{folder} does not hold this training state: {error}") from error
    return Opened(weights.rows, others.rows, hollow)


def read_buffers(folder: str | Path, like: Buffers) -> Buffers:
    """Returns the buffers that ``save`` wrote, on the devices of ``like``; ``read_state`` checks the file."""
    if not like:
        return like
    model = tensor_file.Slices(Path(folder) / MODEL)
    rows = {name: model.rows(name, 0, len(b) if b.dim() else 0) for name, b in like.items()}
    return Buffers({name: t.to(like[name].device, like[name].dtype, copy=True) for name, t in rows.items()})


def check_finished(folder: str | Path) -> None:
    """Raises an error unless a save of a training state into ``folder`` was finished.

    Raises:
        CheckpointError: no save was finished there.
    """
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


def describe_model(folder: Path, skeleton: Skeleton, made_from: Path, base: FrozenBase | None = None) -> None:
    """Writes what belongs beside a model's weights: its config, its tokenizer and its adapters' settings.

    Args:
        folder: where to write.
        skeleton: the model.
        made_from: the model's own folder.
        base: the weights that the folder refers to; None if it holds all of them.
    """
    write_carried(skeleton.files, folder)
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
