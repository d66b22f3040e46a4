"""Our rollout engines against vLLM by itself at its best, and several engines against one.

``verl-fn bench rollout`` compares tokens a second of an engine of ours with ``vllm.LLM.generate``: its core in a
process of its own, asynchronous scheduling, no log-probs. Both have random weights of the same shape, the same
prompts and lengths, each in a process of its own on the same GPU, and take turns. With ``--engines 1 2``, so many
engines over Ray, each on a GPU of its own, answer the same number of prompts each; their tokens a second a GPU are
compared with one engine's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from verl_fn.backends.protocol import Sampling
from verl_fn.config.schema import DriverConfig, RayConfig
from verl_fn.state import Key, Request, requests_for

from . import measure, workload

# Of vLLM by itself, by engine and shape.
RAW_BARS = {"vllm": {}, "sampler": {"0.5b": 2.5, "1.5b": 2.0, "7b": 1.2}}
RAW_BAR, HEAVY_BAR, ENGINES_BAR = 0.95, 1.5, 0.95
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 512
SHORTEST, LONGEST = 32, 2048
MEMORY = 0.4


@attrs.frozen
class Work:
    """What both engines answer: ``prompts`` random prompts with ``n`` responses each.

    Attributes:
        heavy: the lengths of responses have a heavy tail, from ``SHORTEST`` to ``LONGEST`` tokens, and are equal for
            the responses of a prompt; otherwise all have ``RESPONSE_TOKENS``.
    """

    shape: str
    prompts: int
    n: int
    heavy: bool

    @property
    def rows(self) -> int:
        """The number of responses."""
        return self.prompts * self.n

    @property
    def lengths(self) -> list[int]:
        """The tokens of each prompt's responses; a Pareto distribution with exponent 1 where they differ."""
        if not self.heavy:
            return [RESPONSE_TOKENS] * self.prompts
        places = (np.arange(self.prompts) + 0.5) / self.prompts
        lengths = np.minimum(SHORTEST / places, LONGEST).astype(int)
        return np.random.RandomState(0).permutation(lengths).tolist()

    @property
    def longest(self) -> int:
        """The most tokens of a row."""
        return PROMPT_TOKENS + max(self.lengths)

    def requests(self, first: int = 0) -> list[Request]:
        """Requests for random prompts; answers of random weights hardly ever end before their limit."""
        generator = torch.Generator().manual_seed(first)
        vocab = workload.vocabulary(self.shape)
        tokens = torch.randint(3, vocab, (self.prompts, PROMPT_TOKENS), generator=generator).tolist()
        requests = requests_for(tokens, Sampling(1, n=self.n), Key.from_seed(0), range(first, first + self.prompts))
        return [
            attrs.evolve(request, sampling=attrs.evolve(request.sampling, max_tokens=length))
            for request, length in zip(requests, self.lengths, strict=True)
        ]


def memory(folder: str, work: Work) -> dict[str, Any]:
    """The arguments of both engines' memory: a cache with room for all rows, whatever the other engine takes."""
    from verl_fn.backends.hf.config import read_config
    from verl_fn.backends.vllm.arguments import cache_bytes

    text = read_config(folder).get_text_config()
    return {"kv_cache_memory_bytes": cache_bytes(text, "bfloat16", work.rows, work.longest)}


class Ours:
    """An engine of ours, with random weights."""

    def __init__(self, folder: str, work: Work, engine: str) -> None:
        from verl_fn.backends.sampler import Sampler
        from verl_fn.backends.serving import model_of
        from verl_fn.backends.vllm import Vllm
        from verl_fn.backends.weight_sync import Weights

        if engine == "sampler":
            self.engine: Any = Sampler(folder, device="cuda", dtype="bfloat16", slots=work.rows)
        else:
            self.engine = Vllm(
                folder,
                slots=work.rows,
                max_length=work.longest,
                gpu_memory_utilization=MEMORY,
                engine_kwargs=memory(folder, work),
            )
        generator = torch.Generator("cuda").manual_seed(0)
        _, shapes = model_of(folder)
        weights = {
            name: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(0.02)
            if len(shape) > 1
            else torch.ones(shape, device="cuda", dtype=torch.bfloat16)
            for name, shape in shapes.items()
        }
        self.engine.publish(0, Weights.of(weights))
        del weights
        torch.cuda.empty_cache()
        self.requests = work.requests()

    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.engine.generate(self.requests, version=0))


class Raw:
    """vLLM by itself, with random weights of the same shape."""

    def __init__(self, folder: str, work: Work, engine: str) -> None:
        os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_LOGGING_LEVEL": "WARNING"}
        from vllm import LLM, SamplingParams

        self.engine = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_num_seqs=work.rows,
            max_model_len=work.longest,
            gpu_memory_utilization=MEMORY,
            **memory(folder, work),
            generation_config="vllm",
            async_scheduling=True,
            compilation_config={"max_cudagraph_capture_size": work.rows},
        )
        self.params = [
            SamplingParams(n=work.n, max_tokens=length, ignore_eos=True, detokenize=False) for length in work.lengths
        ]
        self.prompts = [{"prompt_token_ids": list(request.prompt)} for request in work.requests()]

    def tokens(self) -> int:
        outputs = self.engine.generate(self.prompts, self.params, use_tqdm=False)
        return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


def _serve(kind: type[Ours | Raw], pipe: Any, *args: Any) -> None:
    try:
        one = kind(*args)
        one.tokens()
        pipe.send(None)
        while pipe.recv() is not None:
            torch.cuda.synchronize()
            began = time.perf_counter()
            tokens = one.tokens()
            pipe.send((time.perf_counter() - began, tokens))
    except Exception:
        pipe.send(traceback.format_exc())


class Process:
    """One engine in a process of its own; several start side by side.

    Its methods raise a RuntimeError if it failed, with its traceback.
    """

    def __init__(self, kind: type[Ours | Raw], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, theirs, *args))
        self.process.start()

    def wait(self) -> None:
        """Waits until the engine has answered once."""
        self._reply()

    def rate(self) -> float:
        """Tokens a second of one call."""
        self.pipe.send(True)
        seconds, tokens = self._reply()
        rate: float = tokens / seconds
        return rate

    def stop(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(20)
        self.process.kill()

    def _reply(self) -> Any:
        reply = self.pipe.recv()
        if isinstance(reply, str):
            raise RuntimeError(f"an engine failed\n{reply}")
        return reply


def against_raw(work: Work, engine: str, rounds: int) -> dict[str, Any]:
    """Tokens a second of both, in turns."""
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workload.write_config(Path(folder), work.shape)
        both = {}
        for name, kind in (("raw", Raw), ("ours", Ours)):
            both[name] = Process(kind, folder, work, engine)
            stack.callback(both[name].stop)
        for name, process in both.items():
            process.wait()
            measure.say(f"{name} has started")
        for i in range(rounds):
            for name in ("ours", "raw") if i % 2 else ("raw", "ours"):
                rates[name].append(both[name].rate())
                measure.say(f"{name}: {rates[name][-1]:,.0f} tok/s")
    return {"tokens_a_second": rates, "ratio": measure.ratio(rates["ours"], rates["raw"])}


def engines(shape: str, sizes: Sequence[int], prompts: int, rounds: int, device: str, name: str) -> dict[str, Any]:
    """Tokens a second of each number of engines, in turns; every engine has as many prompts."""
    from verl_fn import build
    from verl_fn.driver.cluster import Cluster
    from verl_fn.driver.group import Group, Placement
    from verl_fn.driver.ray import ROOM, connected
    from verl_fn.driver.remote import RemoteRollout, RemoteTrain

    from .weight_sync import rollout_plan, trainer

    gpu = float(device == "cuda")
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    cluster = Cluster(600.0)
    with tempfile.TemporaryDirectory() as made, connected(RayConfig()):
        folder = str(workload.write_model(Path(made), shape, device))
        try:
            count = max(sizes)
            cluster.reserve([{"CPU": ROOM, "GPU": 1.0} if gpu else {"CPU": ROOM}] * count, "PACK")
            places = {
                "trainer": [Placement(0, 0.2 * gpu)],
                "rollout": [Placement(i, 0.8 * gpu) for i in range(count)],
            }
            cluster.start(places, DriverConfig(device=device), 1)
            cluster.build(("trainer", "actor", trainer, folder, device))
            plan = rollout_plan(folder, name, "bfloat16", "apart", prompts, PROMPT_TOKENS, RESPONSE_TOKENS)
            cluster.build(("rollout", "rollout", build.rollout, plan, device))
            backend = RemoteTrain(cluster, cluster.groups["trainer"], "actor")
            state = backend.load_pretrained(folder, Key.from_seed(0))
            whole = cluster.groups["rollout"]
            cluster.get(RemoteRollout(cluster, whole, "rollout").publish(0, backend.weights(state.params)))
            requests = [Work(shape, prompts, 1, heavy=False).requests(i * prompts) for i in range(count)]
            for i in range(-1, rounds):
                for size in sizes:
                    group = cluster.groups[f"rollout {size}"] = Group(f"rollout {size}", whole.members[:size])
                    rollout = RemoteRollout(cluster, group, "rollout")
                    began = time.perf_counter()
                    samples = cluster.get(rollout.generate(list(chain.from_iterable(requests[:size])), version=0))
                    seconds = time.perf_counter() - began
                    if i >= 0:
                        rates[size].append(sum(len(s.tokens) for s in samples) / seconds / size)
        finally:
            cluster.stop()
    one = rates[min(sizes)]
    return {str(size): {"a_gpu": of, "efficiency": measure.ratio(of, one)} for size, of in rates.items()}


def main(argv: Sequence[str]) -> int:
    """``verl-fn bench rollout``: a line for each comparison; exit status 1 where a bar is missed on a GPU."""
    parser = measure.parser("rollout", __doc__)
    parser.add_argument("--shape", choices=tuple(workload.SHAPES), default="0.5b")
    parser.add_argument("--prompts", type=measure.count, default=128, help="prompts of an engine")
    parser.add_argument("--n", type=measure.count, default=8, help="responses of a prompt; 1 with --engines")
    parser.add_argument(
        "--heavy", action="store_true", help=f"from {SHORTEST} to {LONGEST} tokens, with a heavy tail"
    )
    parser.add_argument("--rounds", type=measure.count, default=5)
    parser.add_argument(
        "--engines", nargs="+", type=measure.count, default=[], help="numbers of engines, the first is 1"
    )
    parser.add_argument("--engine", choices=("sampler", "vllm"), default="vllm")
    args = parser.parse_args(argv)
    work = Work(args.shape, args.prompts, args.n, args.heavy)
    result: dict[str, Any] = attrs.asdict(work) | {"engine": args.engine, "response": RESPONSE_TOKENS}
    held = True
    if args.engines:
        result["engines"] = engines(
            args.shape, sorted(args.engines), args.prompts, args.rounds, args.device, args.engine
        )
        for size, row in result["engines"].items():
            held = held and row["efficiency"]["median"] >= ENGINES_BAR
            print(
                f"{size} engines: {statistics.median(row['a_gpu']):,.0f} tok/s a GPU, "
                f"{row['efficiency']['median']:.3f} of one engine's (bar {ENGINES_BAR})"
            )
    else:
        bar = HEAVY_BAR if args.heavy and args.engine == "sampler" else RAW_BARS[args.engine].get(args.shape, RAW_BAR)
        result |= against_raw(work, args.engine, args.rounds)
        ours, raw = (statistics.median(rates) for rates in result["tokens_a_second"].values())
        held = result["ratio"]["median"] >= bar
        print(
            f"{args.engine} {ours:,.0f} tok/s, vLLM by itself {raw:,.0f}: {result['ratio']['median']:.3f} (bar {bar})"
        )
    measure.write(args.json, "rollout", args.device, result)
    print("held" if held else "MISSED")
    return 0 if args.device == "cpu" or held else 1
