"""What the ranks of test_megatron_publication.py do; each function runs on all of them together."""

import contextlib

import torch
import torch.distributed as dist
from megatron_cases import megatron
from rank_cases import KEY, optimizer

from verl_fn.backends.local import Local
from verl_fn.backends.megatron import gathering
from verl_fn.backends.megatron.gathering import Parts
from verl_fn.state import Params

EXCHANGES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "broadcast_object_list",
    "reduce_scatter_tensor",
)  # fmt: skip


@contextlib.contextmanager
def replaced(owner, **functions):
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


def exchanges(folder, options, nbytes):
    """A publication with buckets of so many bytes, after a first one.

    Returns:
        How many tensors it has, the exchanges between ranks, and the bytes and the parameters of each bucket.
    """
    backend, calls, sizes = megatron(folder, options), [], []
    state = backend.init(KEY)
    real, bucket = Parts.exchanged, Parts.buckets

    def exchanged(parts, numbers, leaves):
        sizes.append((4 * sum(part.shape.numel() for i in numbers for part in parts.every[i]), len(numbers)))
        return real(parts, numbers, leaves)

    def counted(name):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    with replaced(Parts, buckets=lambda parts, numbers, usual: bucket(parts, numbers, nbytes)):
        source = backend.weights(state.params)
        first = dict(source.read())
        with replaced(Parts, exchanged=exchanged), replaced(dist, **{name: counted(name) for name in EXCHANGES}):
            second = dict(source.read())
    assert list(first) == list(second) == [spec.name for spec in source.specs]
    assert all(torch.equal(t, second[name]) for name, t in first.items())
    return len(second), calls, sizes


def bits(folder, options, broken=None):
    """Whether every bit of weights with negative zeros, infinities and NaNs comes out as it went in."""
    backend, one = megatron(folder, options), Local(folder, optimizer())
    whole, generator = {}, KEY.generator()
    for name, t in one.init(KEY).params.items():
        special = torch.tensor([-0.0, float("inf"), float("nan"), 1e-42, 1.5])
        whole[name] = special[torch.randint(0, 5, t.shape, generator=generator)]
    params = Params(backend.from_named(whole))
    with BROKEN[broken]() if broken else contextlib.nullcontext():
        found = dict(backend.named(params))
    assert found.keys() == whole.keys()
    return all(torch.equal(t.view(torch.int32), found[name].view(torch.int32)) for name, t in whole.items())


def adds_numbers():
    """Adds numbers, not bits: -0.0 becomes 0.0."""
    real = dist.all_reduce
    return replaced(dist, all_reduce=lambda t, *args, **kwargs: real(t.view(torch.float32), *args, **kwargs))


def swaps_shards():
    """Gives a mapping the parts of ranks in another order."""
    real = gathering._without_exchange

    def swapped(gather):
        return real(lambda t: gather(t)[::-1])

    return replaced(gathering, _without_exchange=swapped)


def other_stage():
    """Leaves out what another rank has written."""
    return replaced(dist, all_reduce=lambda *args, **kwargs: None)


BROKEN = {"adds_numbers": adds_numbers, "swaps_shards": swaps_shards, "other_stage": other_stage}
