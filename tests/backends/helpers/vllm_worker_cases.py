"""What tests call in the process of vLLM's worker, its core's, and what they replace there at the start."""

import contextlib
import inspect
import os
import time
from pathlib import Path
from unittest import mock

import torch
from vllm.v1.engine.core import EngineCoreProc

from verl_fn.backends.vllm import engine, loading, worker


class Extension(worker.Extension):
    """Replaces parts of vLLM before a model with experts is made."""


def replacing():
    """Lets engines that are made in the body import this module first."""
    arguments = engine.engine_arguments

    def extended(*args, **options):
        return arguments(*args, **options) | {"worker_extension_cls": f"{__name__}.Extension"}

    return mock.patch.object(engine, "engine_arguments", extended)


def plain_activation():
    """Replaces an activation of vLLM's experts: it makes an object in each step, and only the start may do that."""
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as experts

    def silu_and_mul(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    experts._CPU_MOE_ACT_FN[experts.MoEActivation.SILU] = silu_and_mul


def reported_experts():
    """Lets vLLM's layers report their experts on CPUs, where a kernel of its own picks them."""
    import vllm.model_executor.layers.fused_moe.cpu_fused_moe as experts
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers, pick, compute = [], experts.select_experts, MoERunner.forward

    def forward(runner, *args, **kwargs):
        layers.append(runner)
        try:
            return compute(runner, *args, **kwargs)
        finally:
            layers.pop()

    def select(*args, **kwargs):
        weights, numbers = pick(*args, **kwargs)
        if layers[-1].router.capture_fn is not None:
            layers[-1].router.capture_fn(numbers)
        return weights, numbers

    MoERunner.forward, experts.select_experts, MoERunner.is_monolithic = forward, select, False


if os.environ.get("ARCH") in ("qwen3_moe", "glm4_moe"):
    plain_activation()
if os.environ.get("ARCH") == "qwen3_moe":
    reported_experts()


def buckets_of(one, size):
    """Makes the worker ask for buckets of a size; returns the size before."""
    before, loading.BUCKET_BYTES = loading.BUCKET_BYTES, size
    return before


def ignoring(one, end):
    """Hides weights whose names end so from vLLM; with None, none."""
    split = getattr(loading.in_files, "whole", loading.in_files)

    def without(name, *args):
        return [] if name.endswith(end) else split(name, *args)

    without.whole = split
    loading.in_files = split if end is None else without


def unreported_experts(one):
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    with mock.patch.object(MoERunner, "is_monolithic", True):
        return one.verl_fn_layers_with_experts()


REPACKED = []


def count_repacks(one):
    """Notes from now on which layers with experts repack their weights."""
    for name, layer in one.model_runner.model.named_modules():
        if name.endswith("routed_experts"):
            repack = layer.quant_method.process_weights_after_loading
            layer.quant_method.process_weights_after_loading = lambda layer, name=name, repack=repack: (
                REPACKED.append(name),
                repack(layer),
            )


def repacked(one):
    return REPACKED


def kernel_of_the_sampler(one):
    """Whether vLLM's own sampler has its kernel, and does nothing with the one that stands for it."""
    from vllm.v1.sample.ops import topk_topp_sampler

    restored = getattr(topk_topp_sampler, worker.KERNEL, None) is worker._kernel
    logits, ones = torch.randn(9, 40), torch.ones(9)
    with mock.patch.object(topk_topp_sampler, "HAS_TRITON", True):
        worker.use_kernel(worker.nothing)
        try:
            untouched = topk_topp_sampler.apply_top_k_top_p(logits, ones.int(), 0.5 * ones) is logits
        finally:
            worker.use_kernel(worker._kernel)
    return untouched, restored


def free_blocks(one):
    """The free blocks of the cache, and the unfinished requests of the scheduler."""
    frame = inspect.currentframe()
    while not isinstance(core := frame.f_locals.get("self"), EngineCoreProc):
        frame = frame.f_back
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free, core.scheduler.get_num_unfinished_requests()


def before_steps(one, act, *args):
    """Calls ``act(number, *args)`` before each draw from now on; with None, nothing."""
    sampler, number = one.model_runner.sampler, 0
    with contextlib.suppress(AttributeError):
        del sampler.forward
    forward = sampler.forward

    def acting(*given, **options):
        nonlocal number
        number += 1
        act(number, *args)
        return forward(*given, **options)

    if act is not None:
        sampler.forward = acting


def wait(number, seconds):
    """Steps that take long enough for what happens in another process meanwhile."""
    time.sleep(seconds)


def wait_for(number, file):
    """The third step and later ones wait for a file."""
    for _ in range(30_000):
        if number < 3 or Path(file).exists():
            return
        time.sleep(0.002)
    raise RuntimeError("nothing arrives in the middle of a response")


def fail(number):
    if number == 4:
        raise RuntimeError("a kernel failed, on purpose")
