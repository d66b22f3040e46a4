"""The parts of a step that verl's trainer cannot do without, each by itself: vLLM's generation and verl's engine.

They are what ``step`` compares with where verl's trainer does not run. ``python -m verl_fn.benchmarks.step_parts`` is
one part in a process of its own; it writes a line with the seconds of each phase after every round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from .step_run import watch
from .step_work import BUDGET, MEMORY, Work
from .together import free_port


def generation(work: Work) -> Iterator[dict[str, float]]:
    """Seconds of each round in which vLLM by itself draws all responses of a step, with their log-probs."""
    from verl_fn.backends.vllm.arguments import graph_arguments, prepare_environment

    prepare_environment(work.device)
    from vllm import LLM, SamplingParams

    if work.device == "cuda":
        of_device = {"gpu_memory_utilization": MEMORY, **graph_arguments(work.rows)}
    else:
        of_device = {"enforce_eager": True}
    engine = LLM(
        str(work.model), skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=work.rows,
        max_model_len=work.prompt + work.response, max_num_batched_tokens=max(BUDGET, work.prompt + work.response),
        generation_config="vllm", logprobs_mode="processed_logprobs", **of_device,
    )  # fmt: skip
    settings = SamplingParams(n=work.n, max_tokens=work.response, ignore_eos=True, detokenize=False, logprobs=0)
    number = 0
    while True:
        # Each round has other prompts, since the cache of prefixes has the last round's.
        number += 1
        prompts = [{"prompt_token_ids": ids} for ids in work.random_rows(work.prompts, work.prompt, number)]
        yield {"gen": seconds_of(engine.generate, prompts, settings, use_tqdm=False)}


def training(work: Work) -> Iterator[dict[str, float]]:
    """Seconds of verl's engine for the log-probs with entropy and for the update of a step, in each round."""
    from .peer_verl import Verl

    port = free_port()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    rows = work.random_rows(work.rows, work.prompt + work.response, 0)
    engine = Verl(str(work.model), rows, work.prompt, checkpointing=False, device=work.device)
    while True:
        yield {"old_log_prob": seconds_of(engine.logprobs), "update_actor": seconds_of(engine.update)}


PARTS: dict[str, Callable[[Work], Iterator[dict[str, float]]]] = {"generation": generation, "training": training}


def seconds_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Seconds of a call whose result lies on the CPU."""
    began = time.perf_counter()
    call(*args, **kwargs)
    return time.perf_counter() - began


def run_parts(
    work: Work, rounds: int, folder: Path, log: Path, seconds: float, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Rounds of all parts, as steps: ``seconds``, ``tokens``, ``phases`` and ``reported``.

    Raises:
        RunFailed: a part failed.
    """
    fields = json.dumps(attrs.asdict(work), default=str)
    phases: list[dict[str, float]] = [{} for _ in range(rounds)]
    for name in PARTS:
        file = folder / name
        command = [sys.executable, "-m", "verl_fn.benchmarks.step_parts", name, fields, str(file)]
        done = watch(
            command, environment, file, log.with_name(f"{log.stem}_{name}.log"), rounds, seconds / len(PARTS)
        )
        for of_round, line in zip(phases, done, strict=False):
            of_round |= line["row"]
        phases = phases[: len(done)]
    tokens = work.rows * (work.prompt + work.response)
    return [{"seconds": sum(p.values()), "tokens": tokens, "phases": p, "reported": sum(p.values())} for p in phases]


def work_of(fields: Mapping[str, Any]) -> Work:
    """The work that was written as JSON."""
    return Work(**{**fields, "model": Path(fields["model"]), "data": Path(fields["data"])})


if __name__ == "__main__":
    part, described, lines = sys.argv[1:]
    for row in PARTS[part](work_of(json.loads(described))):
        with open(lines, "a") as file:
            print(json.dumps(row), file=file)
