"""The process of vLLM's core starts before there is something for it to run."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import psutil
import pytest
import torch
from vllm.model_executor.models import registry
from vllm_cases import KEY, PROMPTS, folder, params, trainer

from verl_fn.backends.vllm import EngineArgumentError, EngineError, Vllm
from verl_fn.backends.vllm import engine as engines
from verl_fn.backends.vllm.core import _core_in
from verl_fn.backends.vllm.process import Core, core_process
from verl_fn.state import Sampling, requests_for

kept = []


def made(**more):
    return Vllm(folder(), device="cpu", dtype="float32", slots=16, max_length=64, **more)


def core_of(engine):
    (core,) = engine._engine.engine_core.resources.engine_manager.processes
    return core


def waiting():
    """A process that nobody gives a core."""
    kept.append(Core())
    return kept[0].process.pid


@contextlib.contextmanager
def processes():
    """The processes that wait for a core meanwhile."""
    inner, seen = Core.__init__, []

    def begin(self):
        inner(self)
        seen.append(psutil.Process(self.process.pid))

    with mock.patch.object(Core, "__init__", begin):
        yield seen


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
    """With an empty cache of vLLM's, in the process that waits; it has initialized no GPU."""
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
    """The core sees variables that are set after its process was started."""
    arguments = engines.engine_arguments

    def late(*args, **options):
        os.environ["SET_LATER"] = "1"
        return arguments(*args, **options)

    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="7"), processes() as begun:
        with mock.patch.object(engines, "engine_arguments", late):
            engine = made()
        assert [core_of(engine).pid] == [one.pid for one in begun]
        assert engine._engine.call(seen, "CUDA_VISIBLE_DEVICES") == [("7", False)]
        assert engine._engine.call(seen, "SET_LATER") == [("1", False)]


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
    with mock.patch.dict(os.environ, VLLM_ENABLE_CUDA_COMPATIBILITY="0"), processes() as begun:
        one = made()
        assert core_of(one).pid != begun[0].pid and not begun[0].is_running()
        assert tokens(one)
        core_of(one).kill()
        one._engine.ended.result(60)
        with pytest.raises(EngineError, match="was killed"):
            tokens(one)


def processes_that_end_early():
    """The process of an engine that cannot be made ends at once; an engine whose process is killed is not made."""
    with processes() as begun, pytest.raises(EngineArgumentError, match="no_such"):
        made(engine_kwargs={"no_such": 1})
    assert not begun[0].is_running()
    with pytest.raises(ValueError, match="To serve at least one request"):
        made(engine_kwargs={"kv_cache_memory_bytes": 4096})
    arguments = engines.engine_arguments

    def kill(*args, **options):
        begun[0].kill()
        begun[0].wait()
        return arguments(*args, **options)

    killed = mock.patch.object(engines, "engine_arguments", kill)
    # vLLM looks at the model's class in the process, unless a file or this process knows it.
    unknown = mock.patch.object(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", return_value=None)
    for known in (True, False):
        if not known:
            registry._try_inspect_model_cls.cache_clear()
        crashed = pytest.raises(EngineError, match="was killed, or crashed, as it started")
        with processes() as begun, killed, contextlib.nullcontext() if known else unknown, crashed:
            made()
    assert tokens(made())
