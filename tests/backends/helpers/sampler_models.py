"""Models for tests of the embedded sampler, with lively distributions."""

import attrs
import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, pack, requests_for

EOS = 2
KEY = Key.from_seed(7)
# Of many lengths, one of them twice.
PROMPTS = [[1, *(4 + (i * j) % 9 for j in range(1 + (5 * i) % 11))] for i in range(1, 12)]
SAMPLINGS = [
    Sampling(12, n=2),
    Sampling(12, n=2, temperature=0.4),
    Sampling(12, n=2, temperature=1.7),
    Sampling(12, n=2, top_k=3),
    Sampling(12, n=2, top_p=0.7),
    Sampling(12, n=2, temperature=0.8, top_k=5, top_p=0.9),
    Sampling(12, temperature=0.0, top_k=3),
]


def draw(sampler, prompts, sampling, key=KEY, ids=None, version=None):
    """The packed responses of an engine."""
    return pack(sampler.generate(requests_for(prompts, sampling, key, ids), version=version))


@attrs.frozen
class Made:
    """A folder, weights for it with lively distributions, and a plain model with them."""

    folder: object
    weights: dict
    plain: object

    def sampler(self, **kwargs):
        sampler = Sampler(self.folder, **kwargs)
        sampler.publish(3, Weights.of(self.weights))
        return sampler


def make(folder, arch, **overrides):
    from transformers import AutoModelForCausalLM

    from verl_fn.backends.hf.folder import quiet

    new_model(folder, chars="abcdefghi", arch=arch, hidden_size=32, **overrides)
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    for p in plain.parameters():
        p.data += 0.15 * torch.randn(p.shape, generator=generator)
    return Made(folder, {n: p.detach() for n, p in plain.named_parameters()}, plain)


def responses(batch):
    """(prompt's id, number of the sample) -> response tokens."""
    found, seen = {}, {}
    for row, group, length in zip(
        batch.rows(), batch["group"].tolist(), batch["prompt_length"].tolist(), strict=True
    ):
        seen[group] = seen.get(group, -1) + 1
        found[group, seen[group]] = row[length:].tolist()
    return found
