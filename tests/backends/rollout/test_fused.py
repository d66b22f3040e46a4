"""The decoder of GPUs draws what the fast decoder of CPUs draws: on CUDA, and here in Triton's interpreter."""

import dataclasses
import functools
import os
import subprocess
import sys
import types
from unittest import mock

import attrs
import pytest
import torch

from verl_fn.backends.draws import Draws
from verl_fn.backends.hf.attention import Packing
from verl_fn.backends.hf.exact import first_parting
from verl_fn.backends.hf.folder import build
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.sampler import NotFiniteError, Sampler
from verl_fn.backends.sampler.fused import ExactFusedDecoder, FusedDecoder
from verl_fn.backends.serving import model_of
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Batch, Key, Sampling, requests_for
from verl_fn.steps import adamw

PROMPTS = [[1, 4], [1, 5, 4], [7], [1, 6, 6, 7, 5, 4, 4, 5]]
WAYS = {
    "plain": Sampling(max_tokens=24, n=3),
    "temperature": Sampling(max_tokens=7, temperature=0.7),
    "cut": Sampling(max_tokens=4, n=2, top_k=4, top_p=0.9),
    "greedy": Sampling(max_tokens=7, temperature=0),
    "stops": Sampling(max_tokens=12, n=2, stop_token_ids=(5, 6)),
}
ARCHS = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 4},
}
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def made(tmp_path, arch, **sizes):
    """A folder and weights in which no factor is one."""
    folder = new_model(tmp_path / arch, chars="abcdefgh", arch=arch, **ARCHS[arch], **sizes)
    params = build(folder, "lm", pretrained=True, key=Key.from_seed(0))[1]
    generator = torch.Generator().manual_seed(1)
    return folder, {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in params.items()}


def engine(folder, params, **options):
    sampler = Sampler(folder, slots=6, **options)
    sampler.publish(0, Weights.of(params))
    return sampler


def fused_on_cpu(folder, params, decoder=FusedDecoder, **options):
    """An engine whose decoder is the one of GPUs, interpreted."""
    sampler = Sampler(folder, slots=6, exact=decoder is ExactFusedDecoder, **options)
    skeleton, shapes = model_of(folder)
    sampler.decoder = decoder(skeleton, shapes, torch.device("cpu"), torch.float32)
    sampler.publish(0, Weights.of(params))
    return sampler


def check_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert (a.finish_reason, a.versions.tolist()) == (b.finish_reason, b.versions.tolist())
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=2e-5, rtol=0)
        assert (a.full_log_probs is None) == (b.full_log_probs is None)
        if a.full_log_probs is not None:
            torch.testing.assert_close(a.full_log_probs, b.full_log_probs, atol=2e-5, rtol=0)


def check(folder, params, fused, ways):
    plain = engine(folder, params)
    for name in ways:
        requests = requests_for(PROMPTS, WAYS[name], Key.from_seed(0))
        check_equal(fused.generate(requests, version=0), plain.generate(requests, version=0))


def check_shared(folder, params, fused, monkeypatch):
    """More requests with the same prompt than slots: it is computed once, also for rows that begin later."""
    filled, fill = [], fused.decoder.fill
    # So that the host sees rows end at different times.
    monkeypatch.setattr("verl_fn.backends.sampler.fused.STEPS", 2)
    monkeypatch.setattr(
        fused.decoder, "fill", lambda rows, to: filled.extend(row.tolist() for row in rows.rows()) or fill(rows, to)
    )
    requests = [
        attrs.evolve(request, sampling=Sampling(max_tokens=limit))
        for request, limit in zip(
            requests_for([PROMPTS[3], PROMPTS[1], *[PROMPTS[3]] * 7], Sampling(max_tokens=1), Key.from_seed(0)),
            (8, 2, 3, 8, 4, 2, 6, 8, 3),
            strict=True,
        )
    ]
    check_equal(fused.generate(requests, version=0), engine(folder, params).generate(requests, version=0))
    assert filled == [PROMPTS[3][:-1], PROMPTS[1][:-1]]


def check_refilled(folder, params, fused, monkeypatch):
    """The slot from which the second row reads its prompt gets another one while that row is decoded."""
    monkeypatch.setattr("verl_fn.backends.sampler.fused.STEPS", 2)
    others = [PROMPTS[3][::-1], PROMPTS[3][1:] * 2, PROMPTS[3][2:] * 2]
    prompts = [PROMPTS[3], PROMPTS[3], *[PROMPTS[1]] * 4, *others]
    requests = [
        attrs.evolve(request, sampling=Sampling(max_tokens=limit))
        for request, limit in zip(
            requests_for(prompts, Sampling(max_tokens=1), Key.from_seed(1)), (2, 8, *[5] * 4, 2, 2, 2), strict=True
        )
    ]
    check_equal(fused.generate(requests, version=0), engine(folder, params).generate(requests, version=0))


def check_in_flight(folder, params, fused, prompts=PROMPTS, max_tokens=24, first=None):
    """Weights that arrive between two looks compute the cache again: rows end with the new version.

    Rows that begin later have nothing of the old ones, though they may copy a prompt from a row that began before.
    A first row that has ended leaves its slot to nobody if there are no more rows, and the others do not read it.
    """
    requests = requests_for(prompts, Sampling(max_tokens=max_tokens), Key.from_seed(0))
    requests[0] = attrs.evolve(requests[0], sampling=Sampling(max_tokens=first or max_tokens))
    stream = fused.stream(requests, version=0)
    samples = [next(stream)]
    fused.publish(1, Weights.of({name: t * 1.5 for name, t in params.items()}))
    samples += stream
    assert {int(v) for sample in samples for v in sample.versions} == {0, 1}
    late = max(samples, key=lambda sample: len(sample.tokens))
    changed = int((late.versions == 0).sum())
    # The rest of the row is what the new weights draw after the tokens of the old ones.
    replayed = engine(folder, {name: t * 1.5 for name, t in params.items()})
    prompt = [*late.prompt.tolist(), *late.tokens[:changed].tolist()]
    scored = replayed.decoder
    scored.reserve(1, len(prompt) + 1)
    logits = scored.prefill(Batch.from_rows([prompt]), torch.tensor([0]))
    expected = logits.log_softmax(-1)[0, late.tokens[changed]]
    torch.testing.assert_close(late.log_probs[changed], expected, atol=2e-5, rtol=0)
    begun_later = [i for i, sample in enumerate(samples) if set(sample.versions.tolist()) == {1}]
    assert bool(begun_later) == (len(prompts) > 6)
    new = {one.request: one for one in replayed.generate(requests, version=0)}
    for i in begun_later:
        assert samples[i].tokens.tolist() == new[samples[i].request].tokens.tolist()
        torch.testing.assert_close(samples[i].log_probs, new[samples[i].request].log_probs, atol=2e-5, rtol=0)


def check_last(folder, params, fused):
    """A response whose last permitted token ends it has ended by itself."""
    (token,) = (
        engine(folder, params)
        .generate(requests_for([PROMPTS[0]], Sampling(max_tokens=1, temperature=0), Key.from_seed(0)), version=0)[0]
        .tokens.tolist()
    )
    sampling = Sampling(max_tokens=1, temperature=0, stop_token_ids=(token,))
    (sample,) = fused.generate(requests_for([PROMPTS[0]], sampling, Key.from_seed(0)), version=0)
    assert sample.finish_reason == "stop"


def check_not_finite(folder, params, fused):
    fused.publish(0, Weights.of(params | {"model.norm.weight": params["model.norm.weight"] * float("nan")}))
    with pytest.raises(NotFiniteError, match="row 0"):
        fused.generate(requests_for(PROMPTS, Sampling(max_tokens=1, n=3), Key.from_seed(0)), version=0)


def check_exact_attention(window):
    """Packed rows, and a step whose first places lie in another slot; a lane of no row reads nothing."""
    from verl_fn.backends.hf import exact, kernels

    lengths, generator = [9, 1, 70], torch.Generator().manual_seed(0)
    packing = Packing.of(Batch.from_rows([[1] * n for n in lengths]), torch.device("cpu"))
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=generator) for heads in (4, 2, 2))
    whole = kernels.packed_attention(q, k, v, packing, 0.25, window)
    torch.testing.assert_close(whole, exact.packed_attention(q, k, v, packing, 0.25, window), atol=1e-6, rtol=0)
    cache = torch.full((2, 3, 2, 80, 16), 7.0)
    for kind, x in zip(cache, (k, v), strict=True):
        kind[2, :, :30], kind[1, :, 30:70] = x[10:40].transpose(0, 1), x[40:].transpose(0, 1)
    lanes = torch.tensor([1, -1]), torch.tensor([0, 2, 2]), torch.tensor([0, 30, 0])
    step = kernels.step_attention(q[[79, 0]], *cache, torch.tensor([69, -1]), lanes, 0.25, window)
    assert torch.equal(step, torch.stack([whole[79], torch.zeros(4, 16)]))


def check_products(patch):
    """The library's product is used if it equals the largest tiles, and for few rows only."""
    from verl_fn.backends.hf import kernels

    tiles, used = kernels._product_by, []
    # The interpreter multiplies bf16 wrongly.
    x, weight = torch.randn(16, 32).half(), torch.randn(256, 32).half()
    expected = tiles(kernels.MANY, x, weight, None)

    def library(x, weight, bias=None, *, off=0):
        used.append(len(x))
        out = tiles(kernels.MANY, x, weight, bias)
        out[-1, -1] += off
        return out

    patch.setattr(kernels, "COMPARED", 2**13)
    for off, uses in ((0, 4), (1, 1)):
        kernels._library_same_order.cache_clear()
        used.clear()
        patch.setattr(kernels, "linear", functools.partial(library, off=off))
        # The first product tests the shape, with two random inputs here; the first difference ends the test.
        assert torch.equal(kernels.product(x, weight), expected)
        assert torch.equal(kernels.product(x, weight), expected)
        assert used == [16] * uses
        kernels.product(x[:9], weight)
        kernels.product(x.float(), weight.float())
        assert set(used) == {16}


def check_draws(device="cpu", vocab=9001):
    """The kernel draws what torch draws, from logits of more than two blocks; NaN and infinity are no draws."""
    from verl_fn.backends.hf import kernels

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(9, vocab, generator=generator)
    u = torch.rand(9, generator=generator, dtype=torch.float64)
    inf = float("inf")
    logits[0, : kernels.BLOCK], logits[1, kernels.BLOCK + 9 :], logits[2, :-1] = -inf, -inf, -inf
    logits[3, 100], logits[4, -1], logits[5] = float("nan"), inf, -inf
    u[6], u[7], logits[6:8, [0, -1]] = 0.0, 1 - 2**-53, 9.0
    for temperature in (1.0, 0.7):
        draws = Draws(Sampling(1, temperature=temperature), vocab, 1e-5)
        tokens = draws.draw(logits.clone(), u[:, None])
        _, log_probs, _, near = draws.results()
        found = kernels.draw(logits.to(device), u.to(device), temperature, draws.noise)
        assert found[0].tolist() == tokens.tolist() and found[0][3:6].tolist() == [vocab] * 3
        drawn = tokens < vocab
        torch.testing.assert_close(found[1].cpu()[drawn], log_probs[drawn], atol=4e-6, rtol=0)
        assert found[2].cpu()[drawn].tolist() == near[drawn].tolist()


def check_step_attention(window):
    """Rows of several blocks of keys, whose first places may lie in another slot; all heads see all of them."""
    from verl_fn.backends.sampler import fused_kernels

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 8, 16, generator=generator)
    cache = torch.randn(2, 3, 2, 48, 16, generator=generator)
    lanes = fused_kernels.Lanes.of(3, 48, 4, torch.device("cpu"))
    lanes = attrs.evolve(lanes, sources=torch.tensor([0, 0, 2]), shared=torch.tensor([9, 20, 0]))
    slots, places = torch.tensor([0, 1, 2]), torch.tensor([47, 37, 2])
    found = fused_kernels.step_attention(qkv, cache, slots, places, lanes, 0.25, window)
    read = cache.clone()
    read[:, 1, :, :20] = cache[:, 0, :, :20]
    for row, place in enumerate(places.tolist()):
        first = 0 if window is None else max(0, place + 1 - window)
        keys, values = read[:, row, :, first : place + 1]
        scores = 0.25 * torch.einsum("kgd,kpd->kgp", qkv[row, :4].view(2, 2, 16), keys)
        expected = torch.einsum("kgp,kpd->kgd", scores.softmax(-1), values).reshape(4, 16)
        torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=0)


def check_norms():
    """Parts of a product count as their sum, which is rounded once."""
    from verl_fn.backends.hf import kernels

    generator = torch.Generator().manual_seed(0)
    x, weight, *parts = (torch.randn(n, 24, generator=generator) for n in (5, 1, 5, 5))
    whole, expected = x.half(), x.half()
    found = kernels.add_norm(whole, torch.stack(parts), weight[0].half(), 1e-6)
    assert torch.equal(found, kernels.add_norm(expected, sum(parts).half(), weight[0].half(), 1e-6))
    assert torch.equal(whole, expected) and not torch.equal(whole, x.half())


def check_activations(folder):
    """The modules of the exact decoder compute what the trainer's compute."""
    trainer = Local(folder, adamw(1e-3), exact=True)
    state = trainer.load_pretrained()
    exact = fused_on_cpu(folder, state.params.leaves, ExactFusedDecoder)
    rows = {"response_mask": [[0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]}
    batch = Batch.from_rows([[1, 4, 5, 6, 7], [1, 5, 6]], rows)
    for _ in range(2):
        assert first_parting(trainer.activations(state.params, batch), exact.activations(batch)) is None


def test_a_graph_of_cut_draws_is_not_the_one_of_whole_draws(tmp_path, monkeypatch):
    """A cut that cuts nothing has columns of its own."""
    folder, params = made(tmp_path, "qwen2")
    decoder = fused_on_cpu(folder, params).decoder
    decoder.reserve(2, 8)
    recorded = []

    def record(lanes, n, draws):
        recorded.append(draws)
        return mock.Mock()

    monkeypatch.setattr(decoder, "_pool", object())
    monkeypatch.setattr(decoder, "_recorded", record)
    for top_k in (decoder.vocab, -1, decoder.vocab):
        decoder.decode([0], 1, Draws(Sampling(1, top_k=top_k), decoder.vocab, 1e-5))
    assert [draws.cut for draws in recorded] == [True, False]


@CUDA
@pytest.mark.parametrize("arch", ARCHS)
def test_cuda_draws_what_the_cpu_draws(tmp_path, arch):
    folder, params = made(tmp_path, arch)
    fused = engine(folder, {name: t.cuda() for name, t in params.items()}, device="cuda")
    assert isinstance(fused.decoder, FusedDecoder)
    check(folder, params, fused, WAYS)
    fused.sleep()
    fused.publish(0, Weights.of({name: t.cuda() for name, t in params.items()}))
    check(folder, params, fused, ["plain"])
    fused.publish(1, Weights.of({name: t.cuda() * 1.5 for name, t in params.items()}))
    fused.publish(0, Weights.of({name: t.cuda() for name, t in params.items()}))
    check(folder, params, fused, ["plain"])


@CUDA
def test_cuda_draws_from_all_blocks_of_a_vocabulary():
    check_draws("cuda", 151936)


@CUDA
@pytest.mark.parametrize("name", ["temperature", "cut"])
def test_many_rows_with_long_contexts_draw_what_the_cpu_draws(tmp_path, name):
    folder, params = made(tmp_path, "qwen2")
    fused = Sampler(folder, slots=300, device="cuda")
    fused.publish(0, Weights.of({key: t.cuda() for key, t in params.items()}))
    prompts = [[4 + (i * j) % 8 for j in range(1 + (37 * i) % 900)] for i in range(1, 40)]
    requests = requests_for(prompts, WAYS[name], Key.from_seed(0))
    plain = Sampler(folder, slots=300)
    plain.publish(0, Weights.of(params))
    check_equal(fused.generate(requests, version=0), plain.generate(requests, version=0))


@CUDA
def test_weights_arrive_in_flight_on_cuda(tmp_path, monkeypatch):
    folder, params = made(tmp_path, "qwen3")
    fused = engine(folder, {name: t.cuda() for name, t in params.items()}, device="cuda", in_flight=True)
    check_in_flight(folder, params, fused)
    fused.publish(0, Weights.of({name: t.cuda() for name, t in params.items()}))
    check_in_flight(folder, params, fused, [PROMPTS[3]] * 9)
    fused.publish(0, Weights.of({name: t.cuda() for name, t in params.items()}))
    # These rows end after six tokens at most.
    monkeypatch.setattr("verl_fn.backends.sampler.fused.STEPS", 3)
    check_in_flight(folder, params, fused, [PROMPTS[3]] * 4, first=2)


@CUDA
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_with_the_same_prompt_share_it_on_cuda(tmp_path, arch, monkeypatch):
    folder, params = made(tmp_path, arch)
    fused = engine(folder, {name: t.cuda() for name, t in params.items()}, device="cuda")
    check_shared(folder, params, fused, monkeypatch)
    check_refilled(folder, params, fused, monkeypatch)


@CUDA
def test_nan_is_an_error_on_cuda(tmp_path):
    folder, params = made(tmp_path, "qwen3")
    check_last(folder, params, engine(folder, params, device="cuda"))
    check_not_finite(folder, params, engine(folder, params, device="cuda"))


def test_the_interpreter_draws_what_the_fast_decoder_draws(warm):
    done = subprocess.run(
        [warm, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    # Functions of Triton's own look for the interpreter as they are imported, and a warm Python has done that.
    for module in [name for name in sys.modules if name.startswith("triton") and "._C" not in name]:
        del sys.modules[module]

    from triton import language
    from triton.runtime import interpreter

    from verl_fn.backends.sampler import fused

    # Triton gives its operations their interpreted form again for each call inside a kernel, a third of all the time.
    interpreter._patch_lang(types.FunctionType(made.__code__, {"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: mock.Mock()
    # It makes a table of all types to look one up.
    types_of, look_up = {}, interpreter._get_np_dtype
    interpreter._get_np_dtype = lambda kind: (
        types_of.get(kind.scalar.name) or types_of.setdefault(kind.scalar.name, look_up(kind))
    )

    # The interpreter takes a millisecond for an operation: few tokens, several looks.
    fused.STEPS = 3
    WAYS["cut"] = Sampling(max_tokens=2, n=2, top_k=4, top_p=0.9)
    WAYS["stops"] = Sampling(max_tokens=6, n=2, stop_token_ids=(5, 6))
    for window in (None, 20):
        check_exact_attention(window)
        check_step_attention(window)
    with pytest.MonkeyPatch.context() as patch:
        check_products(patch)
    check_draws()
    check_norms()
    with tempfile.TemporaryDirectory() as root:
        folder, params = made(Path(root), "mistral", num_hidden_layers=1)
        check(folder, params, fused_on_cpu(folder, params), ["cut", "stops"])
        # The host's bookkeeping is the same for any number of heads, and the interpreter runs each by itself.
        folder, params = made(Path(root), "qwen3", num_attention_heads=2, num_key_value_heads=1)
        check_activations(folder)
        # All kernels have run, and no sum of theirs overflows. To see that takes seven operations for one.
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        check_in_flight(folder, params, fused_on_cpu(folder, params, in_flight=True), PROMPTS[2:], max_tokens=7)
        shared = [PROMPTS[3]] * 9
        check_in_flight(folder, params, fused_on_cpu(folder, params, in_flight=True), shared, max_tokens=7)
        check_in_flight(
            folder, params, fused_on_cpu(folder, params, in_flight=True), shared[:4], max_tokens=5, first=2
        )
        with pytest.MonkeyPatch.context() as patch:
            # A row reads its own copy of the prompt then, in the caches of all layers.
            check_refilled(folder, params, fused_on_cpu(folder, params), patch)
        folder, params = made(Path(root, "shallow"), "qwen3", num_hidden_layers=1)
        with pytest.MonkeyPatch.context() as patch:
            check_shared(folder, params, fused_on_cpu(folder, params), patch)
        with pytest.MonkeyPatch.context() as patch:
            check_refilled(folder, params, fused_on_cpu(folder, params, ExactFusedDecoder), patch)
        check_last(folder, params, fused_on_cpu(folder, params))
        check_not_finite(folder, params, fused_on_cpu(folder, params))
