"""The levels: their titles, what they prove, their processes, and the checks that each is defined by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from . import features, layouts, learning, parity, resuming, smoke
from .subject import Request


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


def _stress_parts(request: Request) -> list[str]:
    """Returns the processes of level 2: layouts with more ranks than GPUs have one of their own, on CPUs."""
    more = layouts.within(layouts.stress(request), request, "cpu") if request.device == "cuda" else []
    return ["level_2", *(["level_2_on_cpu"] if more else [])]


LEVELS = {
    0: Level(
        "LoRA and DDP smoke",
        "the provider is imported, gets adapters, DDP and an optimizer, and finishes PPO steps with all roles",
        "if the model was not built, compare the parallel sizes that the provider is finalized with; if adapters "
        "failed, the names of target modules and the provider's path to Bridge's PEFT helpers",
        lambda request: ["level_0_model", "level_0"],
        lambda request: [*parity.NAMES, *smoke.WITH_LORA],
    ),
    1: Level(
        "save and resume",
        "checkpoints of all roles continue in every bit, and exports load elsewhere",
        "run level 0 by itself: if it passes, the model is built right and the mistake is in what is saved or loaded",
        lambda request: ["level_1", "level_1_resumed"],
        lambda request: resuming.NAMES,
    ),
    2: Level(
        "parallel layouts",
        "the provider's settings stay right under tensor, pipeline, context, expert and sequence parallelism",
        "look at the fields that the provider derives from parallel sizes, and at the mapping of the parameter named",
        _stress_parts,
        lambda request: [layouts.name_of(text) for text in layouts.stress(request)],
    ),
    3: Level(
        "Megatron-FSDP",
        "the same provider trains with Megatron-FSDP in the place of DDP",
        "if level 0 passes, look at what the provider assumes of wrapping and of flat buffers",
        lambda request: ["level_3"],
        lambda request: [*smoke.WITHOUT_LORA, *(layouts.name_of(text) for text in layouts.SHARDED)],
    ),
    4: Level(
        "architecture",
        "the parts that text through a dense model does not reach ran, and learned",
        "look at what the provider sets for the feature, and at the mapping of its parameters",
        lambda request: [f"level_4_{name}".rstrip("_") for name in features.named(request)],
        lambda request: features.OF_EXPERTS if "moe" in features.named(request) else [],
    ),
    5: Level(
        "learning signal",
        "metrics move as they should over a short run",
        "compare both curves in report.html: if local's is as flat, the task or the settings are to blame",
        lambda request: ["level_5_baseline", "level_5"],
        lambda request: learning.NAMES,
    ),
}


def ranks_of(request: Request, level: int) -> int:
    """Returns how many GPUs a level needs; layouts that need more run on CPUs."""
    return 1 if level == 2 else request.gpus
