"""vLLM's engine with its core in a process of its own, so that our Python does not take turns with the scheduler's.

The core's errors are raised by the calls that wait for it; see ``process``.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.v1.engine import utils
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.serial_utils import cloudpickle

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.vllm.arguments import OWN_MODELS, EngineArgumentError, EngineError
from verl_fn.backends.vllm.process import KILLED, Core

# Seconds that a core that has failed may take to end its workers and to say why.
LAST_WORDS = 30.0
ADD_REQUEST = EngineCoreProc.preprocess_add_request
# Held while functions of vLLM are replaced, since another thread may start an engine as well.
_starting = threading.Lock()

# The core and its workers find models by name.
for name in set(OWN_MODELS.values()):
    if name not in ModelRegistry.models:
        ModelRegistry.register_model(name, f"verl_fn.backends.vllm.models:{name}")


def _explained_call(name: str) -> Any:
    """Returns a method of vLLM's engine whose errors are the core's."""
    inner = getattr(LLMEngine, name)

    @functools.wraps(inner)
    def call(self: Engine, *args: Any, **kwargs: Any) -> Any:
        with self._explaining():
            return inner(self, *args, **kwargs)

    return call


class Engine(LLMEngine):
    """vLLM's engine; once its core has ended, calls raise the core's error."""

    ended: Future[Exception]

    add_request = _explained_call("add_request")
    abort_request = _explained_call("abort_request")
    reset_prefix_cache = _explained_call("reset_prefix_cache")
    reset_encoder_cache = _explained_call("reset_encoder_cache")
    sleep = _explained_call("sleep")
    step = _explained_call("step")
    wake_up = _explained_call("wake_up")

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a method of ``worker.Extension``, or a function of the worker, on all workers; returns the results.

        vLLM carries only what msgpack knows, and of an error only the text, so both travel as bytes. A connection
        among the arguments is open in both processes then.

        Raises:
            Exception: as the method on the first worker that failed.
        """
        request = bytes(ForkingPickler.dumps((method, args)))
        with self._explaining():
            replies = [pickle.loads(reply) for reply in self.collective_rpc("verl_fn_call", args=(request,))]
        for succeeded, result in replies:
            if not succeeded:
                raise result
        return [result for _, result in replies]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Lets the core end the batches that it has begun; it begins no other one before the end of the body."""
        self.sleep(0, mode="keep")
        try:
            yield
        finally:
            if not self.ended.done():
                self.wake_up(["scheduling"])

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            try:
                why = self.ended.result(LAST_WORDS)
            except TimeoutError:
                why = EngineError(f"vLLM's core has failed, and has not said why within {LAST_WORDS:g} seconds")
            raise why from error
        except Exception as error:
            if type(error) is not Exception:
                raise
            # So vLLM passes on what failed in the core.
            raise EngineError(str(error)) from error


def started(arguments: Mapping[str, Any], model: str, process: Core) -> Engine:
    """Starts vLLM's engine.

    Args:
        arguments: of vLLM's ``EngineArgs``.
        model: the name of transformers' class of the model.

    Raises:
        ModelError: vLLM does not know the model.
        EngineArgumentError: the GPU has less free memory than the engine may take.
    """
    if model in OWN_MODELS:
        from .models import register

        register()
        overrides = {**arguments["hf_overrides"], "architectures": [OWN_MODELS[model]]}
        arguments = {**arguments, "hf_overrides": overrides}
    with _starting, _core_in(process):
        try:
            engine: Engine = Engine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=True)
        except Exception as error:
            # vLLM would remember for the next engine, too, that it could not look at the class of the model.
            registry._try_inspect_model_cls.cache_clear()
            raise _explained(process.failure or _said(process) or error, arguments["model"]) from error
    engine.ended = Future()
    core = engine.engine_core
    watched = (process.pipe, engine.ended, core.resources, core.outputs_queue, core.utility_results)
    threading.Thread(target=_watch, args=watched, name="verl_fn core", daemon=True).start()
    return engine


@contextlib.contextmanager
def _core_in(process: Core) -> Iterator[None]:
    """Lets vLLM run a core in this process, and look there at the class of the model.

    vLLM would start a process for each of the two, and each would first import vLLM.
    """
    context, elsewhere = utils.get_mp_context, registry._run_in_subprocess

    def inspected(function: Callable[[], Any]) -> Any:
        return process.call(functools.partial(called, cloudpickle.dumps(function)))

    utils.get_mp_context, registry._run_in_subprocess = lambda: process, inspected
    try:
        yield
    finally:
        utils.get_mp_context, registry._run_in_subprocess = context, elsewhere


def called(function: bytes) -> Any:
    """Calls a function that travels as bytes."""
    return pickle.loads(function)()


def _explained(error: Exception, model: str) -> Exception:
    """Returns what to raise for an error of vLLM's start."""
    if "not supported for now" in str(error) or "no vLLM implementation" in str(error):
        return ModelError(f"{model}: vLLM does not know this model ({error}); set rollout.name=sampler")
    if "core initialization failed" in str(error):
        return EngineError(KILLED)
    if "gpu memory utilization" in str(error).lower():
        return EngineArgumentError(f"rollout.gpu_memory_utilization does not fit this GPU: {error}")
    return error


def _watch(
    pipe: Connection, ended: Future[Exception], resources: Any, outputs: Any, replies: Mapping[int, Future[Any]]
) -> None:
    """Waits until the core ends, and then wakes whatever waits for it."""
    ended.set_result(_last_words(pipe) or EngineError("vLLM's core was killed, or crashed"))
    resources.engine_dead = True
    outputs.put(EngineDeadError())
    for reply in list(replies.values()):
        if not reply.done():
            reply.set_exception(EngineDeadError())


def _said(process: Core) -> Exception | None:
    """Returns the error that a core sent that has begun; None if it sent none."""
    begun = process.process.pid is not None and not process.waits
    return _last_words(process.pipe) if begun and process.pipe.poll(LAST_WORDS) else None


def _last_words(pipe: Connection) -> Exception | None:
    """Waits until the core ends, and returns the error that it sent; None if it sent none."""
    with contextlib.suppress(EOFError, OSError):
        error: Exception = pipe.recv()
        return error
    return None


def share_images(core: Any, shown: MutableMapping[str, Any], request: Any) -> Any:
    """Lets the rows that show an image have one copy of it, and passes the request on to vLLM."""
    for feature in request.mm_features or ():
        if feature.data is not None:
            feature.data = shown.setdefault(feature.identifier, feature.data)
    return ADD_REQUEST(core, request)


# An engine's own process has no core.
EngineCoreProc.preprocess_add_request = functools.partialmethod(share_images, weakref.WeakValueDictionary())
