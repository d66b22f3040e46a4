"""The first step of a model on any list of backend layouts, beside ``local`` in fp32.

One state with non-zero moments, one ragged batch whose old log-probs are perturbed so that at least a fifth of the
tokens clip, and three losses, some of whose gradients exceed the bound of gradient clipping. A layout is
``local``, ``local:bf16``, ``fsdp:4,sp=2``, ``fsdp:2,place=cpu``, ``fsdp:2,lora=8``, ``megatron:tp=2,pp=2`` and so on:
the backend, its number of ranks (for ``megatron``, ``tp``, ``pp``, ``cp`` and ``dp`` give it), its dtype, and options
that its class takes; ``place`` moves the state first. Every rank is a process.
What LoRA makes is compared with ``local`` with the same adapters.

The applied update is compared twice: end to end, and from the reference's gradients, since a wrong optimizer step
hides behind a right gradient norm. Elements that differ in the last bit of a parameter count as equal there: norms
that were added up in another order flip a few, when they clip, and one flip in a small tensor is more than the bar.
The errors with these elements are in the JSON too. A PPO loss is near zero and has no relative error, so errors of
losses are relative to the sum of |weight x loss|, or of |output x slope of the loss| if that is more.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from verl_fn.algorithms.policy import loss_from
from verl_fn.backends.hf.config import read_config
from verl_fn.backends.hf.new_model import new_model
from verl_fn.config import ConfigError
from verl_fn.config.names import absolute, is_reference
from verl_fn.state import Batch, Grads, Key, Params
from verl_fn.steps import (
    Loss,
    Optimizer,
    adamw,
    chain,
    clip_by_global_norm,
    constant,
    cross_entropy,
    ppo_clip,
    value_clip,
)
from verl_fn.testing.compare import BARS, compare_numbers, loss_scale, missed_bars

from . import first_step_chart as chart
from . import measure
from .first_step_batch import MARGIN, ragged_batch, with_old
from .first_step_errors import compare_tensors, worst_gradient
from .first_step_layout import Layout
from .together import RanksFailed, run_together

CLIP = 0.3
LOSSES: dict[str, tuple[str, Callable[[], Loss]]] = {
    "sft": ("lm", cross_entropy),
    "ppo": ("lm", ppo_clip),
    "value": ("value", value_clip),
}
LEGEND = """A row for each loss: its value and the norm of its gradient, and how far they are from the reference's.
The next four are about the parameter that differs most. gradient: the error of its gradient; 1-cosine: 1 minus the
cosine of both gradients; update: the error of its change by the step; from ref.: of its change with the reference's
gradients.
2nd loss: error of the loss after the step. seconds: of forward_backward. -: there is no such number.
held: the layout keeps the bars of its dtype. bfloat16 has none for gradient and update, since rounding moves them.
Where a bar is missed, the parameter follows whose gradient differs most; --json has it for every row."""
COLUMNS = (
    ("loss", 10), ("grad norm", 10), ("loss", 9), ("grad norm", 10), ("gradient", 9), ("1-cosine", 9), ("update", 8),
    ("from ref.", 10), ("2nd loss", 9), ("seconds", 8),
)  # fmt: skip
HELP = (
    f"{', '.join(LOSSES)}, or yours: a Loss as FILE.py:NAME, or a function that makes one, 'FILE.py:NAME(bound=2)'; "
    "the batch has the fields of a run with a reference; by default %(default)s"
)
# Of the loss and the gradient norm of a layout in bf16 against ``local:bf16``.
BESIDE_BF16 = {"fsdp": 1e-3, "megatron": 2e-3}
REFERENCE, COMPARED = "reference", "compared"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},
    "experts": {
        "arch": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    "0.5b": {
        "arch": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 4096,
    },
}  # fmt: skip
# Of the three updates that make the state, and of the one that is compared. At 1e-3 a real size leaves the region
# where a step means anything: its gradients are then mostly rounding in bf16.
OWN = "own"  # the model of --model
RATES = {"tiny": 1e-3, "experts": 1e-3, "small": 1e-3, "0.5b": 1e-5, OWN: 1e-5}


def optimizer_of(shape: str) -> Optimizer:
    """The optimizer of all layouts: it clips."""
    return chain(clip_by_global_norm(CLIP), adamw(constant(RATES[shape]), weight_decay=0.01))


def _has_weights(model: Path) -> bool:
    return any(model.glob("*.safetensors"))


def prepare(folder: Path, shape: str, text: str, losses: Sequence[str], batch: Batch, device: str) -> None:
    """For a reference, its batch, and for each head a state with moments."""
    (folder / text).mkdir()
    for head in {loss_of(name)[0] for name in losses}:
        backend = Layout.parse(text).make(folder / "model", optimizer_of(shape), head, batch, device)
        pretrained = shape == OWN and _has_weights(folder / "model")
        state = backend.load_pretrained() if pretrained else backend.init(Key.from_seed(0))
        warm = cross_entropy() if head == "lm" else value_clip()
        noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
        data = batch.with_tokens(values=noise) if head == "value" else batch
        for _ in range(3):
            grads, _ = backend.forward_backward(state, data, warm)
            state, _ = backend.apply_update(state, grads)
        need = "values" if head == "value" else "logprobs"
        output = backend.forward(state.params, batch, [need]).by_name[need]
        batch = with_old(batch, head, output, noise)
        backend.save(state, folder / text / head)
    torch.save(batch, folder / text / "batch.pt")


def loss_of(name: str) -> tuple[str, Loss]:
    """Returns the head that a loss is for, and the loss: one of ``LOSSES``, or the user's own.

    Raises:
        ConfigError: there is no such loss.
    """
    if name in LOSSES:
        head, make = LOSSES[name]
        return head, make()
    named, options = _options(name)
    if not is_reference(named):
        raise ConfigError(f"--losses: {name!r} is not {', '.join(LOSSES)}, or a Loss of yours as FILE.py:NAME")
    options_are = "name a function that makes a loss with its options, as in 'mine.py:clipped(bound=0.2)'"
    loss = loss_from(named, options, "--losses", options_are)
    return "value" if "values" in loss.needs else "lm", loss


def _options(name: str) -> tuple[str, dict[str, Any]]:
    """Splits the options from a reference.

    Raises:
        ConfigError: they are not keywords with values.

    Example:
        >>> _options("mine.py:clipped(bound=0.2)"), _options("mine.py:plain")
        (('mine.py:clipped', {'bound': 0.2}), ('mine.py:plain', {}))
    """
    if not (found := re.fullmatch(r"(.*:\w+)\((.*)\)", name)):
        return name, {}
    try:
        call = ast.parse(f"f({found[2]})", mode="eval").body
        words = call.keywords if isinstance(call, ast.Call) and not call.args else ()
        options = {word.arg: ast.literal_eval(word.value) for word in words if word.arg is not None}
    except (SyntaxError, ValueError):
        options = {}
    if not options:
        raise ConfigError(f"--losses: {name}: write options as in 'mine.py:clipped(bound=0.2)'")
    return found[1], options


def _short(loss_name: str) -> str:
    """Returns what a table calls a loss, with its options.

    Example:
        >>> _short("losses/mine.py:clipped(bound=0.2)")
        'clipped(bound=0.2)'
    """
    named, _ = _options(loss_name)
    return named.rpartition(":")[2] + loss_name.removeprefix(named)


def _width(losses: Iterable[str]) -> int:
    """Returns the width of the first column, of losses and dtypes."""
    return 2 + max(len("bfloat16"), *(len(_short(loss)) for loss in losses))


def _result(folder: Path, number: int) -> Path:
    """Returns the file of a loss's numbers; losses may share a name."""
    return folder / f"loss_{number}.json"


def first_step(
    folder: Path, shape: str, layout: Layout, loss_name: str, device: str, wanted: Mapping[str, torch.Tensor] | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a layout makes of the first step; all its ranks run it.

    Args:
        folder: has the model, and the reference's batch and states.
        shape: of the model.
        layout: the layout.
        loss_name: a name of ``loss_of``.
        device: of the layout.
        wanted: what the reference made; None for the reference itself.

    Returns:
        Numbers; for the first rank the gradient and the updates, and the parameters that they begin with.
    """
    head, loss = loss_of(loss_name)
    held = folder / layout.reference
    batch: Batch = torch.load(held / "batch.pt", weights_only=False)
    backend = layout.make(folder / "model", optimizer_of(shape), head, batch, device)
    state = backend.restore(held / head)
    if (there := layout.options.get("place")) is not None:
        state = backend.place(state, params=there, optimizer=there)
    before = _whole(backend, state.params)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    grads, metrics = backend.forward_backward(state, batch, loss)
    result: dict[str, Any] = {"loss": metrics["loss"].value, "seconds": time.perf_counter() - began}
    gradient = _whole(backend, grads)
    tensors = {f"gradient.{n}": t for n, t in gradient.items()}
    reference = {n.partition(".")[2]: t for n, t in (wanted or tensors).items() if n.startswith("gradient.")}
    given = _as_given(backend, reference, state)

    def changed(new: Any) -> dict[str, torch.Tensor]:
        return {n: t - before[n] for n, t in _whole(backend, new.params).items() if n in gradient}

    from_reference, _ = backend.apply_update(state, given, donate=False)
    tensors |= {f"from_reference.{n}": t for n, t in changed(from_reference).items()}
    del from_reference, given
    result["scale"] = loss_scale(loss, backend.forward(state.params, batch, loss.needs), batch)
    state, updated = backend.apply_update(state, grads)
    result |= {"grad_norm": updated["grad_norm"].value, "copies": updated["perf/residency_copies"].value}
    tensors |= {f"update.{n}": t for n, t in changed(state).items()}
    result["second_loss"] = backend.forward_backward(state, batch, loss)[1]["loss"].value
    result["clipped"] = metrics["actor/pg_clipfrac"].value if "actor/pg_clipfrac" in metrics else None
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result, tensors, before


def _whole(backend: Any, value: Params | Grads) -> dict[str, torch.Tensor]:
    """Copies of the whole tensors, on the first rank's CPU; all ranks gather them together, one after the other."""
    named = backend.named(value)
    pairs = named.items() if isinstance(named, Mapping) else named
    first = os.environ.get("RANK", "0") == "0"
    copies = ((n, t.detach().to("cpu", copy=True).contiguous() if first else t) for n, t in pairs)
    return {n: t for n, t in copies if first}


def _as_given(backend: Any, gradient: dict[str, torch.Tensor], state: Any) -> Grads:
    """The reference's gradients in the backend's own layout."""
    if hasattr(backend, "from_named"):
        return Grads(backend.from_named(gradient))
    shard = backend.layout.shard if hasattr(backend, "layout") else lambda t, device: t.to(device, copy=True)
    return Grads({n: shard(gradient[n], state.params[n].device) for n in state.params.trained()})


def run_layout(
    folder: Path,
    shape: str,
    text: str,
    losses: Sequence[str],
    device: str,
    role: str = COMPARED,
    logs: Path | None = None,
) -> list[dict[str, Any]]:
    """Start a layout's ranks, wait, and read what the first one wrote, for each loss.

    Args:
        folder: has the model, and the reference's batch and states.
        shape: of the model.
        text: the layout.
        losses: names of ``loss_of``.
        device: of the ranks.
        role: ``REFERENCE`` keeps gradients and updates in the folder; ``COMPARED`` adds their errors to the numbers.
        logs: the folder in which the output of each rank stays; by default it does not.

    Raises:
        RanksFailed: a rank failed; its own output is in the message, and the other ranks are ended.
    """
    layout = Layout.parse(text)
    measure.say(f"{text}{', the reference' if role == REFERENCE else ''}: ranks: {layout.ranks}")
    command = [sys.executable, "-m", "verl_fn.benchmarks.first_step", str(folder), shape, text, device, role, *losses]
    files = [_result(folder, number) for number in range(len(losses))]
    for file in files:
        file.unlink(missing_ok=True)
    run_together(command, layout.ranks, text, logs)
    return [json.loads(file.read_text()) for file in files]


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench first-step``: a table; exit status 1 where a bar is missed or a layout failed."""
    parser = measure.parser("first-step", __doc__)
    parser.add_argument("--layouts", nargs="+", default=["local", "fsdp:2", "fsdp:2,sp=2"])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), metavar="LOSS", help=HELP)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny", help="of a model with random weights")
    parser.add_argument("--model", metavar="FOLDER", help="a model folder in its place, such as one of a new family")
    parser.add_argument("--rows", type=measure.count, default=24)
    parser.add_argument("--longest", type=measure.count, default=64)
    parser.add_argument("--png", metavar="F", help="also draw the errors")
    args = parser.parse_args(argv)
    if args.longest < 4:
        parser.error("--longest must be at least 4")
    if args.model is not None and not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model} is no model folder: it has no config.json")
    args.losses = [absolute(name, Path.cwd()) for name in args.losses]
    for name in args.losses:
        loss_of(name)
    try:
        layouts = [Layout.parse(text) for text in args.layouts]
    except ValueError as error:
        parser.error(str(error))
    results: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _place_model(folder / "model", args)
        _check_longest(folder / "model", args.longest)
        for reference in dict.fromkeys(layout.reference for layout in layouts):
            compared = [one for one in layouts if one.reference == reference]
            try:
                wanted = _reference(folder, args, reference, compared)
            except RanksFailed as error:
                cause = _told(f"{reference}, the reference", error)
                failed |= dict.fromkeys((one.text for one in compared), f"the reference {reference}: {cause}")
                continue
            bf16: dict[str, dict[str, Any]] = {}
            for layout in compared:
                try:
                    measured = run_layout(folder, args.shape, layout.text, args.losses, args.device)
                except RanksFailed as error:
                    failed[layout.text] = _told(layout.text, error)
                    continue
                print(layout.text)
                for loss, ours in zip(args.losses, measured, strict=True):
                    results.append(_row(layout, loss, ours, wanted[loss], bf16.get(loss), _width(args.losses)))
                if layout.is_local_bf16:
                    bf16 = dict(zip(args.losses, measured, strict=True))
    about = {
        "lr": RATES[args.shape], "clip": CLIP, "shape": args.shape, "model": args.model, "rows": args.rows,
        "margin": MARGIN, "bars": BARS, "bars_beside_local_bf16": BESIDE_BF16,
    }  # fmt: skip
    measure.write(args.json, "first-step", args.device, {**about, "results": results, "failed": failed})
    if args.png:
        chart.draw(results, BARS, {layout.text: layout.dtype for layout in layouts}, Path(args.png))
    return 1 if failed or any(r["missed"] for r in results) else 0


def _told(layout: str, error: RanksFailed) -> str:
    """Prints what the ranks of a layout wrote, and prints and returns why they failed."""
    print(error, file=sys.stderr)
    print(f"{layout}: FAILED {error.cause}", flush=True)
    return error.cause


def _place_model(place: Path, args: Any) -> None:
    """Makes the model of a shape, or links the user's; says if that one gets random weights."""
    if args.model is None:
        new_model(place, chars="".join(map(chr, range(33, 93))), **SHAPES[args.shape])
        return
    args.shape = OWN
    place.symlink_to(Path(args.model).resolve())
    if not _has_weights(place):
        print(f"{args.model} has no *.safetensors, so the weights are random")


def _check_longest(model: Path, longest: int) -> None:
    """Raises ConfigError for rows that are longer than the model's."""
    positions = getattr(read_config(model).get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ConfigError(f"--longest {longest}: the model's rows have at most {positions} tokens; lower it")


def _reference(folder: Path, args: Any, reference: str, layouts: Sequence[Layout]) -> dict[str, dict[str, Any]]:
    """Makes what layouts are compared with, prints the head of their table, and returns the numbers by loss."""
    measure.say(f"{reference}: making a state with moments")
    tokens = min(60, read_config(folder / "model").get_text_config().vocab_size)
    batch = ragged_batch(tokens, args.rows, args.longest)
    prepare(folder, args.shape, reference, args.losses, batch, args.device)
    numbers = run_layout(folder, args.shape, reference, args.losses, args.device, REFERENCE)
    wanted = dict(zip(args.losses, numbers, strict=True))
    _check_hard(wanted)
    _print_header(reference, wanted, dict.fromkeys(layout.dtype for layout in layouts))
    return wanted


def _check_hard(wanted: Mapping[str, dict[str, Any]]) -> None:
    """Refuse a batch that does not exercise what is compared."""
    if "ppo" in wanted and wanted["ppo"]["clipped"] < 0.2:
        raise RuntimeError(f"only {wanted['ppo']['clipped']:.2f} of the tokens clip: the batch is too tame")
    norms = {loss: result["grad_norm"] for loss, result in wanted.items()}
    if len(norms) == len(LOSSES) and max(norms.values()) <= CLIP:
        raise RuntimeError(f"no gradient is longer than {CLIP}, to which it would be clipped: {norms}")


def _print_header(reference: str, wanted: Mapping[str, dict[str, Any]], dtypes: Iterable[str]) -> None:
    """Prints what the columns are, the table's header, the bars of these dtypes, and what the reference made."""
    named = _width(wanted)
    print(f"{LEGEND}\n\n{'':{named}}{'values':>20}  relative errors against {reference} in fp32")
    print(_line("", named, [name for name, _ in COLUMNS]))
    print("bars")
    for dtype in dtypes:
        loss, norm, gradient, update = (
            f"{BARS[dtype][kind]:.0e}" if kind in BARS[dtype] else "-" for kind in BARS["float32"]
        )
        print(_line(dtype, named, ["-", "-", loss, norm, gradient, "-", "-", update, "-", "-"]))
    print(f"{reference}, the reference")
    for loss, result in wanted.items():
        cells = [f"{result['loss']:.4f}", f"{result['grad_norm']:.4f}", *"-" * 7, f"{result['seconds']:.2f}"]
        print(_line(_short(loss), named, cells), flush=True)


def _line(name: str, named: int, cells: Iterable[str]) -> str:
    """Returns a line of the table; its first column has ``named`` characters."""
    return f"  {name:{named - 2}}" + "".join(f"{cell:>{w}}" for cell, (_, w) in zip(cells, COLUMNS, strict=True))


def _row(
    layout: Layout, loss: str, result: dict[str, Any], wanted: dict[str, Any], bf16: dict[str, Any] | None, named: int
) -> dict[str, Any]:
    """Returns a result, and prints it; ``bf16`` is the result of ``local:bf16``, if it came before."""
    errors = compare_numbers(result, wanted) | result.pop("errors")
    missed = missed_bars(errors, BARS[layout.dtype])
    if bf16 is not None and layout.dtype == "bfloat16":
        beside = compare_numbers(result, bf16)
        errors |= {f"{name}_beside_local_bf16": beside[name] for name in ("loss", "grad_norm")}
        bar = BESIDE_BF16.get(layout.name, 0.0)
        missed += [k for k, error in errors.items() if k.endswith("_bf16") and not error <= bar]
    kinds = ("loss", "grad_norm", "gradient", "1-cosine", "update", "update_from_reference", "second_loss")
    shown = (f"{(errors | {'1-cosine': 1 - errors['cosine']})[kind]:.1e}" for kind in kinds)
    cells = [f"{result['loss']:.4f}", f"{result['grad_norm']:.4f}", *shown, f"{result['seconds']:.2f}"]
    line = _line(_short(loss), named, cells)
    why = f"MISSED\n    missed: {', '.join(missed)}; worst parameter: {result.get('worst') or '-'}"
    print(f"{line}  {why if missed else 'held'}", flush=True)
    numbers = {k: v for k, v in result.items() if k != "scale"}
    return {"layout": layout.text, "loss": loss, "errors": errors, "found": numbers, "missed": missed}


def rank_main(arguments: Sequence[str]) -> None:
    """One rank of one layout."""
    name, shape, text, device, role, *losses = arguments
    folder, layout, rank = Path(name), Layout.parse(text), int(os.environ["RANK"])
    # A share of the cores; one thread on small machines, whose tests run side by side.
    share = len(os.sched_getaffinity(0)) // max(4, layout.ranks)
    torch.set_num_threads(max(1, share) if device == "cpu" else 1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if layout.name != "local":
        import torch.distributed as dist

        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    for number, loss in enumerate(losses):
        kept = _result(folder / layout.reference, number).with_suffix(".safetensors")
        wanted = None if role == REFERENCE else load_file(kept)
        result, tensors, before = first_step(folder, shape, layout, loss, device, wanted)
        if rank == 0 and wanted is None:
            save_file(tensors, kept)
        elif rank == 0 and wanted is not None:
            result["errors"] = compare_tensors(tensors, wanted, before, device)
            result["worst"] = worst_gradient(tensors, wanted, device)
        if rank == 0:
            _result(folder, number).write_text(json.dumps(result))
    for module in ("megatron.core", "megatron.bridge"):
        if module in sys.modules:
            print(module, sys.modules[module].__file__)
    if layout.name != "local":
        dist.barrier()
        dist.destroy_process_group()
    # A process group's threads may still run; there is nothing left to do for them.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    rank_main(sys.argv[1:])
