"""Level 4: parts of an architecture that text through a dense model does not reach.

A feature passes only if its own code ran, as a counter in that code shows, and if its parameters changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from verl_fn.backends.hf.config import read_config
from verl_fn.runs.logs import read_metrics
from verl_fn.runs.loop import train

from . import smoke
from .subject import Request, experts_of
from .verdict import Check, Outcome

REPLAYED, RATIO = "routers replayed recorded experts", "the ratio of the first update of each step is 1"
ROUTERS = "all routers changed"
OF_EXPERTS = (smoke.COMPLETED, smoke.FINITE, smoke.AGREES, REPLAYED, RATIO, ROUTERS)
# Of the mean of old minus new log-probs, in nats. In bf16 both passes round alike, since their experts are the same.
SAME = 1e-5
BLOCKED = {
    "vlm": "models with images are refused by all training backends here, so no image was encoded; test them with "
    "Bridge's own conversion and inference tests",
    "mtp": "the Megatron backend turns layers that predict several tokens off, so none of them ran",
    "qat": "no training backend here quantizes, so ModelOpt's code did not run",
    "": "the model has no experts, and no feature was named: add --features",
}


def named(request: Request) -> list[str]:
    """Returns the features to test: the user's, or experts if there are any; otherwise one empty name."""
    return list(request.features) or (["moe"] if request.has_experts else [""])


def blocked(feature: str) -> Outcome:
    """Returns why a feature cannot be tested."""
    if feature == "qat" and importlib.util.find_spec("modelopt") is None:
        return Outcome(blocked="ModelOpt is not installed (pip install nvidia-modelopt), so no weight was quantized")
    return Outcome(blocked=BLOCKED[feature])


@attrs.define
class Replays:
    """Counts the calls in which one of Megatron's routers took recorded experts."""

    count: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Replays]:
    """Counts in the class of Megatron's routers itself."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

    replaying = (Action.REPLAY_FORWARD, Action.REPLAY_BACKWARD)
    found, inner = Replays(), RouterReplay.get_replay_topk

    def counting(self: RouterReplay, *args: object, **options: object) -> object:
        found.count += self.router_replay_action in replaying
        return inner(self, *args, **options)

    RouterReplay.get_replay_topk = counting
    try:
        yield found
    finally:
        RouterReplay.get_replay_topk = inner


def experts(request: Request, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Trains all parameters with the experts of the engine, one update a step.

    Args:
        request: what is tested.
        folder: of the run.
        say: prints a line.
    """
    plan = smoke.plan_of(request.alone(), folder, "actor.router_replay.mode=R3", "algorithm.ppo_mini_batch_size=8")
    with counted() as replays:
        train(plan, say)
    found = {check.name: check for check in smoke.checks_of(folder, plan)}
    before, after = (smoke.parameters(folder / f"checkpoints/step_{step}/actor") for step in (0, 2))
    moved = smoke.changed(before, after)
    count = experts_of(read_config(request.folder))
    # A router has a row for each expert; experts themselves are stacked.
    routers = {name: other for name, other in moved.items() if before[name].dim() == 2 and len(before[name]) == count
               and ("gate" in name or "router" in name)}  # fmt: skip
    gaps = [abs(row["actor/ppo_kl"]) + row["actor/pg_clipfrac"] for row in read_metrics(folder) if row["step"]]
    worst = max(gaps, default=float("inf"))
    here = ("level 4 replayed experts of the embedded engine on one rank, without Ray",) if request.ray else ()
    checks = (
        *(found[name] for name in (smoke.COMPLETED, smoke.FINITE, smoke.AGREES)),
        Check(REPLAYED, replays.count > 0, f"{replays.count} calls"),
        Check(RATIO, worst <= SAME, f"old minus new log-probs are {worst:.1e} nats, bar {SAME:.0e}"),
        smoke.all_changed(ROUTERS, routers),
    )
    return Outcome(checks, limitations=here)
