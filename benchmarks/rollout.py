"""vLLM behind the protocol against vLLM by itself, and several engines against one.

``verl-fn bench rollout`` compares tokens a second of ``Vllm.generate`` and of ``vllm.LLM.generate``, which
returns the log-prob of each token as well. Both have the same settings and prompts, each in a process of its own on
the same GPU, and take turns. With ``--engines 1 2``, so many engines over Ray, each on a GPU of its own, answer the
same number of prompts each; their tokens a second a GPU are compared with one engine's.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from verl_fn.backends.protocol import Sampling
from verl_fn.config.schema import DriverConfig, RayConfig
from verl_fn.state import Key, Request, requests_for

from . import measure, workload

RAW_BAR, ENGINES_BAR = 0.97, 0.95
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 256
MEMORY = 0.4


def asked(vocab: int, prompts: int, first: int = 0) -> list[Request]:
    """Requests for random prompts; answers of random weights hardly ever end before their limit."""
    generator = torch.Generator().manual_seed(first)
    tokens = torch.randint(3, vocab, (prompts, PROMPT_TOKENS), generator=generator).tolist()
    ids = range(first * prompts, (first + 1) * prompts)
    return requests_for(tokens, Sampling(RESPONSE_TOKENS), Key.from_seed(0), ids)


class Ours:
    """The engine behind the protocol, with random weights."""

    def __init__(self, folder: str, shape: str, prompts: int) -> None:
        from verl_fn.backends.local import Local
        from verl_fn.backends.vllm import Vllm
        from verl_fn.steps import frozen

        trainer = Local(folder, frozen(), device="cuda")
        length = PROMPT_TOKENS + RESPONSE_TOKENS
        self.engine = Vllm(folder, slots=prompts, max_length=length, gpu_memory_utilization=MEMORY)
        params = trainer.load_pretrained(folder, Key.from_seed(0)).params
        self.engine.publish(0, trainer.weights(params))
        self.requests = asked(workload.vocabulary(shape), prompts)

    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.engine.generate(self.requests, version=0))


class Raw:
    """vLLM by itself, with the model of the same folder."""

    def __init__(self, folder: str, shape: str, prompts: int) -> None:
        from verl_fn.backends.vllm.arguments import prepare_environment

        prepare_environment("cuda")
        from vllm import LLM, SamplingParams

        self.engine = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=prompts,
            max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
            gpu_memory_utilization=MEMORY,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
        )
        self.params = SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
        self.prompts = [
            {"prompt_token_ids": list(request.prompt)} for request in asked(workload.vocabulary(shape), prompts)
        ]

    def tokens(self) -> int:
        outputs = self.engine.generate(self.prompts, self.params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


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
    """One engine in a process of its own.

    Raises:
        RuntimeError: it failed; its traceback is the message.
    """

    def __init__(self, kind: type[Ours | Raw], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, theirs, *args))
        self.process.start()
        self._reply()

    def rate(self) -> float:
        """Tokens a second of one call."""
        self.pipe.send(True)
        seconds, tokens = self._reply()
        rate: float = tokens / seconds
        return rate

    def stop(self) -> None:
        """Ends the process."""
        self.pipe.send(None)
        self.process.join(20)
        self.process.kill()

    def _reply(self) -> Any:
        reply = self.pipe.recv()
        if isinstance(reply, str):
            raise RuntimeError(f"an engine failed\n{reply}")
        return reply


def against_raw(shape: str, prompts: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of both, in turns."""
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    with tempfile.TemporaryDirectory() as folder:
        workload.write_model(Path(folder), shape, "cuda")
        torch.cuda.empty_cache()
        both = {"ours": Process(Ours, folder, shape, prompts), "raw": Process(Raw, folder, shape, prompts)}
        try:
            for i in range(rounds):
                for name in ("ours", "raw") if i % 2 else ("raw", "ours"):
                    rates[name].append(both[name].rate())
        finally:
            for process in both.values():
                process.stop()
    return {"tokens_a_second": rates, "ratio": measure.ratio(rates["ours"], rates["raw"])}


def engines(shape: str, sizes: Sequence[int], prompts: int, rounds: int, device: str, name: str) -> dict[str, Any]:
    """Tokens a second of each number of engines, in turns; every engine has as many prompts."""
    from verl_fn import build
    from verl_fn.driver.cluster import Cluster
    from verl_fn.driver.group import Group, Placement
    from verl_fn.driver.ray import ROOM, connected
    from verl_fn.driver.remote import RemoteTrain
    from verl_fn.driver.remote_rollout import RemoteRollout

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
            requests = [asked(workload.vocabulary(shape), prompts, i) for i in range(count)]
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
    parser.add_argument("--prompts", type=measure.count, default=512, help="prompts of an engine")
    parser.add_argument("--rounds", type=measure.count, default=5)
    parser.add_argument(
        "--engines", nargs="+", type=measure.count, default=[], help="numbers of engines, the first is 1"
    )
    parser.add_argument("--engine", choices=("sampler", "vllm"), default="vllm", help="for --engines")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {"shape": args.shape, "prompts": args.prompts, "response": RESPONSE_TOKENS}
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
        result |= against_raw(args.shape, args.prompts, args.rounds)
        ours, raw = (statistics.median(rates) for rates in result["tokens_a_second"].values())
        held = result["ratio"]["median"] >= RAW_BAR
        print(f"ours {ours:,.0f} tok/s, raw {raw:,.0f}: {result['ratio']['median']:.3f} (bar {RAW_BAR})")
    measure.write(args.json, "rollout", args.device, result)
    print("held" if held else "MISSED")
    return 0 if args.device == "cpu" or held else 1
