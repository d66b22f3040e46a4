"""The levels: their titles, what they prove, their processes and their checks; and the features of level 4.

A feature passes only if its own code ran, as a counter in that code shows, and if its parameters changed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from torch import Tensor

from verl_fn.backends.hf.config import read_config
from verl_fn.backends.hf.vision import family_of
from verl_fn.config import Plan
from verl_fn.data.prepare import prepare_squares
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

from . import parity, training
from .subject import Request
from .verdict import Check, Outcome

REPLAYED, RATIO = "routers replayed recorded experts", "the ratio of the first update of each step is 1"
ROUTERS = "all routers changed"
COMPUTED, TOWER, TEXT = "Megatron computed features of images", "all of the tower changed", "all of the text changed"
RUNS = (training.COMPLETED, training.FINITE, training.AGREES)
OF_IMAGES, OF_EXPERTS = (*RUNS, COMPUTED, RATIO, TOWER, TEXT), (*RUNS, REPLAYED, RATIO, ROUTERS)
# Of the mean of old minus new log-probs, in nats. In bf16 both passes round alike, since their experts are the same.
SAME = 1e-5
PICTURES = (
    "algorithm.name=grpo", "rollout.n=4", "algorithm.ppo_mini_batch_size=8", "algorithm.use_kl_loss=false",
    "data.max_prompt_length=512", "data.max_response_length=10",
)  # fmt: skip
BLOCKED = {
    "vlm": "the model reads no images; name a folder of Qwen2.5-VL or Qwen3-VL with weights and an image processor, "
    "such as the small one that docs/images.md makes",
    "mtp": "the Megatron backend turns layers that predict several tokens off, so none of them ran",
    "qat": "no training backend here quantizes, so ModelOpt's code did not run",
    "": "the model has no experts, and no feature was named: add --features",
}


def features_of(request: Request) -> list[str]:
    """Returns the features to test: the user's, or experts if there are any; otherwise one empty name."""
    return list(request.features) or (["moe"] if request.experts else [""])


def blocked(feature: str) -> Outcome:
    """Returns why a feature cannot be tested."""
    if feature == "qat" and importlib.util.find_spec("modelopt") is None:
        return Outcome(blocked="ModelOpt is not installed (pip install nvidia-modelopt), so no weight was quantized")
    return Outcome(blocked=BLOCKED[feature])


def _watched(
    plan: Plan, say: Callable[[str], None], cls: type, method: str, wanted: Callable[..., bool]
) -> tuple[int, list[Check], dict[str, bool], dict[str, Tensor]]:
    """Trains, and counts the calls of a method that are wanted, judged by their arguments.

    Returns:
        the count, what every feature is checked for, which parameters changed, and the parameters before.
    """
    inner, calls, folder = getattr(cls, method), 0, Path(plan.trainer.dir)

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += wanted(*args)
        return inner(*args, **options)

    with mock.patch.object(cls, method, counting):
        train(plan, say)
    checks = [check for check in training.checks_of(folder, plan) if check.name in RUNS]
    before, after = (training.parameters(folder / f"checkpoints/step_{step}/actor") for step in (0, 2))
    return calls, checks, training.changed(before, after), before


def experts(request: Request, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Trains all parameters with the experts of the engine, one update a step."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

    plan = training.plan_of(request.alone(), folder, "actor.router_replay.mode=R3", "algorithm.ppo_mini_batch_size=8")
    replaying, count = (Action.REPLAY_FORWARD, Action.REPLAY_BACKWARD), request.experts
    calls, checks, moved, start = _watched(
        plan, say, RouterReplay, "get_replay_topk", lambda router, *rest: router.router_replay_action in replaying
    )
    # A router has a row for each expert; experts themselves are stacked.
    routers = {name: other for name, other in moved.items() if start[name].dim() == 2 and len(start[name]) == count
               and ("gate" in name or "router" in name)}  # fmt: skip
    here = ("level 4 replayed experts of the embedded engine on one rank, without Ray",) if request.ray else ()
    checks += [Check(REPLAYED, calls > 0, f"{calls} calls"), _ratio(folder), training.all_changed(ROUTERS, routers)]
    return Outcome(tuple(checks), limitations=here)


def _ratio(folder: Path) -> Check:
    gaps = [abs(row["actor/ppo_kl"]) + row["actor/pg_clipfrac"] for row in read_metrics(folder) if row["step"]]
    worst = max(gaps, default=float("inf"))
    return Check(RATIO, worst <= SAME, f"old minus new log-probs are {worst:.1e} nats, bar {SAME:.0e}")


def images(request: Request, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Trains all parameters by GRPO on questions about pictures, one update a step."""
    from verl_fn.backends.megatron.model import Sight

    config, alone = read_config(request.folder), request.alone()
    if family_of(config) is None:
        return blocked("vlm")
    if not request.data:
        prepare_squares(folder.with_name("squares"), rows={"train": 64, "test": 8})
        alone = attrs.evolve(alone, data=str(folder.with_name("squares")))
    plan = training.plan_of(alone, folder, *PICTURES)
    shown, checks, moved, _ = _watched(
        plan,
        say,
        Sight,
        "embedded",
        lambda sight, model, layout, rows: rows.images is not None and not rows.images.blank,
    )
    if all(check.held for check in checks if check.name != training.AGREES):
        training.require_signal(folder, request)
    # What is added behind the last layer, to tokens of images, reaches no token that was drawn.
    layers, deep = config.get_text_config().num_hidden_layers, "deepstack_visual_indexes"
    unread = [f"merger_list.{n}." for n in range(layers - 1, len(getattr(config.vision_config, deep, ())))]
    moved = {name: other for name, other in moved.items() if not any(part in name for part in unread)}
    tower = {name: other for name, other in moved.items() if ".visual." in name}
    here = ("level 4 showed images to the embedded engine on one rank, without Ray",) if request.ray else ()
    checks += [
        Check(COMPUTED, shown > 0, f"{shown} micro-batches"),
        _ratio(folder),
        training.all_changed(TOWER, tower),
        training.all_changed(TEXT, {name: other for name, other in moved.items() if name not in tower}),
    ]
    return Outcome(tuple(checks), limitations=here)


@attrs.frozen
class Level:
    """A level of coverage.

    Attributes:
        proves: what passing it shows.
        advice: where to look if it fails.
        parts: the processes that a request makes of it.
        required: the checks that it is defined by.
    """

    title: str
    proves: str
    advice: str
    parts: Callable[[Request], Sequence[str]]
    required: Callable[[Request], Sequence[str]]


def _with_cpus(name: str, layouts: Sequence[str], request: Request) -> list[str]:
    """Returns the processes of a level: layouts with more ranks than GPUs have one of their own, on CPUs."""
    more = parity.layouts_within(layouts, request, "cpu") if request.device == "cuda" else []
    return [name, *([f"{name}_on_cpu"] if more else [])]


LEVELS = {
    0: Level(
        "LoRA and DDP smoke",
        "the provider is imported, gets adapters, DDP and an optimizer, and finishes PPO steps with all roles",
        "if the model was not built, compare the parallel sizes that the provider is finalized with; if adapters "
        "failed, the names of target modules and the provider's path to Bridge's PEFT helpers",
        lambda request: ["level_0_model", "level_0"],
        lambda request: [*parity.NAMES, *training.WITH_LORA],
    ),
    1: Level(
        "save and resume",
        "checkpoints of all roles continue in every bit, and exports load elsewhere",
        "run level 0 by itself: if it passes, the model is built right and the mistake is in what is saved or loaded",
        lambda request: ["level_1", "level_1_resumed"],
        lambda request: training.RESUMING,
    ),
    2: Level(
        "parallel layouts",
        "the provider's settings stay right under tensor, pipeline, context, expert and sequence parallelism",
        "look at the fields that the provider derives from parallel sizes, and at the mapping of the parameter named",
        lambda request: _with_cpus("level_2", parity.stress_layouts(request), request),
        lambda request: [parity.name_of(text) for text in parity.stress_layouts(request)],
    ),
    3: Level(
        "Megatron-FSDP",
        "the same provider trains with Megatron-FSDP in the place of DDP",
        "if level 0 passes, look at what the provider assumes of wrapping and of flat buffers",
        lambda request: _with_cpus("level_3", parity.SHARDED, request),
        lambda request: [*training.WITHOUT_LORA, *(parity.name_of(text) for text in parity.SHARDED)],
    ),
    4: Level(
        "architecture",
        "the parts that text through a dense model does not reach ran, and learned",
        "look at what the provider sets for the feature, and at the mapping of its parameters",
        lambda request: [f"level_4_{name}".rstrip("_") for name in features_of(request)],
        lambda request: [
            *(OF_EXPERTS if "moe" in features_of(request) else ()),
            *(OF_IMAGES if "vlm" in features_of(request) else ()),
        ],
    ),
    5: Level(
        "learning signal",
        "metrics move as they should over a short run",
        "compare both curves in report.html: if local's is as flat, the task or the settings are to blame",
        lambda request: ["level_5_baseline", "level_5"],
        lambda request: training.LEARNING,
    ),
}


def ranks_of(request: Request, level: int) -> int:
    """Returns how many GPUs a level needs; layouts that need more run on CPUs."""
    return 1 if level == 2 else request.gpus
