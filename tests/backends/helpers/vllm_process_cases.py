"""The process of vLLM's core, which starts before there is something for it to run."""

import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import psutil
import pytest
import torch
from vllm.model_executor.models import registry
from vllm_cases import KEY, PROMPTS, folder, params, trainer

from verl_fn.backends.vllm import EngineArgumentError, EngineError, Vllm
from verl_fn.backends.vllm import process as core_processes
from verl_fn.backends.vllm.core import _core_in
from verl_fn.backends.vllm.process import core_process, preload
from verl_fn.state import Sampling, requests_for


def made(**more):
    return Vllm(folder(), device="cpu", dtype="float32", slots=16, max_length=64, **more)


def core_of(engine):
    (core,) = engine._engine.engine_core.resources.engine_manager.processes
    return core


def waiting():
    """The process that waits for the next engine; there is one, however often it is asked for."""
    preload("cpu")
    (core,) = core_processes._waiting
    preload("cpu")
    assert core_processes._waiting == [core]
    return core.process.pid


def tokens(engine):
    engine.publish(0, trainer().weights(params(2)))
    return [s.tokens.tolist() for s in engine.generate(requests_for(PROMPTS, Sampling(20, n=2), KEY))]


def seen(worker, name):
    """A variable in the core, and whether it has initialized a GPU."""
    return os.environ.get(name), torch.cuda.is_initialized()


def gpu():
    return torch.cuda.is_initialized(), os.getpid()


def no_such_model():
    raise LookupError("no such model")


def models_are_inspected_in_the_core():
    """With an empty cache of vLLM's, in the process that waits, which has initialized no GPU."""
    model = registry.ModelRegistry.models["GPT2LMHeadModel"]
    with core_process("cpu") as core:
        initialized, pid = core.call(gpu)
        assert not initialized and pid != os.getpid()
        with _core_in(core), mock.patch.object(registry.subprocess, "run", side_effect=AssertionError):
            found = registry._run_in_subprocess(lambda: registry._ModelInfo.from_model_cls(model.load_model_cls()))
            with pytest.raises(LookupError, match="no such model"):
                core.call(no_such_model)
        assert found == registry._ModelInfo.from_model_cls(model.load_model_cls())
    assert not core.process.is_alive()


def variables_set_later():
    """An engine takes the process that waits, unless a variable was set since; then the core sees it, too."""
    before = waiting()
    first = made()
    assert core_of(first).pid == before and not core_processes._waiting
    old = psutil.Process(waiting())
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="7"):
        second = made()
    assert core_of(second).pid != old.pid and not old.is_running()
    assert second._engine.call(seen, "CUDA_VISIBLE_DEVICES") == [("7", False)]
    assert first._engine.call(seen, "CUDA_VISIBLE_DEVICES")[0] == (os.environ.get("CUDA_VISIBLE_DEVICES"), False)
    # What vLLM itself sets in this process while it reads its arguments.
    name = "VLLM_DISABLE_SHARED_EXPERTS_STREAM"
    assert first._engine.call(seen, name)[0][0] == os.environ[name] == "1"


def two_threads():
    """Engines that two threads start have a core each, and one that is killed ends the calls of its own engine."""
    with ThreadPoolExecutor(2) as pool:
        one, other = (future.result() for future in [pool.submit(made) for _ in range(2)])
    assert core_of(one).pid != core_of(other).pid
    expected = tokens(one)
    assert tokens(other) == expected
    core_of(one).kill()
    one._engine.ended.result(60)
    with pytest.raises(EngineError, match="was killed"):
        tokens(one)
    assert tokens(other) == expected


def what_a_process_gets_as_it_starts():
    """With settings that only a new process takes, the core starts in one, and the process that waits ends."""
    with mock.patch.dict(os.environ, VLLM_ENABLE_CUDA_COMPATIBILITY="0"):
        old = psutil.Process(waiting())
        engine = made()
        assert core_of(engine).pid != old.pid and not old.is_running()
        assert tokens(engine)
        core_of(engine).kill()
        engine._engine.ended.result(60)
        with pytest.raises(EngineError, match="was killed"):
            tokens(engine)


def processes_that_end_early():
    """A process that has been killed is replaced; the one of an engine that cannot be made ends at once."""
    waiting()
    (core,) = core_processes._waiting
    core.process.kill()
    core.process.join()
    engine = made()
    assert tokens(engine) and core_of(engine).pid != core.process.pid
    before = psutil.Process(waiting())
    with pytest.raises(EngineArgumentError, match="no_such"):
        made(engine_kwargs={"no_such": 1})
    assert not before.is_running()
    with pytest.raises(ValueError, match="To serve at least one request"):
        made(engine_kwargs={"kv_cache_memory_bytes": 4096})
