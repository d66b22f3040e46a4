"""Tokens a second of a whole GRPO step, ours and verl's own trainer, and where the time goes.

Both train a Qwen2.5 shape with random weights on the same prompts, 8 responses of 512 tokens to each of 128 prompts,
with vLLM colocated on the GPU and the same share of its memory, micro-batches of at most 16,384 tokens and one update
a step. Ours is ``fsdp`` over Ray, its layers compiled; verl's trainer runs in its best configuration. Both have a
rank and an engine on each GPU; ``--checkpointing`` makes both compute every layer again.
Each run is a process of its own, one after the other. The time of a step is that between two lines of metrics, so it
has all that a trainer does between two steps; the phases are the ones that each trainer reports as ``timing_s/*``.
With ``--runs ours parts`` ours is compared with what verl's step is made of: generation by vLLM, and log-probs
and update by verl's engine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import measure, peer_verl_trainer, workload
from .step_parts import run_parts
from .step_run import RunFailed, watch
from .step_work import BUDGET, LR, MEMORY, Work, write_model, write_prompts

BARS = {"0.5b": 4.5, "1.5b": 2.5, "7b": 1.2}  # our tokens a second over verl's, by the shape
SHARE_BAR = 0.05  # of the step, for any of our phases that neither generates nor computes with the model
WORKING = ("gen", "old_log_prob", "update_actor")
WARM_UPS = 2
ENGINES = ("ours", "verl", "parts")
TIMING = "timing_s/"
START = "start/"  # what the first step waited for
# Between engine and trainer: about half the mean square difference of log-probs, and their mean difference in nats.
KL, GAP = "rollout_corr/k3_kl", "rollout/log_prob_diff_mean"

Step = dict[str, Any]


def our_command(
    work: Work, steps: int, folder: Path, rollout: str = "vllm", further: Sequence[str] = ()
) -> list[str]:
    """The command of our run; ``further`` settings come last."""
    gpu = str(work.device == "cuda").lower()
    dtype = "bfloat16" if work.device == "cuda" else "float32"
    settings = [
        f"trainer.dir={folder}", f"trainer.total_training_steps={steps}", "trainer.val_before_train=false",
        "trainer.save_freq=-1", f"model.path={work.model}", f'data.train_files=["{work.data}"]',
        f"data.train_batch_size={work.prompts}", f"data.max_prompt_length={work.prompt}",
        f"data.max_response_length={work.response}", "algorithm.name=grpo",
        f"algorithm.ppo_mini_batch_size={work.prompts}", 'reward.functions=["verl_fn.benchmarks.step_reward:score"]',
        "actor.strategy=fsdp", f"actor.dtype={dtype}", f"actor.ppo_max_token_len_per_gpu={BUDGET}",
        f"actor.optim.lr={LR}", "actor.fsdp_config.reshard_after_forward=false", f"ray.ranks={work.gpus}",
        f"rollout.engines={work.gpus}", f"actor.enable_gradient_checkpointing={str(work.checkpointing).lower()}",
        f"actor.fsdp_config.use_torch_compile={gpu}", f"rollout.name={rollout}", f"rollout.n={work.n}",
        f"rollout.slots={work.rows_of_engine}", f"rollout.dtype={dtype}", f"driver.device={work.device}",
        "driver.kind=ray", "driver.deterministic=false",
    ]  # fmt: skip
    if rollout == "vllm":
        settings += [
            f"rollout.gpu_memory_utilization={MEMORY}",
            f"rollout.engine_kwargs={{max_num_batched_tokens = {BUDGET}}}",
        ]
    # Only settings: the file of a config may be empty.
    return [sys.executable, "-m", "verl_fn.cli", "train", os.devnull, *settings, *further]


def run(
    engine: str,
    work: Work,
    steps: int,
    log: Path,
    seconds: float,
    rollout: str,
    peers: Mapping[str, str],
    further: Sequence[str] = (),
    place: str = "/tmp",
) -> list[Step]:
    """The steps of one run: ``seconds``, ``tokens``, ``phases`` in seconds, and the trainer's own ``reported`` time.

    Args:
        engine: one of ``ENGINES``.
        work: what a step does.
        steps: how many.
        log: where the output goes.
        seconds: the most time for it.
        rollout: our rollout engine.
        peers: variables of the processes that are not ours.
        further: settings of our run.
        place: the folder below which runs write.

    Raises:
        RunFailed: it did not get to its first step, or failed later.
    """
    # Short, since Ray's sockets lie below it; and gone afterwards with what killed processes leave there.
    with tempfile.TemporaryDirectory(prefix="s", dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if engine == "parts":
            return run_parts(work, steps, folder, log, seconds, peers)
        if engine == "ours":
            command = our_command(work, steps, folder / "run", rollout, further)
            file = folder / "run" / "metrics.jsonl"
            environment: dict[str, str] = {}
        else:
            command, file = peer_verl_trainer.command(work, steps, folder), peer_verl_trainer.metrics_file(folder)
            environment = {**peers, **peer_verl_trainer.environment(folder)}
        lines = watch(command, environment | {"RAY_TMPDIR": name}, file, log, steps, seconds)
    metrics = dict if engine == "ours" else peer_verl_trainer.metrics
    return [step_of(metrics(line["row"]), line) for line in lines]


def step_of(metrics: Mapping[str, Any], line: Mapping[str, Any]) -> Step:
    """What counts of a step, from its metrics.

    Example:
        >>> step_of({"perf/total_num_tokens": 6, "timing_s/gen": 2.0, "timing_s/step": 2.5}, {"seconds": 3.0})
        {'seconds': 3.0, 'tokens': 6, 'phases': {'gen': 2.0}, 'reported': 2.5}
    """
    timings = {name.removeprefix(TIMING): value for name, value in metrics.items() if name.startswith(TIMING)}
    # verl's names with a further slash are parts of a phase.
    phases = {name: value for name, value in timings.items() if "/" not in name}
    start = {name.removeprefix(START): value for name, value in timings.items() if name.startswith(START)}
    reported = phases.pop("step")
    tokens = metrics["perf/total_num_tokens"]
    step = {"seconds": line["seconds"], "tokens": tokens, "phases": phases, "reported": reported}
    gaps = {name: metrics[metric] for name, metric in (("kl", KL), ("gap", GAP)) if metric in metrics}
    return step | gaps | ({"start": start} if start else {})


def summary(runs: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Medians over the steps of all runs of an engine, without each run's warm-up steps.

    ``shares`` are shares of the whole step; ``other`` is what no phase has.
    """
    steps = [step for one in runs for step in (one[WARM_UPS:] or one[-1:])]
    seconds = statistics.median(step["seconds"] for step in steps)
    names = sorted({name for step in steps for name in step["phases"]})
    phases = {name: statistics.median(step["phases"].get(name, 0.0) for step in steps) for name in names}
    phases["other"] = statistics.median(step["seconds"] - sum(step["phases"].values()) for step in steps)
    return {
        "tokens_a_second": statistics.median(step["tokens"] / step["seconds"] for step in steps),
        "seconds": seconds, "reported_seconds": statistics.median(step["reported"] for step in steps),
        "phases": phases, "shares": {name: value / seconds for name, value in phases.items()},
        "largest_kl": max((step["kl"] for one in runs for step in one if "kl" in step), default=None),
        "largest_gap": max((step["gap"] for one in runs for step in one if "gap" in step), default=None),
        "steps": len(steps), "warm": all(len(one) > WARM_UPS for one in runs),
        "until_first_step": [one[0]["seconds"] for one in runs],
    }  # fmt: skip


def verdict(engines: Mapping[str, Mapping[str, Any]], bar: float) -> dict[str, Any]:
    """The ratio of the two and our large phases, as far as there are runs, and whether the bars are held."""
    result: dict[str, Any] = {"bar": bar}
    if "ours" in engines:
        shares = engines["ours"]["shares"]
        result["large_phases"] = sorted(n for n, share in shares.items() if n not in WORKING and share > SHARE_BAR)
        for other, name in (("verl", "ratio"), ("parts", "ratio_to_parts")):
            if other in engines:
                result[name] = engines["ours"]["tokens_a_second"] / engines[other]["tokens_a_second"]
    warm = all(of_engine["warm"] for of_engine in engines.values())
    result["held"] = warm and result.get("ratio", 0.0) >= bar and not result.get("large_phases")
    return result


def show(engines: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], result: Mapping[str, Any]) -> None:
    """Prints a table of the phases, and what the bars say."""
    for name, of_engine in engines.items():
        print(f"{name:<6}{of_engine['tokens_a_second']:>10,.0f} tok/s  step {of_engine['seconds']:.2f} s, by itself "
              f"{of_engine['reported_seconds']:.2f} s, {of_engine['steps']} steps"
              f"{'' if of_engine['warm'] else ', NOT WARM'}")  # fmt: skip
        for phase, seconds in sorted(of_engine["phases"].items(), key=lambda item: -item[1]):
            print(f"        {phase:<16}{seconds:>8.3f} s {of_engine['shares'][phase]:>7.1%}")
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    if "verl" in failed:
        print("--runs ours parts compares with vLLM by itself and verl's engine, phase by phase")
    if "large_phases" in result:
        print(f"our other phases above {SHARE_BAR:.0%}: {', '.join(result['large_phases']) or 'none'} (bar: none)")
    if "ratio" in result:
        print(f"ratio {result['ratio']:.3f} (bar {result['bar']})")
    if "ratio_to_parts" in result:
        print(f"ratio {result['ratio_to_parts']:.3f} to the parts, without all else that a trainer does (no bar)")
    print("held" if result["held"] else "MISSED", flush=True)


def _peers(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(path.resolve()), os.environ.get("PYTHONPATH"))))}


def _parsed(argv: Sequence[str]) -> Any:
    parser = measure.parser("step", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--runs", nargs="+", choices=ENGINES, default=["ours", "verl", "ours", "verl"])
    parser.add_argument(
        "--steps", type=measure.count, default=6, help=f"steps of each run, {WARM_UPS} of them to warm up"
    )
    parser.add_argument("--prompts", type=measure.count, default=128)
    parser.add_argument("--n", type=measure.count, default=8, help="responses to each prompt")
    parser.add_argument("--prompt", type=measure.count, default=128, help="tokens of a prompt")
    parser.add_argument("--response", type=measure.count, default=512, help="most tokens of a response")
    parser.add_argument("--gpus", type=measure.count, default=1)
    parser.add_argument("--checkpointing", action="store_true", help="compute every layer again in the backward pass")
    parser.add_argument("--rollout", choices=("sampler", "vllm"), default="vllm", help="our rollout engine")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of our run")
    parser.add_argument("--folder", default="/tmp", help="where runs write, with room for checkpoints; a short path")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all runs; each gets its share")
    parser.add_argument("--verl-path", type=Path, help="a folder that verl imports from first, such as flash-attn's")
    parser.add_argument("--logs", type=Path, help="keep the output of each run in this folder")
    args = parser.parse_args(argv)
    if {"verl", "parts"} & set(args.runs) and importlib.util.find_spec("verl") is None:
        parser.error("verl is not installed: install verl==0.9.1 with its trainer's packages and liger-kernel, vLLM "
                     "and flash-attn, or give --runs ours")  # fmt: skip
    if "parts" in args.runs and (args.gpus > 1 or args.checkpointing):
        parser.error("--runs parts is for one GPU without --checkpointing")
    return args


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench step``: a table for each trainer; exit status 1 where a bar is missed or a run failed."""
    args, began = _parsed(argv), time.monotonic()
    runs: dict[str, list[list[Step]]] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = args.logs or made / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model = write_model(made / "model", args.shape, args.device)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        data = write_prompts(made / "prompts.jsonl", args.prompts * args.steps, args.prompt)
        work = Work(model, data, args.device, args.prompts, args.n, args.prompt, args.response, args.gpus,
                    args.checkpointing)  # fmt: skip
        for i, engine in enumerate(args.runs):
            share = (args.limit - (time.monotonic() - began)) / (len(args.runs) - i)
            measure.say(f"run {i + 1} of {len(args.runs)}: {engine}, for at most {share:.0f} s")
            try:
                log = logs / f"{i + 1}_{engine}.log"
                steps = run(
                    engine, work, args.steps, log, share, args.rollout, _peers(args.verl_path), args.set, args.folder
                )
                runs.setdefault(engine, []).append(steps)
            except RunFailed as error:
                failed[engine] = str(error)
            # After each run, so that a limit from outside leaves what was measured until then.
            engines = {name: summary(of_engine) for name, of_engine in runs.items()}
            result = verdict(engines, BARS.get(args.shape, 1.0))
            measure.write(args.json, "step", args.device, {
                "share_bar": SHARE_BAR, "shape": args.shape, "prompts": args.prompts, "n": args.n,
                "prompt": args.prompt, "response": args.response, "budget": BUDGET, "memory": MEMORY,
                "gpus": args.gpus, "checkpointing": args.checkpointing,
                "cores": os.cpu_count(), "settings": args.set, "engines": engines, "failed": failed, **result,
                "runs": runs,
            })  # fmt: skip
    show(engines, failed, result)
    return 0 if result["held"] and not failed else 1
