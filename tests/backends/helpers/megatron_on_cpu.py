"""Lets megatron-core compute on CPUs over gloo, for tests. It refuses to where CUDA works.

megatron-core asks for CUDA in its calls of torch, also where its tensors lie on the CPU. Functions of ``torch.cuda``
that it calls are replaced by ones that do nothing. Modules that make tensors with ``device="cuda"`` get a stand-in
of their own for ``torch``. Torch's functions themselves must stay, since ``torch.device("meta")`` knows them by
identity, and transformers' models would have uninitialised constants.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
import weakref

import torch

BACKEND = "verl_fn.backends.megatron.backend"
LITERAL = (
    "distributed.fsdp.mcore_fsdp_adapter",
    "distributed.fsdp.src.megatron_fsdp.megatron_fsdp",
    "distributed.fsdp.src.megatron_fsdp.mixed_precision",
    "distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
    "distributed.fsdp.src.megatron_fsdp.utils",
    "distributed.param_and_grad_buffer",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "tensor_parallel.data",
    "transformer.moe.token_dispatcher",
    "transformer.utils",
    "utils",
)
COALESCING = torch.distributed.distributed_c10d._coalescing_manager
FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


class Nothing:
    """A stream or event that does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class OnCpu:
    """A stand-in for ``torch`` whose factories make tensors on the CPU where they are asked for CUDA."""

    def __getattr__(self, name):
        if name == "device":
            return OnCpuDevice("device", (), {})
        made = getattr(torch, name)
        if name not in FACTORIES:
            return made

        @functools.wraps(made)
        def make(*args, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            return made(*args, **kwargs)

        return make


class OnCpuDevice(type):
    """Makes devices, of the CPU where it is asked for CUDA."""

    def __call__(cls, kind, *args):
        return torch.device("cpu") if str(kind).startswith("cuda") else torch.device(kind, *args)

    def __instancecheck__(cls, value):
        return isinstance(value, torch.device)


@contextlib.contextmanager
def in_order(*args, **options):
    """Ends collectives where they start, as the order of a stream does for what comes after them.

    gloo's threads write at any time, also to memory that Megatron-FSDP has freed behind a stream's back.
    """
    with COALESCING(*args, **options) as collectives:
        yield collectives
    collectives.wait()


class OnCpuMesh:
    """A stand-in for ``DeviceMesh`` whose meshes are of CPUs."""

    @staticmethod
    def from_group(group, device_type, **options):
        return torch.distributed.DeviceMesh.from_group(group, device_type="cpu", **options)


def shared(new_group):
    """Makes one process group for all of the same ranks, since each has threads that keep waking up."""
    made = {}

    def group(ranks=None, *args, **kwargs):
        of_all = torch.distributed.group.WORLD
        key = of_all, tuple(ranks if ranks is not None else range(of_all.size()))
        if key not in made:
            made[key] = new_group(ranks, *args, **kwargs)
        return made[key]

    return group


def once_a_config(clean):
    """Copies a model's config for other ranks once, instead of for each tensor that is converted.

    A conversion of a tiny model would spend most of its time on that.
    """
    made = {}

    def cleaned(config, max_depth=3, current_depth=0):
        known, copy = made.get((id(config), max_depth), (lambda: None, None))
        if known() is not config:  # another one may have had its address
            copy = clean(config, max_depth, current_depth)
            made[id(config), max_depth] = weakref.ref(config), copy
        return copy

    return cleaned


def named_cuda(kind):
    """Gives the types of tensors the names that Megatron's optimizer looks for, where that asks for one."""

    def type(self, *args, **kwargs):
        name = kind(self, *args, **kwargs)
        asks = sys._getframe(1).f_globals["__name__"].startswith("megatron.core.optimizer")
        return name.replace("torch.", "torch.cuda.") if asks and isinstance(name, str) else name

    return type


@functools.cache
def install():
    """Replaces what megatron-core needs CUDA for; the second call does nothing."""
    if torch.cuda.is_available():
        raise RuntimeError("CUDA works here, so megatron-core needs no replacement for it")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch._dynamo.config.disable = True
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    cuda, cpu = torch.cuda, torch.device("cpu")
    cuda.current_device = lambda: cpu
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: None
    torch.distributed.new_group = shared(torch.distributed.new_group)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = named_cuda(torch.Tensor.type)

    from verl_fn.backends.megatron.importing import load_bridge

    load_bridge()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # It moves numbers of tokens from CUDA only, and needs them as numpy's arrays.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    for name in LITERAL:
        importlib.import_module(f"megatron.core.{name}").torch = OnCpu()
    importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter").DeviceMesh = OnCpuMesh
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    mapping.remove_non_pickleables = once_a_config(mapping.remove_non_pickleables)
    megatron_fsdp = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    importlib.import_module(f"{megatron_fsdp}.param_and_grad_buffer")._coalescing_manager = in_order


class OnImport(importlib.abc.MetaPathFinder):
    """Installs the replacement as the backend is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != BACKEND:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = InstallsFirst(name, spec.loader.path)
        return spec


class InstallsFirst(importlib.machinery.SourceFileLoader):
    """Installs the replacement, and then loads the backend.

    Finders are called with a lock that every thread needs to import anything, and Megatron is imported in a thread.
    """

    def exec_module(self, module):
        install()
        super().exec_module(module)


def install_with_backend():
    """Installs the replacement in a process that uses the backend, and leaves others as they are.

    A hook of Ray's workers, which all run it.
    """
    if BACKEND in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, OnImport())


def _as_numpy(t, as_numpy=False, record_stream=False):
    return t.numpy() if torch.is_tensor(t) and as_numpy else t
