"""What the tests of ``verl-fn levels`` run on a rank that stays: parts of levels, with a planted fault or without."""

import contextlib
import errno
import functools
import json
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

import attrs
import torch
from megatron.bridge.models.conversion import param_mapping
from megatron.bridge.models.llama.llama_bridge import LlamaBridge

from verl_fn import build
from verl_fn.backends.hf import lora
from verl_fn.backends.hf.vision import Seen
from verl_fn.backends.megatron import saving
from verl_fn.backends.megatron.backend import Megatron
from verl_fn.backends.megatron.model import Sight
from verl_fn.backends.sampler import Sampler
from verl_fn.levels import parity, provenance, training, worker
from verl_fn.levels.subject import Request
from verl_fn.runs import loop
from verl_fn.state import Grads, tree
from verl_fn.steps.optim.optimizers import AdamState

FAULTS = {}


def part(request, name, folder, fault=None):
    """Runs a part as its process would, and returns the outcome as a table."""
    Path(folder).mkdir(parents=True)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return attrs.asdict(worker.run_part(Request(**json.loads(request)), name, Path(folder)))


def fault(make):
    FAULTS[make.__name__] = make
    return make


def around(owner, name, change):
    """Replaces a function by ``change(inner, *args)``."""
    inner = getattr(owner, name)
    return mock.patch.object(
        owner, name, functools.wraps(inner)(lambda *args, **options: change(inner, *args, **options))
    )


def updated(changed):
    """A fault of updates: ``changed(old, new)`` gives the leaf that an update makes in place of ``new``, by name."""

    def change(inner, self, optimizer, state, grads, donate):
        before = {name: t.clone() for name, t in state.params.items()}
        state, metrics = inner(self, optimizer, state, grads, donate)
        leaves = {name: changed(name, before[name], t, self) for name, t in state.params.items()}
        return attrs.evolve(state, params=attrs.evolve(state.params, leaves=leaves)), metrics

    return around(Megatron, "_updated", change)


def graded(changed):
    """A fault of gradients: ``changed(name, g, backend)`` gives another gradient."""

    def change(inner, self, state, batch, loss, wanted):
        grads, metrics = inner(self, state, batch, loss, wanted)
        return Grads({name: changed(name, g, self) for name, g in grads.items()}), metrics

    return around(Megatron, "_forward_backward", change)


def of_actor(backend):
    return backend._how.head == "lm"


@fault
def frozen_adapters():
    return updated(lambda name, old, new, b: old if of_actor(b) and "lora_" in name else new)


@fault
def one_frozen_adapter():
    return updated(lambda name, old, new, b: old if "layers.0" in name and "o_proj.lora_A" in name else new)


@fault
def changed_base():
    return updated(lambda name, old, new, b: new * 1.001 if of_actor(b) and "down_proj.weight" in name else new)


@fault
def changed_norms():
    return updated(lambda name, old, new, b: new + 1e-3 if of_actor(b) and name == "model.norm.weight" else new)


@fault
def frozen_critic():
    return updated(lambda name, old, new, b: new if of_actor(b) else old)


@fault
def frozen_value_head():
    return updated(lambda name, old, new, b: old if "score" in name else new)


@fault
def nan_gradients():
    return graded(lambda name, g, b: g * torch.nan if of_actor(b) else g)


@fault
def nan_in_one_gradient_of_the_critic():
    return graded(lambda name, g, b: g.index_fill(0, torch.tensor(0), torch.nan) if "score" in name else g)


@fault
def few_layouts():
    """No fault: one layout of level 2, and of level 3 the run alone."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(parity, "DENSE", parity.DENSE[2:3]))
    stack.enter_context(mock.patch.object(parity, "SHARDED", ()))
    return stack


@fault
def frozen_parameter():
    stack = few_layouts()
    stack.enter_context(
        updated(lambda name, old, new, b: old if name.endswith("layers.1.mlp.down_proj.weight") else new)
    )
    return stack


@fault
def router_without_gradient():
    return graded(lambda name, g, b: g * 0 if name.endswith("gate.weight") else g)


@fault
def tower_without_gradient():
    return graded(lambda name, g, b: g * 0 if ".visual." in name else g)


@fault
def features_in_another_order():
    """The trainer sees an image upside down, and the engine does not."""

    def change(inner, self, body, dtype):
        features, deep = inner(self, body, dtype)
        return (features.flip(0) if isinstance(body, Sight) else features), deep

    return around(Seen, "features", change)


@fault
def stale_weights():
    """The engine takes the version of a later publication, and keeps the weights that it had."""

    def change(inner, self, version, weights):
        if self.version is None:
            inner(self, version, weights)
        self.version = version

    return around(Sampler, "publish", change)


@fault
def other_weights():
    """The engine computes with weights that are off by a thousandth."""

    def change(inner, self, version, weights):
        inner(self, version, weights)
        held = self.decoder._weights
        self.decoder._weights = held._replace(norm=held.norm * 1.001)

    return around(Sampler, "publish", change)


@fault
def without_reference():
    return around(training, "plan_of", lambda inner, *args: inner(*args, "algorithm.use_kl_loss=false"))


@fault
def without_verification():
    return around(training, "plan_of", lambda inner, *args: inner(*args, "rollout.verify=first"))


@fault
def one_step_only():
    return around(training, "plan_of", lambda inner, *args: inner(*args, "trainer.total_training_steps=1"))


def mapped(change):
    """A fault of Llama's mappings: ``change(mappings)`` gives others."""

    def registry(inner, self):
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

        return MegatronMappingRegistry(*change(list(inner(self).mappings)))

    return around(LlamaBridge, "mapping_registry", registry)


def is_of(mapping, text):
    return text in str(mapping.hf_param)


@fault
def dropped_mapping():
    return mapped(lambda mappings: [m for m in mappings if not is_of(m, "down_proj")])


@fault
def swapped_gate_and_up():
    def change(mappings):
        kept = [m for m in mappings if not is_of(m, "gate_proj")]
        return [*kept, param_mapping.GatedMLPMapping(
            megatron_param="decoder.layers.*.mlp.linear_fc1.weight", gate="model.layers.*.mlp.up_proj.weight",
            up="model.layers.*.mlp.gate_proj.weight",
        )]  # fmt: skip

    return mapped(change)


@fault
def swapped_norms():
    def change(mappings):
        names = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
        made = []
        for m in mappings:
            here = next((name for name in names if is_of(m, name)), None)
            made.append(m if here is None else param_mapping.AutoMapping(
                megatron_param=m.megatron_param, hf_param=m.hf_param.replace(here, names[here])
            ))  # fmt: skip
        return made

    return mapped(change)


def provided(**fields):
    def change(inner, self, hf):
        provider = inner(self, hf)
        for name, value in fields.items():
            setattr(provider, name, value)
        return provider

    return around(LlamaBridge, "provider_bridge", change)


@fault
def wrong_rotary_base():
    return provided(rotary_base=17.0)


@fault
def wrong_activation():
    return provided(activation_func=torch.nn.functional.gelu)


@fault
def wrong_layers():
    return provided(num_layers=1)


@fault
def provider_that_raises():
    def change(inner, self, hf):
        raise KeyError("rope_theta")

    return around(LlamaBridge, "provider_bridge", change)


def restored(change):
    return around(saving, "restore", lambda inner, *args: change(inner(*args)))


@fault
def resume_without_schedule():
    def change(state):
        """AdamW's count of updates is its place in the schedule."""
        parts = (attrs.evolve(part, count=0) if isinstance(part, AdamState) else part for part in state.optimizer)
        return attrs.evolve(state, optimizer=tuple(parts))

    return restored(change)


@fault
def resume_without_moments():
    return restored(lambda state: attrs.evolve(state, optimizer=tree.map_tensors(torch.zeros_like, state.optimizer)))


@fault
def resume_in_half_precision():
    def change(state):
        leaves = {name: t.bfloat16().float() for name, t in state.params.items()}
        return attrs.evolve(state, params=attrs.evolve(state.params, leaves=leaves))

    return restored(change)


@fault
def resume_with_other_data():
    def change(inner, folder, plan, w):
        state = inner(folder, plan, w)
        return attrs.evolve(state, cursor=state.cursor + 1)

    return around(loop, "restored_state", change)


@fault
def adapter_of_other_scale():
    def change(inner, tensors, adapters, *args):
        return inner(tensors, attrs.evolve(adapters, lora=attrs.evolve(adapters.lora, alpha=1.0)), *args)

    return around(lora, "write_adapter", change)


@fault
def merged_without_adapters():
    def change(inner, source, out, dtype=None):
        base = json.loads((Path(source) / "lora.json").read_text())["base_model"]
        return inner(base, out, dtype)

    return around(training, "export_model", change)


@fault
def no_replay():
    """Routers choose experts themselves in updates."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    return mock.patch.object(RouterReplay, "set_router_replay_action", lambda self, action: None)


def scale():
    graded(lambda name, g, b: g * 1.01 if b.layout.rank == 1 else g).start()


@fault
def wrong_on_one_rank():
    """A fault in the ranks of layouts; each rank is a process of its own."""
    here = Path(__file__).parent
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(here)!r}); import levels_cases; levels_cases.scale(); "
        "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    file = Path(tempfile.mkdtemp()) / "python"
    file.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c {shlex.quote(code)} "$@"\n')
    file.chmod(0o700)
    stack = few_layouts()
    stack.enter_context(mock.patch.object(sys, "executable", str(file)))
    return stack


# What follows says nothing about the provider.


@fault
def missing_modelopt():
    def change(inner):
        raise ModuleNotFoundError("No module named 'modelopt'", name="modelopt")

    return around(provenance, "load_bridge", change)


@fault
def full_disk():
    def change(inner, *args, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "/home/me/.cache")

    return around(saving, "save", change)


@fault
def engine_that_does_not_start():
    def change(inner, *args):
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    return around(build, "rollout", change)


@fault
def reward_that_does_not_load():
    def change(inner, *args, **options):
        raise ImportError("cannot import name 'score' from 'rewards'")

    return around(build, "reward", change)


@fault
def rocr_beside_cuda():
    def change(inner, *args):
        raise ValueError("Please don't set ROCR_VISIBLE_DEVICES when HIP/CUDA_VISIBLE_DEVICES is set.")

    return around(build, "rollout", change)


@fault
def bridge_of_another_version():
    from verl_fn.backends.megatron import importing

    return mock.patch.dict(importing.TESTED, {"megatron-bridge": ("0.1",)})
