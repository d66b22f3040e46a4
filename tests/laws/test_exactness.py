"""The law of exactness, and what breaks it: each mutant changes one side only, and the right module is named."""

import functools

import attrs
import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from verl_fn.backends.hf import exact
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler import decoder as decoder_module
from verl_fn.backends.sampler import engine as engine_module
from verl_fn.state import Batch, Key, Sampling
from verl_fn.steps import adamw, aggregate, cross_entropy, entropy
from verl_fn.testing import LawViolation, check_exact

PROMPTS = [[1, *(4 + (i * j) % 9 for j in range(1 + (5 * i) % 40))] for i in range(1, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("exact"), "qwen3")


def made(path, arch, **options):
    return new_model(path, chars="abcdefghi", arch=arch, hidden_size=32, num_hidden_layers=2, **options)


def lively(trainer):
    """A state whose distributions are neither flat nor certain."""
    state, key = trainer.load_pretrained(), Key.from_seed(3).generator()
    noise = {n: 0.15 * torch.randn(t.shape, generator=key) for n, t in state.params.items()}
    params = attrs.evolve(state.params, leaves={n: t + noise[n] for n, t in state.params.items()})
    return attrs.evolve(state, params=params)


def check(folder, trainer_options=(), **options):
    trainer = Local(folder, adamw(1e-2), exact=True, **dict(trainer_options))
    return check_exact(trainer, Sampler(folder, slots=16, exact=True), PROMPTS, state=lively(trainer), **options)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama", "mistral"])
def test_families(arch, tmp_path):
    # An odd width, since vectors of a CPU leave a rest of it.
    options = {"sliding_window": 7} if arch == "mistral" else {"intermediate_size": 41}
    assert check(made(tmp_path, arch, **options), {"max_tokens": 200}.items(), updates=1) > 500


@pytest.mark.parametrize(
    "options",
    [
        {"row_layout": "padded"},
        {"lora": Lora(3)},
        {"checkpointing": True, "max_tokens": 90},
        {"row_layout": "padded", "lora": Lora(3, targets=("q_proj", "down_proj")), "checkpointing": True},
    ],
    ids=str,
)
def test_layouts_adapters_and_checkpointing(options, folder):
    assert check(folder, options.items(), updates=1) > 500


def test_a_restored_state(folder, tmp_path):
    one, other = Local(folder, adamw(1e-2), exact=True), Local(folder, adamw(1e-2), exact=True)
    one.save(lively(one), tmp_path / "saved")
    check_exact(other, Sampler(folder, exact=True), PROMPTS, state=other.restore(tmp_path / "saved"), updates=1)


def test_log_probs_do_not_depend_on_the_micro_batch(folder):
    trainer = Local(folder, adamw(1e-2), exact=True)
    state = lively(trainer)
    batch = Batch.from_rows(PROMPTS, {"response_mask": [[0.0] + [1.0] * (len(p) - 1) for p in PROMPTS]})
    whole = trainer.forward(state.params, batch, ("logprobs", "entropy")).logprobs
    for budget in (41, 100, 170):
        trainer.max_tokens = budget
        assert torch.equal(trainer.forward(state.params, batch).logprobs, whole)
    order = list(range(len(batch)))[::-1]
    turned = trainer.forward(state.params, batch.take(order)).logprobs
    assert torch.equal(torch.cat(turned.split(batch.lengths[order].tolist())[::-1]), whole)


@pytest.mark.parametrize("loss", [cross_entropy(), cross_entropy() - 0.5 * entropy()], ids=["nll", "with entropy"])
def test_gradients_are_those_of_other_kernels(folder, loss):
    """Forward kernels of one's own, and torch's own gradient."""
    batch = aggregate(
        Batch.from_rows(PROMPTS[4:9], {"response_mask": [[0.0] + [1.0] * (len(p) - 1) for p in PROMPTS[4:9]]})
    )
    for lora in (None, Lora(3)):
        trainers = [Local(folder, adamw(1e-2), exact=on, lora=lora) for on in (False, True)]
        state = lively(trainers[0])
        plain, ours = (t.forward_backward(state, batch, loss)[0] for t in trainers)
        assert float((ours + plain.scale(-1.0)).global_norm() / plain.global_norm()) < 1e-5
    pure = trainers[1].loss_fn(batch, loss)
    derived, _ = torch.func.grad(pure, has_aux=True)(state.params)
    assert all(torch.allclose(derived[n], plain[n], atol=1e-5) for n in plain)


# Each mutant changes the trainer or the engine, and says which module is named.


def on_trainer(name, forward):
    """Replaces the forward pass of a module of the trainer."""

    def mutate(trainer, engine, monkeypatch):
        trainer._built().model.get_submodule(name).forward = functools.partial(
            forward, trainer._built().model.get_submodule(name)
        )

    return mutate


def split_k(layer, x):
    half = x.shape[-1] // 2
    return linear(x[..., :half], layer.weight[:, :half]) + linear(x[..., half:], layer.weight[:, half:])


def cast_moved(norm, x):
    wide = x.float()
    return (norm.weight * wide) * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def other_attention(trainer, engine, monkeypatch):
    def attend(q, keys, values, positions, scaling, window):
        mask = torch.arange(keys.shape[2]) <= positions[:, None]
        out = scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask[:, None, None], scale=scaling, enable_gqa=True
        )
        return out[:, :, 0]

    monkeypatch.setattr(decoder_module.exact, "step_attention", attend)


def other_order_of_the_vocabulary(trainer, engine, monkeypatch):
    own = engine_module.token_logprobs

    def chunked(logits, tokens, temperature):
        if temperature != 1.0:
            return own(logits, tokens, temperature)
        parts = torch.stack([part.logsumexp(-1) for part in logits.split(3, -1)], -1)
        return logits.gather(1, tokens[:, None])[:, 0] - parts.logsumexp(-1)

    monkeypatch.setattr(engine_module, "token_logprobs", chunked)


def temperature_on_one_side(trainer, engine, monkeypatch):
    own = engine_module.token_logprobs
    monkeypatch.setattr(engine_module, "token_logprobs", lambda logits, tokens, _: own(logits, tokens, 1.0))


def stale_weight(trainer, engine, monkeypatch):
    own, stale = engine.decoder.write, {}

    def write(chunk):
        if chunk.name == "model.layers.1.mlp.up_proj.weight":
            chunk = attrs.evolve(chunk, values=stale.setdefault(chunk.start, chunk.values.clone()))
        own(chunk)

    monkeypatch.setattr(engine.decoder, "write", write)


MUTANTS = {
    "another attention": (other_attention, "model.layers.0.self_attn.o_proj"),
    "split-K": (on_trainer("model.layers.1.mlp.down_proj", split_k), "model.layers.1.mlp.down_proj"),
    "a cast moved": (
        on_trainer("model.layers.1.post_attention_layernorm", cast_moved),
        "model.layers.1.post_attention_layernorm",
    ),
    "the vocabulary in chunks": (other_order_of_the_vocabulary, "log_probs"),
    "a temperature on one side": (temperature_on_one_side, "log_probs"),
    "a stale weight": (stale_weight, "model.layers.1.mlp.up_proj"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_with_its_module(name, folder, monkeypatch):
    mutate, module = MUTANTS[name]
    trainer, engine = Local(folder, adamw(1e-2), exact=True), Sampler(folder, slots=5, exact=True)
    state = lively(trainer)
    mutate(trainer, engine, monkeypatch)
    with pytest.raises(LawViolation, match=rf"first in {module}\b") as error:
        check_exact(trainer, engine, PROMPTS, state=state)
    assert error.value.law == "Exactness"


def test_kernels_that_are_not_exact_are_found(folder):
    trainer = Local(folder, adamw(1e-2))
    with pytest.raises(LawViolation, match="first in"):
        check_exact(trainer, Sampler(folder, exact=True), PROMPTS, state=lively(trainer), samplings=[Sampling(9)])


def test_what_cannot_be_exact_is_refused(tmp_path, folder):
    other = made(tmp_path, "gpt2")
    for make in (
        lambda: Local(other, adamw(1e-2), exact=True).load_pretrained(),
        lambda: Sampler(other, exact=True),
    ):
        with pytest.raises(exact.ExactError, match="the model type is gpt2"):
            make()
    with pytest.raises(exact.ExactError, match="on a CPU it computes in bfloat16"):
        Sampler(folder, dtype="bfloat16", exact=True)
    with pytest.raises(ValueError, match="in_flight=False"):
        Sampler(folder, in_flight=True, exact=True)


def test_small_products_on_a_gpu_have_small_tiles(monkeypatch):
    """On one with 132 processors; tiles that would add in another order are not used."""
    pytest.importorskip("triton")
    from verl_fn.backends.hf import kernels

    def tiles(T, N, dtype=torch.bfloat16):
        return kernels._tiles(T, N, 896, dtype, torch.device("cuda"))

    monkeypatch.setattr(kernels, "processors", lambda device: 132)
    monkeypatch.setattr(kernels, "_same_order", lambda *args: True)
    assert tiles(512, 8960) is kernels.MANY and tiles(512, 1536) is kernels.TALL and tiles(256, 1536) is kernels.SOME
    assert tiles(128, 1536) is kernels.FEW and tiles(64, 151936) is kernels.FEW
    assert tiles(1, 8, torch.float32) is kernels.WIDE
    monkeypatch.setattr(kernels, "_same_order", lambda *args: False)
    assert tiles(64, 8960) is tiles(256, 1536) is kernels.MANY
