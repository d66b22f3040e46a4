"""Level 1: a run that was stopped and continued, beside one that was not; and what other libraries load of it.

The run is stopped after its first step and continued by another process. Learning rates are scheduled, so that a
state that lost its place in the schedule differs.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl_fn import build
from verl_fn.backends.checkpoint.export import export_adapter, export_model
from verl_fn.backends.checkpoint.state_folder import SCALARS
from verl_fn.backends.hf.config import LOCAL, quiet, read_config
from verl_fn.benchmarks.families import batch_of
from verl_fn.config import Plan
from verl_fn.driver.local import process_group
from verl_fn.runs import RunError
from verl_fn.runs.logs import TIMED, read_metrics
from verl_fn.runs.loop import train
from verl_fn.state import Batch

from .parity import rows_for
from .smoke import AGREE, LORA, kind_settings, plan_of
from .subject import Request
from .verdict import Check

STATE = "the resumed run equals the uninterrupted one in every bit"
METRICS = "so do the metrics of its last step"
MERGED, ADAPTER = "transformers loads the merged model", "PEFT loads the adapter"
NAMES = (STATE, METRICS, MERGED, ADAPTER)


def straight(request: Request, folder: Path, say: Callable[[str], None]) -> list[Check]:
    """Trains for two steps without a stop, and for the first step of the run that another process continues."""
    settings = kind_settings(LORA)
    train(plan_of(request, folder / "run", *settings), say)
    train(plan_of(request, folder / "stopped", *settings, "trainer.total_training_steps=1"), say)
    return []


def resumed(request: Request, folder: Path, other: Path, say: Callable[[str], None]) -> list[Check]:
    """Continues the stopped run, and compares it with the other one.

    Args:
        request: what is tested.
        folder: takes the exports.
        other: the folder of ``straight``.
        say: prints a line.

    Raises:
        RunError: there is no stopped run.
    """
    if not (other / "stopped/checkpoints/step_1").is_dir():
        raise RunError(f"{other} has no stopped run to continue")
    plan = plan_of(request, other / "stopped", *kind_settings(LORA))
    train(plan, say)
    whole, stopped = (other / name / "checkpoints/step_2" for name in ("run", "stopped"))
    checks = [_same_state(whole, stopped), _same_metrics(other)]
    here = plan_of(request.alone(), folder / "run", *kind_settings(LORA))
    with process_group(here, size=1):
        return [*checks, *exports(here, stopped / "actor", folder)]


def _same_state(whole: Path, stopped: Path) -> Check:
    """Compares two checkpoints of all roles, file by file."""
    kinds = ("*.safetensors", SCALARS)
    held = {file.relative_to(one) for one in (whole, stopped) for kind in kinds for file in one.glob(f"*/{kind}")}
    files = sorted(map(str, held))
    absent = [name for name in files if not ((whole / name).is_file() and (stopped / name).is_file())]
    if absent:
        return Check(STATE, False, f"{absent[0]} is missing")
    for name in files:
        if not filecmp.cmp(whole / name, stopped / name, shallow=False):
            return Check(STATE, False, f"{name} differs{_first_tensor(whole / name, stopped / name)}")
    saved = [json.loads((one / "checkpoint.json").read_text())["state"] for one in (whole, stopped)]
    if saved[0] != saved[1]:
        name = next(name for name in {**saved[0], **saved[1]} if saved[0].get(name) != saved[1].get(name))
        return Check(STATE, False, f"the state of the algorithm differs: {name}")
    return Check(STATE, True, f"{len(files)} files of actor and critic")


def _first_tensor(one: Path, other: Path) -> str:
    if one.suffix != ".safetensors":
        return ""
    with safe_open(one, "pt") as a, safe_open(other, "pt") as b:
        names, there = list(a.keys()), set(b.keys())
        for name in names:
            if name not in there or not torch.equal(a.get_tensor(name), b.get_tensor(name)):
                return f", first in {name}"
    return ""


def _same_metrics(folder: Path) -> Check:
    last = [read_metrics(folder / name)[-1] for name in ("run", "stopped")]
    names = [name for name in last[0] if not name.startswith(TIMED)]
    differing = [name for name in names if last[0][name] != last[1].get(name)]
    shown = ", ".join(f"{name} {last[0][name]} and {last[1].get(name)}" for name in differing[:2])
    return Check(METRICS, not differing and bool(names), shown or f"{len(names)} metrics")


def exports(plan: Plan, checkpoint: Path, folder: Path) -> list[Check]:
    """Exports a checkpoint, loads it with other libraries, and compares log-probs with Megatron's.

    Args:
        plan: of the run.
        checkpoint: of the actor.
        folder: takes the exports.
    """
    batch = batch_of(rows_for(read_config(plan.model).get_text_config().vocab_size))
    role = plan.roles["actor"]
    trainer: Any = build.trainer(role, plan.driver, build.device(plan.driver))
    expected = trainer.forward(trainer.restore(checkpoint).params, batch, ("logprobs",)).logprobs
    merged, adapter = folder / "merged", folder / "adapter"
    export_model(checkpoint, merged)
    export_adapter(checkpoint, adapter)
    return [
        _agrees(MERGED, logprobs(_model(merged), batch), expected, batch),
        _agrees(ADAPTER, logprobs(_adapted(plan.model, adapter), batch), expected, batch),
    ]


def _agrees(name: str, found: Tensor, expected: Tensor, batch: Batch) -> Check:
    gap = (found - expected.cpu())[batch["response_mask"].bool()].abs()
    worst = float(gap.max())
    return Check(name, worst <= AGREE, f"log-probs differ by {worst:.1e} nats, bar {AGREE:.0e}")


def _model(folder: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **LOCAL).eval()


def _adapted(base: str | Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(_model(base), str(adapter)).eval()


def logprobs(model: Any, batch: Batch) -> Tensor:
    """Returns the log-prob of every token by transformers' forward of each row by itself; zero for the first."""
    found = torch.zeros(batch.num_tokens)
    start = 0
    with torch.no_grad():
        for row in batch.rows():
            own = model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found[start + 1 : start + len(row)] = own.gather(1, row[1:, None])[:, 0]
            start += len(row)
    return found
