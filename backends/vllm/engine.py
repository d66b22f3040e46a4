"""A rollout engine on vLLM, with the draws, the versions and the checked publications of every engine."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
from jaxtyping import Int
from torch import Tensor

from verl_fn.backends.draws import Answers, Drawn, last_draws
from verl_fn.backends.hf.config import ModelError, read_config
from verl_fn.backends.hf.experts import experts_of, recorded_dtype
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.skeleton import dtype_of
from verl_fn.backends.protocol import (
    Handle,
    Request,
    Sample,
    StaleWeightsError,
    WeightSource,
    here,
)
from verl_fn.backends.serving import Growing, More, longest_of, model_of, not_finite, seeds_of
from verl_fn.backends.weight_sync import form_of
from verl_fn.backends.weight_sync.inlet import Arriving
from verl_fn.backends.weight_sync.outlet import Outlet, send
from verl_fn.state.guards import expect

from .adapters import adapter_arguments, adapter_request
from .arguments import (
    EngineError,
    check_served,
    check_version,
    engine_arguments,
    prompt_with_images,
    reads_images,
    row_of,
)
from .process import core_process

# What sleeping frees, and the tags of vLLM that wake it.
TAGS = {"weights": "weights", "cache": "kv_cache"}
# While requests are added, steps without a look at new ones. A step that also computes prompts takes longer, and so
# does the collection of draws.
STEPS_BETWEEN = 8
# How long an engine without requests releases its weights before it looks for new ones.
REST_SECONDS = 0.001


class AsleepError(StaleWeightsError):
    """The engine sleeps, or only a part of it is awake."""


class RoutesMissing(RuntimeError):
    """vLLM returned the experts of other tokens than it computed."""


class Vllm(Growing):
    """A rollout engine on vLLM; see ``RolloutBackend``.

    vLLM's core (its scheduler and its model) runs in a process of its own, and a tensor-parallel engine starts one
    more for each GPU. They end with this process.

    Draws follow the embedded engine, ``Sampler``: for the same weights and keys both give the same tokens,
    unless the rounding of logits decides a draw; ``near_ties`` counts such draws. Arguments that are not explained
    are as for ``Sampler``.

    Args:
        device: ``cpu`` or ``cuda``.
        max_length: the most tokens of a row; by default the model's.
        tensor_parallel_size: GPUs among which the model is split.
        gpu_memory_utilization: the share of the GPU's memory for weights, cache and computation.
        enforce_eager: run without CUDA graphs and without the compiler.
        engine_kwargs: further arguments of vLLM's ``EngineArgs``.
        lora: adapters that are published by themselves, after a first one with the model; by default they are merged
            into published weights.

    Raises:
        ArgumentError: ``lora`` is no ``Lora``.
        UntestedVersion: no vLLM is installed that this adapter was tested with.
        EngineArgumentError: one of ``engine_kwargs`` is unknown or would break a promise, or a layer does not report
            its experts.
        ModelError: vLLM does not know the model, it cannot be split, or it has no experts to record.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "cuda",
        dtype: str | torch.dtype = "bfloat16",
        slots: int = 256,
        max_length: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
        verify: str = "first",
        lora: Lora | None = None,
        in_flight: bool = False,
        routed_experts: bool = False,
    ) -> None:
        check_version()
        if lora is not None:
            expect("Vllm", Lora, lora)
        with core_process(device) as process:
            skeleton, self.shapes = model_of(folder, lora)
            self._lora = lora
            self._config = read_config(folder)
            self.reads_images = reads_images(self._config, device)
            length = int(min(longest_of(self._config), math.inf if max_length is None else max_length))
            super().__init__(folder, length, skeleton.output_layer.weight.shape[0], verify, in_flight, routed_experts)
            self.device, self.dtype = torch.device(device), dtype_of(dtype, "dtype")
            self.tensor_parallel_size = tensor_parallel_size
            self._awake = set(TAGS)
            self._outlets: list[Outlet] = []
            # Draws that were collected, with their version.
            self._drawn: list[tuple[Drawn, int]] = []
            arguments = engine_arguments(
                Path(folder),
                device=device,
                dtype=str(self.dtype).removeprefix("torch."),
                slots=slots,
                max_length=length,
                tensor_parallel_size=tensor_parallel_size,
                gpu_memory_utilization=gpu_memory_utilization,
                enforce_eager=enforce_eager,
                engine_kwargs=engine_kwargs or {},
            )
            if lora is not None:
                arguments |= adapter_arguments(skeleton.adapters, sees=self.reads_images)
            if routed_experts:
                arguments["enable_return_routed_experts"] = True
            check_served(Path(folder), device)
            from .core import started

            self._engine = started(arguments, type(skeleton.model).__name__, process)
            self._engine.call("set_up", self.vocab, lora, tuple(skeleton.constants), skeleton.conversions)
            if routed_experts:
                self._layers: list[int] = self._engine.call("layers_with_experts")[0]
                experts = experts_of(self._config.get_text_config())
                if not experts or not self._layers:
                    raise ModelError(f"{folder} has no experts, so there is no routing to record")
                self._recorded_dtype = recorded_dtype(experts)

    def publish(self, version: int, weights: Handle[WeightSource]) -> None:
        """Loads these weights, and compares the first ones by checksums; see ``RolloutBackend``.

        Raises:
            AsleepError: the engine's weights sleep.
        """
        with self._publication():
            # Not before, since another thread may replace or drop the weights that the engine keeps.
            source, base = self._chosen(here(weights))
            self._require("weights", "publish")
            if not self.capabilities.versions_per_token:
                self._interrupt()
            # Open requests are removed if it fails, before vLLM goes on.
            with self._engine.paused(), self._emptied(self._calls):
                if self._engine.has_unfinished_requests():
                    self._collect_drawn()
                self.version = None
                self._replace(version, source, base)
                self._published, self._base = self._published + 1, base
                self.version = version

    def _replace(self, version: int, source: WeightSource, base: str | None) -> None:
        """Replaces the weights of the paused vLLM."""
        if base != self._base:
            self._base = None
        if self.tensor_parallel_size == 1 and isinstance(source, Arriving):
            self._engine.call("load", source, self._checked)
        else:
            self._send(version, source, self._checked)
        # Its keys and values were computed with other weights; for open requests they are computed again.
        if not self._engine.reset_prefix_cache(self.capabilities.versions_per_token):
            raise EngineError("vLLM did not reset its prefix cache, so it could answer from older weights")
        if self.reads_images:
            self._engine.reset_encoder_cache()

    def _chosen(self, source: WeightSource) -> tuple[WeightSource, str | None]:
        """Returns what the engine needs of a source, and what identifies the weights that it keeps.

        Raises:
            ValueError: the names or shapes are not the model's, or there are no adapters apart from the model.
        """
        form = form_of(source, "kept" if self._lora is None else "apart")
        if self._lora is not None and form is None:
            raise ValueError(
                "the engine takes adapters apart from the model, and these weights have none: set "
                "rollout.adapters=merged"
            )
        return self._part(source, form, self.shapes)

    def sleep(self, level: int = 2) -> None:
        """Frees the memory of the cache at level 1, moving weights to the CPU, and also of weights at level 2."""
        with self._alone():
            self._interrupt()
            if level > 1:
                self.version, self._base, self._failure = None, None, ""
            if self.device.type == "cuda" and self._awake:
                # vLLM ignores a call to sleep while only a part of it is awake.
                self.wake()
                self._engine.sleep(min(level, 2))
                self._awake = set()

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Allocates what ``sleep`` freed: ``weights``, ``cache`` or, without tags, both.

        Raises:
            ValueError: a tag is neither of these.
        """
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise ValueError(f"wake knows the tags weights and cache, not {unknown[0]!r}")
        with self._alone():
            for what, tag in TAGS.items():
                if what in (tags or TAGS) and what not in self._awake:
                    self._engine.wake_up([tag])
                    self._awake.add(what)

    def _require_version(self, version: int | None) -> None:
        for what in TAGS:
            self._require(what, "generate")
        super()._require_version(version)

    def _run(self, requests: Sequence[Request], call: int, as_they_end: bool) -> Iterator[tuple[int, Sample]]:
        self._continue(call)
        self._abort()
        answers = Answers(requests)
        # vLLM begins when it has all requests, so that a call that is made again has the same batches.
        with self._engine.paused():
            self._engine.call("begin", requests[0].sampling)
            self._add(requests, call)
        n = requests[0].sampling.n
        waiting = len(requests) * n
        ended: dict[int, Any] = {}
        while waiting:
            waiting -= self._step(call, ended)
            if ended and (as_they_end or not waiting):
                self._collect(answers, n)
                yield from self._samples(answers, ended)
                ended = {}

    def _grow(self, more: More, call: int) -> None:
        self._continue(call)
        self._abort()
        answers, begun, waiting = Answers([]), 0, 0
        samples: list[Sample] = []
        while (requests := more(samples)) is not None:
            samples = []
            if requests:
                if not begun:
                    self._engine.call("begin", requests[0].sampling)
                self._add(requests, call, begun)
                answers.add(requests)
                begun, waiting = begun + len(requests), waiting + len(requests)
            if not waiting:
                # A publication may arrive meanwhile.
                self._weights.wait(REST_SECONDS)
                continue
            ended: dict[int, Any] = {}
            for _ in range(STEPS_BETWEEN):
                waiting -= self._step(call, ended)
                if not waiting:
                    break
            if ended:
                self._collect(answers, 1)
                samples = [sample for _, sample in self._samples(answers, ended)]

    def _add(self, requests: Sequence[Request], call: int, first: int = 0) -> None:
        """Adds a request of vLLM for each sample; its name has the number of its row, see ``row_of``.

        The draws are ours; of vLLM's own settings only the ones that end a response remain.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = {
            sampling: SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=1.0,
                stop_token_ids=sorted({*self.end_tokens, *sampling.stop_token_ids}),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                # vLLM would copy all of this deeply for each request, and writes to none of it.
                skip_clone=True,
            )
            for sampling in {request.sampling for request in requests}
        }
        self._engine.call("extend", seeds_of(requests))
        rows = itertools.count(first)
        adapters = adapter_request() if self._lora is not None else None
        for request in requests:
            if request.images is None:
                prompt = tokens_input(list(request.prompt))
            else:
                prompt = prompt_with_images(request, self._config)
            for row in itertools.islice(rows, request.sampling.n):
                self._engine.add_request(f"{call}-{row}", prompt, params[request.sampling], lora_request=adapters)

    def _step(self, call: int, ended: dict[int, Any]) -> int:
        """Waits for a step of vLLM, adds what it returned for rows that ended to ``ended``; returns their number."""
        self._continue(call)
        if not self._engine.has_unfinished_requests():
            raise EngineError("vLLM ended with some of the rows unanswered")
        new = {row_of(output.request_id): output for output in self._engine.step() if output.finished}
        ended.update(new)
        return len(new)

    def _samples(self, answers: Answers, ended: Mapping[int, Any]) -> Iterator[tuple[int, Sample]]:
        """Yields the samples of rows that have ended, after a comparison with what vLLM returned."""
        for row, output in sorted(ended.items()):
            answer = output.outputs[0]
            # vLLM may have begun one more step before it saw that a response had ended.
            sample = answers.sample(row, answer.finish_reason == "stop", len(answer.token_ids))
            if sample.tokens.tolist() != list(answer.token_ids):
                raise EngineError(f"vLLM returned other tokens for row {row} than were drawn for it")
            if sample.images is not None and sample.prompt.tolist() != list(output.prompt_token_ids):
                raise EngineError(
                    f"vLLM used another prompt for row {row}: it has {len(output.prompt_token_ids)} tokens, and the "
                    f"trainer's has {len(sample.prompt)}"
                )
            if self.capabilities.routed_experts:
                length = len(sample.prompt) + len(sample.tokens)
                routed = routes(answer.routed_experts, length, self._layers, self._recorded_dtype)
                sample = attrs.evolve(sample, routed_experts=routed)
            yield row, sample

    def _collect(self, answers: Answers, n: int) -> None:
        self._collect_drawn()
        # With several batches in flight, vLLM may return responses that were collected with earlier ones.
        if not self._drawn:
            return
        parts, self._drawn = self._drawn, []
        drawn, versions = last_draws(parts)
        if (bad := drawn.columns[0] == self.vocab).any():
            self._interrupt()
            self._engine.reset_prefix_cache()
            self._engine.call("clear_cache")
            raise not_finite(int(drawn.rows[bad][0]), n)
        answers.collect(drawn.rows, drawn.columns, versions)

    def _collect_drawn(self) -> None:
        """Takes the draws of the running call, made by the engine's version, from vLLM's sampler."""
        drawn = self._engine.call("collected")[0]
        if drawn is not None:
            assert self.version is not None
            self._drawn.append((drawn, self.version))

    def _send(self, version: int, source: WeightSource, checked: bool) -> None:
        """Sends weights from this process to vLLM's workers; training ranks may send them here meanwhile."""
        if not self._outlets:
            secret = os.urandom(16)
            addresses = self._engine.call("listen", "127.0.0.1", secret)
            self._outlets = [Outlet(address, secret, self.device) for address in addresses]
        with ThreadPoolExecutor(1, "verl_fn publication") as thread:
            receiving = thread.submit(self._engine.call, "receive", version, checked)
            send(self._outlets, version, source)
        receiving.result()

    def _interrupt(self) -> None:
        """Ends the streams of earlier calls."""
        self._calls += 1
        self._abort()

    def _abort(self) -> None:
        """Removes requests of earlier calls from vLLM."""
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)
        self._drawn = []

    def _require(self, what: str, call: str) -> None:
        """Raises AsleepError for a call that needs what sleeps."""
        if what not in self._awake:
            state = "asleep" if not self._awake else f"awake only with its {' and '.join(sorted(self._awake))}"
            raise AsleepError(
                f"{call} needs the engine's {what}, and the engine is {state}; call wake(['{what}']) first"
            )


# The experts of each token, as vLLM records them


def routes(returned: Any, length: int, layers: Sequence[int], dtype: torch.dtype) -> Int[Tensor, "T l k"]:
    """Returns the experts of a row's tokens; the last token repeats the one before, since vLLM never computes it.

    Args:
        returned: vLLM's array of all layers, or None.
        length: the tokens of the row.
        layers: the numbers of the layers with experts.
        dtype: of a recording.

    Raises:
        RoutesMissing: there are experts of more or fewer tokens.

    Example:
        >>> import numpy
        >>> array = numpy.arange(8, dtype=numpy.uint8).reshape(2, 2, 2)
        >>> routes(array, 3, [1], torch.uint8).tolist()
        [[[2, 3]], [[6, 7]], [[6, 7]]]
    """
    computed = 0 if returned is None else len(returned)
    if computed != length - 1:
        raise RoutesMissing(
            f"vLLM returned the experts of {computed} tokens for a row of {length} tokens, of which it computed "
            f"{length - 1}"
        )
    # As signed integers: torch has few operations on uint16.
    routed = torch.from_numpy(returned[:, list(layers)].astype("int64")).to(dtype)
    return torch.cat([routed, routed[-1:]])
