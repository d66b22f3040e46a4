"""Exact kernels on a GPU: equal bits whatever the number of rows, and log-probs of trainer and engine in bf16."""

import attrs
import pytest
import torch

from verl_fn.backends.hf import exact
from verl_fn.backends.hf.attention import Packing, packed_attention
from verl_fn.backends.hf.logprobs import on_cuda
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler.decoder import ExactDecoder
from verl_fn.backends.sampler.fused import ExactFusedDecoder
from verl_fn.backends.serving import model_of
from verl_fn.state import Batch
from verl_fn.steps import adamw, aggregate, cross_entropy
from verl_fn.testing import check_exact

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [[1, *(4 + (i * j) % 9 for j in range(1 + (13 * i) % 150))] for i in range(1, 40)]
ARCHS = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 40},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("exact"), chars="abcdefghi", hidden_size=256, num_hidden_layers=3)


def drawn(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)


@DTYPES
@pytest.mark.parametrize(("K", "N"), [(896, 1152), (896, 9728), (4864, 896), (100, 33)])
def test_a_product_does_not_depend_on_the_number_of_rows(K, N, dtype):
    x, weight, bias = (drawn(*shape, dtype=dtype) for shape in ((1000, K), (N, K), (N,)))
    whole = exact.linear(x, weight, bias)
    assert torch.allclose(whole.float(), x.float() @ weight.float().T + bias.float(), atol=K**0.5 / 20, rtol=1e-2)
    for rows in (1, 17, 64, 65, 128, 500):
        assert torch.equal(exact.linear(x[7 : 7 + rows], weight, bias), whole[7 : 7 + rows])


@DTYPES
def test_a_norm_is_transformers(dtype):
    x, weight = drawn(300, 96, dtype=dtype), drawn(96, dtype=dtype)
    whole = exact.rms_norm(x, weight, 1e-6)
    assert torch.allclose(whole.float(), exact._norm(x, weight, 1e-6).float(), atol=1e-5, rtol=1e-2)
    assert torch.equal(exact.rms_norm(x[5:6], weight, 1e-6), whole[5:6])


@DTYPES
def test_a_gated_activation_does_not_depend_on_the_number_of_rows(dtype):
    gate, up = drawn(2, 300, 4864, dtype=dtype)
    whole = on_cuda().gated(gate, up)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(whole.float(), expected.float(), atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(on_cuda().gated(gate[5:6], up[5:6]), whole[5:6])


@DTYPES
@pytest.mark.parametrize("dim", [64, 80])
def test_keys_are_written_into_their_places(dim, dtype):
    x, cache = drawn(3, 2, 7, dim, dtype=dtype)[:, 0].transpose(0, 1), drawn(5, 3, 20, dim, dtype=dtype)
    slots, places = (torch.tensor(of, device="cuda") for of in ([4, 0, 0, 2, 1, 3, 2], [0, 19, 7, 3, 3, 1, 4]))
    expected = cache.clone()
    expected.transpose(1, 2).index_put_((slots, places), x)
    on_cuda().store(x, cache, slots, places)
    assert torch.equal(cache, expected)


@DTYPES
@pytest.mark.parametrize(("heads", "kv", "dim", "window"), [(14, 2, 64, None), (4, 4, 80, None), (8, 2, 128, 50)])
def test_attention_over_a_cache_is_attention_over_packed_rows(heads, kv, dim, window, dtype):
    lengths = [200, 1, 63, 64, 65, 129]
    packing = Packing.of(Batch.from_rows([[1] * n for n in lengths]), torch.device("cuda"))
    q, k, v = (drawn(sum(lengths), h, dim, dtype=dtype) for h in (heads, kv, kv))
    whole = exact.packed_attention(q, k, v, packing, dim**-0.5, window)
    table = [x.transpose(0, 1)[None] for x in (q, k, v)]
    other, _ = packed_attention(None, *table, None, packing=packing, scaling=dim**-0.5, sliding_window=window)
    assert torch.allclose(whole.float(), other[0].float(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    starts = packing.cu_seqlens[:-1].long()
    keys, values = (k.new_zeros(len(lengths), kv, 256, dim) for _ in "kv")
    for row, (start, n) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        keys[row, :, :n], values[row, :, :n] = (x[start : start + n].transpose(0, 1) for x in (k, v))
    for step in (0, 1, 62, 63, 64, 128, 199):
        positions = torch.tensor([min(step, n - 1) for n in lengths], device="cuda")
        found = exact.step_attention(q[starts + positions], keys, values, positions, dim**-0.5, window)
        assert torch.equal(found, whole[starts + positions])


@pytest.mark.parametrize("decoder", [ExactDecoder, ExactFusedDecoder])
@pytest.mark.parametrize(
    "options",
    [{}, {"row_layout": "padded", "checkpointing": True}, {"lora": Lora(3), "max_tokens": 600}],
    ids=str,
)
def test_log_probs_in_bf16_after_updates(options, decoder, folder):
    trainer = Local(folder, adamw(1e-3), device="cuda", dtype="bfloat16", exact=True, **options)
    engine = Sampler(folder, device="cuda", dtype="bfloat16", slots=24, exact=True)
    assert isinstance(engine.decoder, ExactFusedDecoder)
    if decoder is ExactDecoder:
        engine.decoder = ExactDecoder(*model_of(folder), torch.device("cuda"), torch.bfloat16)
    assert check_exact(trainer, engine, PROMPTS, updates=5) > 10_000


@DTYPES
@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_log_probs_of_every_family(arch, dtype, tmp_path):
    folder = new_model(tmp_path, chars="abcdefghi", arch=arch, num_hidden_layers=2, **ARCHS[arch])
    trainer = Local(folder, adamw(1e-3), device="cuda", dtype=dtype, exact=True)
    engine = Sampler(folder, device="cuda", dtype=dtype, slots=24, exact=True)
    assert isinstance(engine.decoder, ExactFusedDecoder)
    state = trainer.load_pretrained()
    # No factor of a norm and no bias is trivial.
    leaves = {name: t + 0.1 * drawn(*t.shape, dtype=t.dtype) for name, t in state.params.leaves.items()}
    state = attrs.evolve(state, params=attrs.evolve(state.params, leaves=leaves))
    assert check_exact(trainer, engine, PROMPTS, updates=1, state=state) > 1_000


@DTYPES
@pytest.mark.parametrize("H", [64, 896, 1536])
def test_a_norm_of_a_sum_and_of_heads_is_the_norm(H, dtype):
    x, delta, weight = drawn(70, H, dtype=dtype), drawn(71, H, dtype=dtype)[1:], drawn(H, dtype=dtype)
    whole = x + delta
    expected = exact.rms_norm(whole, weight, 1e-6)
    assert torch.equal(on_cuda().add_norm(x, delta, weight, 1e-6), expected) and torch.equal(x, whole)
    heads = drawn(70, 5, 128, dtype=dtype)
    expected = exact.rms_norm(heads[:, 1:4], weight[:1].expand(128).contiguous(), 1e-6)
    on_cuda().norm_heads(heads[:, 1:4], weight[:1].expand(128).contiguous(), 1e-6)
    assert torch.equal(heads[:, 1:4], expected)


@pytest.mark.parametrize(("N", "K"), [(2048, 1536), (1536, 8960), (1152, 896), (896, 4864), (264, 256), (300, 64)])
def test_a_product_of_the_library_is_used_only_if_it_is_equal(N, K):
    x, weight, bias = (drawn(*shape, dtype=torch.bfloat16) for shape in ((1024, K), (N, K), (N,)))
    # More rows than the library's product is tested for.
    whole = on_cuda().product(torch.cat([x, x]), weight, bias)[: len(x)]
    for rows in (8, 24, 64, 96, 128, 256, 512, 1024):
        assert torch.equal(on_cuda().product(x[:rows], weight, bias), whole[:rows])


def test_gradients_are_those_of_other_kernels(folder):
    rows = {"response_mask": [[0.0] + [1.0] * (len(p) - 1) for p in PROMPTS]}
    batch = aggregate(Batch.from_rows(PROMPTS, rows))
    gradients = []
    for on in (False, True):
        trainer = Local(folder, adamw(1e-3), device="cuda", dtype="bfloat16", exact=on)
        gradients.append(trainer.forward_backward(trainer.load_pretrained(), batch, cross_entropy())[0])
    plain, ours = gradients
    assert float((ours + plain.scale(-1.0)).global_norm() / plain.global_norm()) < 0.05
