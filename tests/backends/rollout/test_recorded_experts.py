"""The experts of sampled tokens: those of the embedded engine, beside a plain forward, and where they are kept."""

import attrs
import pytest
import torch
from sampler_models import KEY, PROMPTS, make

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.environments.rendering import TokenRow
from verl_fn.state import Sample, requests_for
from verl_fn.testing.rollout_case import RolloutCase
from verl_fn.testing.rollouts import check_routes

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SAMPLING = Sampling(5, n=2)


def picked(plain, tokens):
    """The experts that the layers of a plain model pick for a row, each layer's in order."""
    found = []
    gates = [layer.mlp.gate for layer in plain.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda module, args, outputs: found.append(outputs[2])) for gate in gates]
    with torch.no_grad():
        plain(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


def test_they_are_those_of_a_plain_forward(tmp_path):
    """Three rows at a time, so that rows wait and move to other places; the second of three layers has no experts."""
    made = make(tmp_path, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], **SIZES)
    engine = made.sampler(slots=3, routed_experts=True)
    requests = requests_for(PROMPTS[:4], SAMPLING, KEY)
    samples = engine.generate(requests, version=3)
    check_routes(RolloutCase(engine, None, PROMPTS, SAMPLING, 1e-5, KEY, False, (), None), samples)
    streamed = {(s.request, s.number): s for s in engine.stream(requests)}
    distinct = set()
    for sample in samples:
        assert sample.routed_experts.dtype == torch.uint8
        want = picked(made.plain, torch.cat([sample.prompt, sample.tokens]))[:-1]
        assert torch.equal(sample.routed_experts[:-1].sort(-1).values.long(), want)
        assert torch.equal(sample.routed_experts[-1], sample.routed_experts[-2])
        assert torch.equal(sample.routed_experts, streamed[sample.request, sample.number].routed_experts)
        distinct |= {tuple(pair) for pair in want.flatten(0, 1).tolist()}
    assert len(distinct) > 3


def test_what_cannot_be_recorded_is_refused(tmp_path):
    dense = new_model(tmp_path / "dense", chars="ab")
    with pytest.raises(ModelError, match="has no experts, so there is no routing to record"):
        Sampler(dense, routed_experts=True)
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1}
    other = new_model(tmp_path / "other", chars="ab", arch="granitemoe", **sizes)
    with pytest.raises(
        ModelError, match=r"no module that is called with top_k_index; set actor\.router_replay\.mode"
    ):
        Sampler(other, routed_experts=True)


def sample_of(prompt, tokens, start):
    """A sample in which token i of the row has the expert ``start + i``."""
    routed = start + torch.arange(len(prompt) + len(tokens))[:, None, None]
    fields = torch.zeros(len(tokens))
    sample = Sample(0, 0, torch.tensor(prompt), torch.tensor(tokens), fields, None, fields + 1, fields.long(), "stop")
    return attrs.evolve(sample, routed_experts=torch.cat([routed[:-1], routed[-2:-1]]))


def test_tokens_of_conversations_keep_the_experts_with_which_they_were_computed_first():
    row = TokenRow([5, 6])
    row.draw(sample_of([5, 6], [7, 2], 0))
    row.write([8, 9], 0)
    # The second call computes the row again, where rounding may decide otherwise.
    row.draw(sample_of([5, 6, 7, 2, 8, 9], [3, 2], 20))
    assert row.routes().flatten().tolist() == [0, 1, 2, 23, 24, 25, 26, 26]
    row.write([8], 0)
    assert row.routes().flatten().tolist() == [0, 1, 2, 23, 24, 25, 26, 26, 26]
    assert TokenRow([5]).routes() is None
