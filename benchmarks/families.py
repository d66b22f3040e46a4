"""Which families of causal language models ``local`` computes right: log-probs and gradients beside transformers'.

For each name that transformers maps to a causal language model, a tiny model with random weights is saved as a
folder. The backend's log-probs, and the gradient of their sum, are compared with transformers' own forward of each
row by itself (eager attention, float64). The embedded engine then samples from the model, and its log-probs are
compared with the backend's.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from verl_fn.backends.hf.checks import kernels_for
from verl_fn.backends.hf.config import quiet, read_config, reason
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler.decoder import RowDecoder
from verl_fn.backends.vllm.arguments import check_version, prepare_environment
from verl_fn.state import Batch, Key, Sampling, pack, requests_for
from verl_fn.steps import aggregate, cross_entropy, sgd

from . import measure
from .families_page import BAR, NO_MODEL, REFUSED, RIGHT, WRONG
from .first_step_layout import Layout
from .tiny_models import SIZES, tiny_folder, vllm_sizes
from .together import free_port

# A parameter whose gradient is smaller, relative to the whole gradient, is compared as if it were as large: softmax
# ignores the bias of keys, so that its gradient is rounding.
NOISE = 1e-3
ROWS = ([5, 9, 13, 7, 11, 3, 8, 21, 40, 2], [4, 12, 6], [33, 17, 10, 19, 50, 28, 1], [60, 14, 61, 15])
# What Megatron-Bridge takes for granted of a family, as its released models have it, and sizes that its kernels take.
FOR_MEGATRON: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
    "olmoe": {"num_key_value_heads": 4},
    "gemma2": {"head_dim": 16},
    **{
        name: {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
}
PATIENCE = 240  # seconds that a family may take
# What processes that serve one family each have imported when they begin.
PRELOADED = ["verl_fn.benchmarks.families_vllm", "vllm.v1.engine.llm_engine"]
VLLM = "vllm"


@attrs.frozen(eq=False)
class Computed:
    """What is computed of a model.

    Attributes:
        how: the layout of rows of a backend, or the name of transformers' class.
        logprobs: of every token, zero at the first of each row.
        gradients: of minus their sum, whole, by name.
        weights: whole, by name.
    """

    how: str
    logprobs: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def batch_of(rows: Sequence[Sequence[int]]) -> Batch:
    """Returns rows whose tokens all count, but the first of each."""
    mask = [[0.0] + [1.0] * (len(row) - 1) for row in rows]
    return aggregate(Batch.from_rows([list(row) for row in rows], {"response_mask": mask}), "token-mean")


def many_rows() -> list[list[int]]:
    """Returns enough tokens that rounding in bf16 is about the same each time; it sends some to other experts."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 41, (32,), generator=generator).tolist()
    return [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def reference(folder: Path, batch: Batch, dtype: torch.dtype = torch.float64) -> Computed:
    """Returns what transformers' own forward of each row computes."""
    from transformers import AutoModelForCausalLM

    with quiet(), kernels_for("cpu", AutoModelForCausalLM, read_config(folder)):
        # Grouped products of experts have no float64.
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    logprobs = log_probs_of(model, batch)
    (-logprobs.sum()).backward()
    named = dict(model.named_parameters())
    grads = {name: p.grad for name, p in named.items() if p.grad is not None}
    return Computed(type(model).__name__, logprobs.detach(), grads, {name: p.detach() for name, p in named.items()})


def log_probs_of(model: Any, batch: Batch) -> Tensor:
    """Returns the log-prob of every token by transformers' forward of each row by itself; zero for the first."""
    found = []
    for row in batch.rows():
        own = model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found += [own.new_zeros(1), own.gather(1, row[1:, None])[:, 0]]
    return torch.cat(found)


def computed(backend: Any, batch: Batch) -> Computed:
    """Returns what a backend computes of its folder; all its ranks call it together."""

    def whole(value: Any) -> dict[str, Tensor]:
        named = backend.named(value) if hasattr(backend, "named") else value
        pairs = named.items() if isinstance(named, Mapping) else named
        return {name: t.detach().to("cpu", copy=True) for name, t in pairs}

    state = backend.load_pretrained()
    logprobs = backend.forward(state.params, batch, ["logprobs"]).logprobs.cpu()
    grads, _ = backend.forward_backward(state, batch, cross_entropy())
    count = float(batch["response_mask"].sum())
    gradients = {name: g * count for name, g in whole(grads).items()}
    return Computed("padded" if backend._built().padded else "packed", logprobs, gradients, whole(state.params))


def compared(found: Computed, expected: Computed, beside: Computed | None = None) -> dict[str, Any]:
    """Returns the errors of what a backend computes, and whether it is right.

    Args:
        found: of the backend.
        expected: transformers' own.
        beside: of ``local`` in the same dtype; then ``found`` may differ from it by three times as much as it differs
            from transformers' own.
    """
    own = expected if beside is None else beside
    result: dict[str, Any] = {"model": expected.how, "layout": found.how, **_errors(found, own)}
    bars = {"logprobs": BAR, "gradient": BAR}
    if beside is not None:
        of_local = _errors(beside, expected)
        bars = {name: 3 * of_local[name] for name in bars}
        result |= {f"{name}_of_local": of_local[name] for name in ("logprobs", "grad_norm", "gradient", "parameter")}
        result["logprobs_beside_transformers"] = _errors(found, expected)["logprobs"]
    result["weights"] = all(
        name in found.weights and torch.equal(found.weights[name], t.float()) for name, t in expected.weights.items()
    )
    right = result["weights"] and all(result[name] <= bar for name, bar in bars.items())
    return result | {"outcome": RIGHT if right else WRONG}


def compare(folder: Path, row_layout: str = "auto") -> dict[str, Any]:
    """Returns how ``local`` and the embedded engine compute a folder's model, beside transformers."""
    batch = batch_of(ROWS)
    expected = reference(folder, batch)
    backend = Local(folder, sgd(0.0), row_layout=row_layout, max_tokens=20)
    found = computed(backend, batch)
    result = compared(found, expected)
    if result["outcome"] == WRONG:
        result |= _beside_rounding(result, folder, batch, expected)
    state = backend.load_pretrained()
    sampler = Sampler(folder, slots=3)
    sampler.publish(0, backend.weights(state.params))
    asked = requests_for([list(ROWS[0][:4]), list(ROWS[1])], Sampling(6, n=2), Key.from_seed(1))
    drawn = pack(sampler.generate(asked, version=0))
    again = backend.forward(state.params, drawn, ["logprobs"]).logprobs
    result["sampled"] = float((again - drawn["rollout_log_probs"]).abs().max())
    result["cached"] = type(sampler.decoder) is not RowDecoder
    return result


def _beside_rounding(result: dict[str, Any], folder: Path, batch: Batch, expected: Computed) -> dict[str, Any]:
    """Returns the outcome, since linear attention of transformers' own is no more exact in fp32 on some CPUs."""
    rounded = _errors(reference(folder, batch, torch.float32), expected)["gradient"]
    right = result["weights"] and result["logprobs"] <= BAR and result["gradient"] <= max(BAR, 2 * rounded)
    return {"gradient_of_transformers": rounded, "outcome": RIGHT if right else WRONG}


def gradient_errors(found: Computed, expected: Computed) -> dict[str, float]:
    """Returns the error of each parameter's gradient, relative to its norm; infinite for a missing gradient."""
    own, grads = found.gradients, expected.gradients
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    errors = dict.fromkeys(sorted(grads.keys() - own.keys()), float("inf"))
    for name, g in own.items():
        theirs = grads.get(name, torch.zeros_like(g))
        errors[name] = float((g - theirs).norm() / torch.maximum(theirs.norm(), NOISE * norm))
    return errors


def logprob_error(found: Computed, expected: Computed) -> float:
    """Returns the largest difference of log-probs."""
    return float((found.logprobs - expected.logprobs)[expected.logprobs != 0].abs().max())


def _errors(found: Computed, expected: Computed) -> dict[str, Any]:
    norm, ours = (torch.stack([g.norm() for g in of.gradients.values()]).norm() for of in (expected, found))
    errors = gradient_errors(found, expected)
    # A comparison with NaN is false, so that NaN is the worst.
    parameter = functools.reduce(lambda worst, name: worst if errors[name] <= errors[worst] else name, errors)
    return {
        "logprobs": logprob_error(found, expected), "grad_norm": float((ours - norm).abs() / norm),
        "gradient": errors[parameter], "parameter": parameter,
    }  # fmt: skip


class Failed(RuntimeError):
    """Ranks failed; the message has the error of one, its causes, and the last frames of each."""


class Ranks:
    """The processes of a layout. They serve one family after the other until one of them fails or hangs.

    Args:
        count: how many there are.
        device: ``cpu`` or ``cuda``.
        once: each process serves one family, and makes the group of processes that it needs by itself.
    """

    def __init__(self, count: int, device: str, *, once: bool = False) -> None:
        self.count, self.device, self.once = count, device, once
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function of this module returns on the first rank.

        Raises:
            Failed: it failed somewhere; the message says where, and ends with the last frames.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            deadline = time.monotonic() + PATIENCE
            replies = []
            for pipe in self._pipes:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise Failed(f"no answer within {PATIENCE} seconds")
                replies.append(pipe.recv())
        except (EOFError, OSError) as error:
            self.end()
            raise Failed(f"a process ended: {error}") from error
        except Failed:
            self.end()
            raise
        failed = [reply for fine, reply in replies if not fine]
        if self.once:
            self.end()
        if failed:
            if "CUDA" in failed[0] or len(replies) > 1:
                # After an error of a kernel every later call fails, and a rank may still wait for another.
                self.end()
            raise Failed(failed[0])
        return replies[0][1]

    def end(self) -> None:
        """Ends the processes; the next call starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self.once else "spawn")
        if self.once:
            context.set_forkserver_preload(PRELOADED)
        port = free_port()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            args = rank, self.count, port, theirs, self.device, not self.once
            # What serves once may start processes, as engines do.
            process = context.Process(target=_serve, args=args, daemon=not self.once)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, size: int, port: int, pipe: Connection, device: str, group: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    if group:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    while True:
        function, args = pipe.recv()
        try:
            reply = True, function(*args)
        except BaseException as error:
            reply = False, _why(error)
        pipe.send(reply if rank == 0 or not reply[0] else (True, None))


def of_layout(folder: Path, text: str, device: str, rows: list[list[int]]) -> Computed:
    """Returns what a layout computes of a folder; all its ranks call it together."""
    batch = batch_of(rows)
    return computed(Layout.parse(text).make(folder, sgd(0.0), "lm", batch, device), batch)


def architectures() -> list[str]:
    """Returns the names of transformers' classes that Megatron-Bridge knows."""
    from verl_fn.backends.megatron.importing import load_bridge

    names: list[str] = load_bridge().list_supported_models()
    return names


def compare_layout(ranks: Ranks, layout: Layout, folder: Path) -> dict[str, Any]:
    """Returns how a layout computes a folder's model, beside transformers, and in bf16 beside ``local:bf16``."""
    half = layout.dtype == "bfloat16"
    rows = many_rows() if half else [list(row) for row in ROWS]
    found = ranks.call(of_layout, folder, layout.text, ranks.device, rows)
    beside = ranks.call(of_layout, folder, "local:bf16", ranks.device, rows) if half else None
    batch = batch_of(rows)
    expected = reference(folder, batch)
    result = compared(found, expected, beside)
    return (
        result if half or result["outcome"] == RIGHT else result | _beside_rounding(result, folder, batch, expected)
    )


def family(name: str, how: Callable[[Path], dict[str, Any]] = compare, own: Mapping[str, Any] | None = None) -> Any:
    """Returns the outcome of a family, also if it fails.

    Args:
        name: of the family.
        how: compares the model of a folder.
        own: fields of the tiny config.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny_folder(name, folder, **(own or {}))
        except Exception as error:
            return {"outcome": NO_MODEL, "why": reason(error)}
        return outcome(Path(folder), how)


def outcome(folder: Path, how: Callable[[Path], dict[str, Any]] = compare) -> dict[str, Any]:
    """Returns what ``how`` returns, or why a folder's model is refused."""
    try:
        return how(folder)
    except Exception as error:
        why = str(error) if isinstance(error, Failed) else reason(error)
        return {"outcome": REFUSED, "why": why.replace(f"{folder}: ", "").replace(f"{folder}/", "")}


def _why(error: BaseException | None) -> str:
    """Returns an error and its causes, each with the last frames."""
    parts = []
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
        parts.append(f"{type(error).__name__}: {' '.join(str(error).split())[:500]} [{places}]")
        error = error.__cause__ or error.__context__
    return " | from ".join(parts[:3])


def main(args: Sequence[str]) -> int:
    parser = measure.parser("families", (__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="families, such as qwen3; by default all that the backend can have")
    parser.add_argument(
        "--backend",
        default="local",
        metavar="LAYOUT",
        help="local, fsdp:2, megatron, megatron:bf16 and so on, as for bench first-step (default: %(default)s); or "
        "vllm, whose draws are compared with the trainer",
    )
    parser.add_argument("--model", metavar="DIR", help="a model folder of yours instead")
    parser.add_argument("--page", metavar="F", help="write a page of all results in benchmarks/results")
    options = parser.parse_args(args)
    if options.page:
        from . import families_page

        made = families_page.page(families_page.results_of(Path(__file__).parent / "results"))
        Path(options.page).write_text(made, encoding="utf-8")
        return 0
    try:
        how, own, known, end = _way(options.backend, options.device)
    except ValueError as error:
        parser.error(str(error))
    results: dict[str, Any] = {}
    for name in options.names or ([options.model] if options.model else known()):
        began = time.monotonic()
        results[name] = r = outcome(Path(name), how) if options.model else family(name, how, own(name))
        print(f"{name:24} {r['outcome']:8} {_about(r)} [{time.monotonic() - began:.1f} s]", flush=True)
        # After each: time on a GPU may be cut off.
        measure.write(options.json, "families", options.device, {"backend": options.backend, "results": results})
    print(", ".join(f"{count} {kind}" for kind, count in Counter(r["outcome"] for r in results.values()).items()))
    end()
    return int(any(r["outcome"] == WRONG for r in results.values()))


def _way(backend: str, device: str) -> tuple[Callable[[Path], dict[str, Any]], Any, Callable[[], list[str]], Any]:
    """Returns how a folder is compared, the fields of a family's config, its families, and what ends the processes.

    Raises:
        ValueError: there is no such backend.
    """
    if backend == VLLM:
        from . import families_vllm

        check_version()
        prepare_environment(device)
        ranks = Ranks(1, device, once=True)

        def how(folder: Path) -> dict[str, Any]:
            found: dict[str, Any] = ranks.call(families_vllm.sampled, folder, device)
            return found

        return how, vllm_sizes, _names, ranks.end
    layout = Layout.parse({"fsdp": "fsdp:2"}.get(backend, backend))
    if backend == "local":
        return compare, lambda name: {}, _names, lambda: None
    ranks = Ranks(layout.ranks, device)
    of_layout = functools.partial(compare_layout, ranks, layout)
    if layout.name != "megatron":
        return of_layout, lambda name: {}, _names, ranks.end
    return of_layout, lambda name: FOR_MEGATRON.get(name, {}), lambda: _names(ranks.call(architectures)), ranks.end


def _about(r: Mapping[str, Any]) -> str:
    """Returns the errors of a family, or why it is refused."""
    if "errors" in r:
        pairs = ", ".join(f"{ours:.1e} (trainer: {trainers:.1e})" for ours, trainers in r["errors"])
        return f"{r['dtype']} {pairs}, moved {r['moved']:.2f}"
    if "layout" not in r:
        return str(r["why"])
    about = f"{r['layout']:7} {r['logprobs']:.1e} {r['gradient']:.1e}"
    if "logprobs_of_local" in r:
        about += f" (local: {r['logprobs_of_local']:.1e} {r['gradient_of_local']:.1e})"
    if r["outcome"] == WRONG:
        about += f" {r['parameter']}, weights {'as they were' if r['weights'] else 'changed'}"
    return about


def _names(architectures: Collection[str] | None = None) -> list[str]:
    """Returns the names of all families, or of the ones with these classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [name for name, architecture in names.items() if architectures is None or architecture in architectures]
