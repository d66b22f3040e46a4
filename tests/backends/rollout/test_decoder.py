"""The fast decoder, the general one and a plain transformers forward say the same."""

import copy

import attrs
import pytest
import torch

from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.sampler.decoder import GeneralDecoder
from verl_fn.backends.sampler.engine import decoder_for
from verl_fn.backends.sampler.llama import LlamaDecoder, _product, misfit
from verl_fn.backends.serving import model_of
from verl_fn.backends.weight_sync import Weights, receive
from verl_fn.state import Batch

CPU = torch.device("cpu")
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}
YARN = {"rope_type": "yarn", **SCALED}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

FAST = {
    "llama": {},
    "llama-biased-untied": {"attention_bias": True, "tie_word_embeddings": False},
    "llama-llama3-rope": {"rope_parameters": LLAMA3},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-large-heads": {"head_dim": 32, "num_key_value_heads": 4},
    "qwen2": {},
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen2-yarn": {"rope_parameters": YARN},
    "qwen3": {},
    "qwen3-biased-linear-rope": {"attention_bias": True, "rope_parameters": LINEAR},
    "mistral": {"sliding_window": None},
    "mistral-sliding": {"sliding_window": 4},
}
GENERAL = {
    "gpt_neox": {"classifier_dropout": 0.0},
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "olmo3-sliding": {"sliding_window": 4},
    "gemma": {},
    "qwen3_moe": {},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-gelu": {"hidden_act": "gelu"},
}
PROMPTS = [[1, 4, 5, 6, 7, 8, 9, 10, 11, 4], [1, 9], [1, 6, 6, 7, 5]]
ANSWERS = [[5, 6, 7, 4], [8, 8, 9, 10], [4, 11, 10, 9]]


def load(decoder, weights):
    """Write whole weights into a decoder."""
    decoder.begin()
    receive(Weights.of(weights), decoder.write)
    decoder.finish()


@attrs.frozen
class Case:
    """A folder, weights for it in which no factor is one, and a plain model with them."""

    folder: str
    weights: dict
    plain: object


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    made = {}

    def make(name):
        from transformers import AutoModelForCausalLM

        from verl_fn.backends.hf.folder import quiet

        if name not in made:
            folder = new_model(
                tmp_path_factory.mktemp(name),
                chars="abcdefgh",
                arch=name.split("-")[0],
                hidden_size=32,
                **(FAST | GENERAL)[name],
            )
            with quiet():
                plain = AutoModelForCausalLM.from_pretrained(folder).eval()
            generator = torch.Generator().manual_seed(0)
            for p in plain.parameters():
                p.data += 0.3 * torch.randn(p.shape, generator=generator)
            made[name] = Case(folder, {n: p.detach() for n, p in plain.named_parameters()}, plain)
        return made[name]

    return make


def loaded(kind, case, dtype=torch.float32):
    decoder = kind(*model_of(case.folder), CPU, dtype)
    load(decoder, case.weights)
    return decoder


def expected(case):
    """What plain forwards say after each prompt and each token of its answer, ``[row, 5, V]``."""
    with torch.no_grad():
        whole = [
            case.plain(torch.tensor([p + a])).logits[0, len(p) - 1 :] for p, a in zip(PROMPTS, ANSWERS, strict=True)
        ]
    return torch.stack(whole).log_softmax(-1)


@torch.inference_mode()
def decoded(decoder, slots=(0, 1, 2), room=3, length=20):
    """The same through a cache: row i of the prompts goes into slot ``slots[i]``."""
    decoder.reserve(room, length)
    found = torch.empty(3, 5, decoder.vocab)
    found[:, 0] = decoder.prefill(Batch.from_rows(PROMPTS), torch.tensor(slots))
    order = sorted(range(3), key=lambda row: slots[row])
    for i in range(4):
        tokens = torch.tensor([ANSWERS[row][i] for row in order])
        positions = torch.tensor([len(PROMPTS[row]) + i for row in order])
        found[order, i + 1] = decoder.step(tokens, positions, int(positions.max()) + 1)
    return found.log_softmax(-1).clone()


@pytest.mark.parametrize("name", [*FAST, *GENERAL])
def test_decoders_agree_with_plain_forwards(case, name):
    """Ragged prompts out of order, then steps: log-probs within 1e-4, and the same greedy tokens."""
    this = case(name)
    want = expected(this)
    kinds = (LlamaDecoder, GeneralDecoder) if name in FAST else (GeneralDecoder,)
    for kind in kinds:
        got = decoded(loaded(kind, this), slots=(2, 0, 1))
        assert (got - want).abs().max() < 1e-4
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert want.exp().max() > 0.5, "a flat distribution would hide differences"
    assert type(decoder_for(this.folder, CPU, torch.float32)) is kinds[0]


@pytest.mark.parametrize("name", ["qwen2-sliding", "mistral-sliding", "olmo3-sliding"])
def test_windows_matter_in_these_tests(case, name):
    this = case(name)
    want = expected(this)
    wide = copy.deepcopy(case({"olmo3-sliding": "olmo2"}.get(name, name.split("-")[0])).plain)
    with torch.no_grad():
        wide.load_state_dict(this.plain.state_dict())
        logits = wide(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert (logits.log_softmax(-1) - want[0, 0]).abs().max() > 0.01


@pytest.mark.parametrize("kind", [LlamaDecoder, GeneralDecoder])
def test_a_copied_slot_is_the_row(case, kind):
    this = case("qwen3")
    decoder = loaded(kind, this)
    with torch.inference_mode():
        decoder.reserve(4, 20)
        decoder.prefill(Batch.from_rows(PROMPTS), torch.tensor([1, 2, 3]))
        decoder.copy([3, 1], [0, 1], 10)
        logits = decoder.step(torch.tensor([ANSWERS[2][0], ANSWERS[0][0]]), torch.tensor([5, 10]), 11)
    want = expected(this)[[2, 0], 1]
    assert (logits.log_softmax(-1) - want).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [LlamaDecoder, GeneralDecoder])
def test_nothing_is_seen_of_rows_that_were_there_before(case, kind):
    this = case("qwen2")
    decoder = loaded(kind, this)
    with torch.inference_mode():
        decoder.reserve(3, 40)
        decoder.prefill(Batch.from_rows([[1] + [5] * 38] * 3), torch.arange(3))
    assert (decoded(decoder) - expected(this)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [LlamaDecoder, GeneralDecoder])
def test_caches_grow_and_weights_are_replaced(case, kind):
    this = case("llama")
    decoder = loaded(kind, this)
    with torch.inference_mode():
        decoder.reserve(1, 4)
        decoder.prefill(Batch.from_rows([[1, 4]]), torch.tensor([0]))
    first = decoded(decoder)
    assert (first - expected(this)).abs().max() < 1e-4
    load(decoder, {name: t * 0.5 for name, t in this.weights.items()})
    assert (decoded(decoder) - first).abs().max() > 0.1
    decoder.drop_cache()
    load(decoder, this.weights)
    assert torch.equal(decoded(decoder), first)


@pytest.mark.parametrize("kind", [LlamaDecoder, GeneralDecoder])
@pytest.mark.parametrize("name", ["qwen3", "llama-biased-untied"])
def test_half_precision_is_close(case, kind, name):
    this = case(name)
    gap = (decoded(loaded(kind, this, torch.bfloat16)) - expected(this)).abs()
    assert gap.mean() < 0.05


def test_large_products_are_those_of_linear():
    weight, bias, x = torch.randn(512, 256), torch.randn(512), torch.randn(5, 256)
    want = torch.nn.functional.linear(x, weight, bias)
    for pack in (True, False):
        assert torch.allclose(_product(weight, bias, pack=pack)(x), want, atol=1e-3)
    assert torch.allclose(_product(weight)(x), want - bias, atol=1e-3)


def test_only_what_is_known_runs_on_the_fast_decoder(case):
    skeleton, shapes = model_of(case("qwen3").folder)
    config = skeleton.config
    assert misfit(config, shapes) is None
    assert "q_scale" in misfit(config, shapes | {"model.layers.0.self_attn.q_scale": torch.Size([1])})
    assert "model.norm.weight" in misfit(config, {n: s for n, s in shapes.items() if n != "model.norm.weight"})
    assert "down_proj" in misfit(config, shapes | {"model.layers.1.mlp.down_proj.weight": torch.Size([3, 3])})
    lone_bias = {"model.layers.0.self_attn.q_proj.bias": torch.Size([32])}
    assert "k_proj.bias" in misfit(config, shapes | lone_bias)
    for rope in ({"rope_type": "dynamic"}, {"rope_type": "default", "partial_rotary_factor": 0.5}):
        changed = type(config).from_dict(config.to_dict())
        changed.rope_parameters = rope
        assert "rotary" in misfit(changed, shapes)
