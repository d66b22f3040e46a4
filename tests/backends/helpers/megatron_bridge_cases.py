"""Functions that ranks run: what a bridge or its user may do that the Megatron backend refuses."""

import contextlib
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from megatron_cases import error_of, megatron
from rank_cases import KEY

from verl_fn.backends.megatron import layout
from verl_fn.backends.megatron.importing import load_bridge
from verl_fn.steps import loss, ppo_clip
from verl_fn.testing import tiny_batch


@contextlib.contextmanager
def mapped(cls_of):
    """Replaces the mapping of the last norm in Bridge's Qwen3."""
    from megatron.bridge.models.conversion import param_mapping
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    cls, registry = cls_of(param_mapping), Qwen3Bridge.mapping_registry

    def replaced(self):
        mappings = registry(self).mappings
        return MegatronMappingRegistry(
            *(
                cls(m.megatron_param, m.hf_param) if m.megatron_param == "decoder.final_layernorm.weight" else m
                for m in mappings
            )
        )

    with mock.patch.object(Qwen3Bridge, "mapping_registry", replaced):
        yield


def scaled(param_mapping):
    class Scaled(param_mapping.AutoMapping):
        def hf_to_megatron(self, weight, module):
            return super().hf_to_megatron(weight * 4.0, module)

        def megatron_to_hf(self, weight, module):
            return {name: t / 4.0 for name, t in super().megatron_to_hf(weight, module).items()}

    return Scaled


def subclass(param_mapping):
    return type("MyNorm", (param_mapping.RMSNorm2ZeroCenteredRMSNormMapping,), {})


def computing_mappings(folder, options):
    backend = megatron(folder, options)
    load_bridge()
    errors = []
    for cls_of in (scaled, subclass):
        with mapped(cls_of):
            errors.append(error_of(lambda: megatron(folder, options).init(KEY)))
    backend.init(KEY)
    return errors


def hooks(folder):
    """How often a hook that a bridge registers is called."""
    backend, called = megatron(folder, {}), []
    load_bridge()
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    inside = Qwen3Bridge.provider_bridge

    def provider_bridge(self, *args, **kwargs):
        provider = inside(self, *args, **kwargs)
        provider.register_pre_wrap_hook(lambda model: called.append(1) or model)
        return provider

    with mock.patch.object(Qwen3Bridge, "provider_bridge", provider_bridge):
        backend.init(KEY)
    return len(called)


def calls_inside_a_loss(folder, options):
    """Errors of a loss that calls its backend, and whether the backend computes what it did before."""
    backend, batch = megatron(folder, options), tiny_batch(rows=8)
    state, other = backend.init(KEY), backend.init(KEY.fold_in("other"))
    before = backend.forward_backward(state, batch, ppo_clip())[0]

    @loss(needs=("logprobs",))
    def nested(outputs, part):
        backend.forward(other.params, batch)
        return outputs.logprobs * part["response_mask"], {}

    error = error_of(lambda: backend.forward_backward(state, batch, nested))
    after = backend.forward_backward(state, batch, ppo_clip())[0]
    return error, all(torch.equal(before[name], after[name]) for name in before)


def other_shapes(folder):
    backend = megatron(folder, {})
    whole = dict(backend.named(backend.init(KEY).params))
    name, t = next(iter(whole.items()))
    return [
        error_of(lambda s=s: backend.from_named({**whole, name: s})) for s in (t[:3], t[:, :1], torch.cat([t, t]))
    ]


def other_model(folder):
    return error_of(lambda: megatron(folder, {}).init(KEY))


def declared(folder, asked):
    """What backends warn of: one of a config with a router's loss, and one whose user asks for it."""
    warned = []
    for options in ({}, {"provider": asked}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            megatron(folder, options).init(KEY)
        warned.append([str(one.message) for one in caught if "router" in str(one.message)])
    return warned


def timeout(folder):
    """The timeout of the default process group, and that of a group of the layout."""
    made = megatron(folder, {"tp": 2}).layout
    group = made.groups.tp._get_backend(torch.device("cpu"))
    assert isinstance(layout._timeout(), timedelta) and dist.get_world_size() == 2
    return layout._timeout().total_seconds(), group.options._timeout.total_seconds()
