"""The levels: their titles, what they prove, their processes and their checks; and the features of level 4.

A feature passes only if its own code ran, as a counter in that code shows, and if its parameters changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

from . import parity, training
from .subject import Request
from .verdict import Check, Outcome

REPLAYED, RATIO = "routers replayed recorded experts", "the ratio of the first update of each step is 1"
ROUTERS = "all routers changed"
OF_EXPERTS = (training.COMPLETED, training.FINITE, training.AGREES, REPLAYED, RATIO, ROUTERS)
# Of the mean of old minus new log-probs, in nats. In bf16 both passes round alike, since their experts are the same.
SAME = 1e-5
BLOCKED = {
    "vlm": "the Megatron backend refuses models with images, so no image was encoded; test them with Bridge's own "
    "conversion and inference tests",
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


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls in which one of Megatron's routers takes recorded experts, in the class of routers itself."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

    replaying = (Action.REPLAY_FORWARD, Action.REPLAY_BACKWARD)
    inner = RouterReplay.get_replay_topk
    found: Counter[str] = Counter()

    def counting(self: RouterReplay, *args: object, **options: object) -> object:
        found["calls"] += self.router_replay_action in replaying
        return inner(self, *args, **options)

    RouterReplay.get_replay_topk = counting
    try:
        yield found
    finally:
        RouterReplay.get_replay_topk = inner


def experts(request: Request, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Trains all parameters with the experts of the engine, one update a step."""
    plan = training.plan_of(request.alone(), folder, "actor.router_replay.mode=R3", "algorithm.ppo_mini_batch_size=8")
    with counted() as replays:
        train(plan, say)
    found = {check.name: check for check in training.checks_of(folder, plan)}
    before, after = (training.parameters(folder / f"checkpoints/step_{step}/actor") for step in (0, 2))
    moved = training.changed(before, after)
    count = request.experts
    # A router has a row for each expert; experts themselves are stacked.
    routers = {name: other for name, other in moved.items() if before[name].dim() == 2 and len(before[name]) == count
               and ("gate" in name or "router" in name)}  # fmt: skip
    gaps = [abs(row["actor/ppo_kl"]) + row["actor/pg_clipfrac"] for row in read_metrics(folder) if row["step"]]
    worst = max(gaps, default=float("inf"))
    here = ("level 4 replayed experts of the embedded engine on one rank, without Ray",) if request.ray else ()
    checks = (
        *(found[name] for name in (training.COMPLETED, training.FINITE, training.AGREES)),
        Check(REPLAYED, replays["calls"] > 0, f"{replays['calls']} calls"),
        Check(RATIO, worst <= SAME, f"old minus new log-probs are {worst:.1e} nats, bar {SAME:.0e}"),
        training.all_changed(ROUTERS, routers),
    )
    return Outcome(checks, limitations=here)


@attrs.frozen
class Level:
    """A level of coverage.

    Attributes:
        title: its name.
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
        lambda request: OF_EXPERTS if "moe" in features_of(request) else [],
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
