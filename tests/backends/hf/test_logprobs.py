"""The chunked log-prob kernel against full logits in float64."""

import pytest
import torch
from made_tensors import made

from verl_fn.backends.hf.logprobs import logprobs_and_entropy, sum_pi_squared
from verl_fn.state import NotDifferentiable

N, H, V = 23, 8, 31


def inputs(bias, seed=0):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    hidden, weight = draw(N, H), draw(V, H)
    targets = torch.randint(0, V, (N,), generator=rng)
    temperature = 0.5 + torch.rand(N, generator=rng, dtype=torch.float64)
    return hidden, weight, draw(V) if bias else None, targets, temperature


def reference(hidden, weight, bias, targets, temperature, softcap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / temperature[:, None]
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients(bias, chunk, entropy):
    exact = inputs(bias)
    leaves = [t.clone().requires_grad_() for t in exact[:3] if t is not None]
    lp, h = reference(leaves[0], leaves[1], leaves[2] if bias else None, *exact[3:])
    weights = torch.linspace(-1, 1, N, dtype=torch.float64)
    want = torch.autograd.grad((weights * lp).sum() + ((weights.flip(0) * h).sum() if entropy else 0.0), leaves)

    ours = [t.detach().float().requires_grad_() for t in leaves]
    got_lp, got_h = logprobs_and_entropy(
        ours[0], ours[1], ours[2] if bias else None, exact[3], exact[4].float(), entropy=entropy, chunk=chunk
    )
    assert torch.allclose(got_lp.double(), lp, atol=2e-5)
    total = (weights.float() * got_lp).sum()
    if entropy:
        assert torch.allclose(got_h.double(), h, atol=2e-5)
        total = total + (weights.flip(0).float() * got_h).sum()
    else:
        assert got_h is None
    got = torch.autograd.grad(total, ours)
    assert all(torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("plain", [False, True])
def test_soft_capped_logits(plain):
    """The cap comes before the temperature; by blocks of the vocabulary, and with a frozen output layer by tokens."""
    exact = inputs(True)
    leaves = [t.clone().requires_grad_() for t in exact[:3]]
    lp, h = reference(*leaves, *exact[3:], softcap=2.0)
    want = torch.autograd.grad((lp - h).sum(), leaves)
    ours = [t.detach().float().requires_grad_() for t in leaves]
    options = {"entropy": True, "chunk": None if plain else 5, "plain": plain, "softcap": 2.0}
    got_lp, got_h = logprobs_and_entropy(*ours, exact[3], exact[4].float(), **options)
    assert torch.allclose(got_lp.double(), lp, atol=2e-5) and torch.allclose(got_h.double(), h, atol=2e-5)
    for a, b in zip(torch.autograd.grad((got_lp - got_h).sum(), ours), want, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-4)
    frozen = [t.detach() for t in ours[1:]]
    again_lp, again_h = logprobs_and_entropy(ours[0], *frozen, exact[3], exact[4].float(), **options)
    assert torch.allclose(torch.autograd.grad((again_lp - again_h).sum(), ours[0])[0].double(), want[0], atol=1e-4)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_token_of_probability_0_adds_nothing(plain, frozen):
    """An output bias of -inf masks a token: entropies and gradients are those of a vocabulary without it."""
    hidden, weight, bias, targets, temperature = inputs(True)
    masked = V - 1
    targets = targets.clamp(max=masked - 1)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight[:masked], bias[:masked])]
    lp, h = reference(*leaves, targets, temperature)
    weights = torch.linspace(-3, 3, N, dtype=torch.float64)
    want = torch.autograd.grad((weights * lp + 2 * weights.flip(0) * h).sum(), leaves[: 1 if frozen else 3])

    bias[masked] = -torch.inf
    ours = [t.float().requires_grad_(i == 0 or not frozen) for i, t in enumerate((hidden, weight, bias))]
    options = {"entropy": True, "chunk": 5, "plain": plain}
    got_lp, got_h = logprobs_and_entropy(*ours, targets, temperature.float(), **options)
    torch.testing.assert_close(got_h.double(), h, atol=2e-5, rtol=1e-5)
    got = torch.autograd.grad((weights * got_lp + 2 * weights.flip(0) * got_h).sum(), ours[: len(want)])
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine[: len(exact)].double(), exact, atol=1e-4, rtol=1e-4)
        assert not mine[len(exact) :].any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_sum_pi_squared(bias, chunk):
    hidden, weight, shift, _, temperature = inputs(bias)
    probs = (torch.nn.functional.linear(hidden, weight, shift) / temperature[:, None]).softmax(-1)
    narrow = [None if t is None else t.float() for t in (hidden, weight, shift, temperature)]
    got = sum_pi_squared(*narrow, chunk=chunk)
    assert torch.allclose(got.double(), probs.square().sum(-1), atol=1e-5) and not got.requires_grad
    assert torch.equal(narrow[0], hidden.float())


def test_no_temperature_is_temperature_one():
    hidden, weight, _, targets, _ = (None if t is None else t for t in inputs(False))
    hidden, weight = hidden.float(), weight.float()
    plain, _ = logprobs_and_entropy(hidden, weight, None, targets)
    ones, _ = logprobs_and_entropy(hidden, weight, None, targets, torch.ones(N))
    assert torch.equal(plain, ones)


def test_memory_never_holds_all_logits():
    """The largest tensor made in forward and backward is one chunk's, not all tokens'."""
    hidden = torch.randn(512, H, requires_grad=True)
    weight = torch.randn(400, H, requires_grad=True)

    def run():
        lp, entropy = logprobs_and_entropy(
            hidden, weight, None, torch.randint(0, 400, (512,)), entropy=True, chunk=16
        )
        (lp.sum() + entropy.sum()).backward()

    sizes = [size for size, _ in made(run)]
    assert max(sizes) <= max(16 * 400, hidden.numel(), weight.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_a_gradient_can_be_added_to_a_sum(dtype, chunk):
    hidden, weight, _, targets, temperature = inputs(False)
    ours = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
    plain, _ = logprobs_and_entropy(*ours, None, targets, temperature.float(), chunk=chunk)
    want = torch.autograd.grad(plain.sum(), ours)
    total = torch.ones(V, H)
    summed, _ = logprobs_and_entropy(*ours, None, targets, temperature.float(), chunk=chunk, grad_buffer=total)
    sizes = made(lambda: summed.sum().backward())
    assert ours[1].grad is None and torch.equal(ours[0].grad, want[0])
    assert torch.allclose(total - 1.0, want[1].float(), atol=1e-5 if dtype == torch.float32 else 5e-2)
    assert chunk > N or max(size for size, _ in sizes) < V * H


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({"plain": True}, "plain=True has no grad_buffer"),
        ({"grad_buffer": torch.zeros(V, H).bfloat16()}, "grad_buffer is torch.bfloat16, not float32"),
    ],
)
def test_a_sum_of_gradients_is_in_fp32(refused, words):
    hidden, weight, _, targets, _ = inputs(False)
    with pytest.raises(ValueError, match=words):
        logprobs_and_entropy(hidden, weight, None, targets, **{"grad_buffer": torch.zeros(V, H), **refused})


@pytest.mark.parametrize(("vocab", "chunk"), [(600, 10), (4096, 1)])
def test_blocks_of_a_vocabulary(vocab, chunk):
    """Blocks of many rows, with a rest, and many blocks of a few: the sum over them keeps the precision of fp32."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, 64, generator=rng).bfloat16()
    weight = (torch.randn(vocab, 64, generator=rng) / 5).bfloat16()
    targets = torch.randint(0, vocab, (N,), generator=rng)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    want = torch.autograd.grad(reference(*exact, None, targets, torch.ones(N))[0].sum(), exact)
    ours = [t.requires_grad_() for t in (hidden, weight)]
    lp, _ = logprobs_and_entropy(*ours, None, targets, chunk=chunk)
    for got, expected in zip(torch.autograd.grad(lp.sum(), ours), want, strict=True):
        assert (got.double() - expected).norm() < 4e-3 * expected.norm()


def test_a_frozen_output_layer_needs_no_sum():
    hidden, weight, bias, targets, temperature = inputs(True)
    leaf, weight, bias = hidden.bfloat16().requires_grad_(), weight.bfloat16(), bias.bfloat16()
    heat = temperature.float()
    lp, entropy = logprobs_and_entropy(leaf, weight, bias, targets, heat, entropy=True, chunk=5)
    tensors = made(lambda: (lp.sum() + entropy.sum()).backward())
    assert max(size for size, _ in tensors) <= max(5 * V, N * H)
    assert [dtype for size, dtype in tensors if size == N * H] == [torch.bfloat16]
    exact = leaf.detach().double().requires_grad_()
    want = sum(t.sum() for t in reference(exact, weight.double(), bias.double(), targets, temperature))
    torch.testing.assert_close(leaf.grad.double(), torch.autograd.grad(want, exact)[0], rtol=0.05, atol=0.1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_first_derivatives_of_torch_func_and_no_second(frozen, entropy):
    hidden, weight, _, targets, _ = inputs(False)
    hidden, weight = hidden.float(), weight.float()

    def total(hidden, weight, **options):
        lp, h = logprobs_and_entropy(hidden, weight, None, targets, entropy=entropy, **options)
        return (lp * lp).sum() + (h.sum() if entropy else 0.0)

    places = 0 if frozen else (0, 1)
    got = torch.func.grad(total, places)(hidden, weight)
    want = torch.func.grad(lambda *args: total(*args, plain=True), places)(hidden, weight)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    leaf = hidden.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(leaf, weight.requires_grad_(not frozen)), leaf, create_graph=True)
    with pytest.raises(NotDifferentiable, match="plain=True"):
        torch.autograd.grad(first.square().sum(), leaf)
    with pytest.raises(NotDifferentiable, match="plain=True"):
        torch.func.grad(lambda h: torch.func.grad(total)(h, weight.detach()).sum())(hidden)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("heated", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_kernels_agree_with_plain_torch(dtype, entropy, heated, softcap):
    from verl_fn.backends.hf import kernels
    from verl_fn.backends.hf import logprobs as plain_torch

    generator = torch.Generator().manual_seed(0)
    rows, vocab = 37, 9001
    logits = (4 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    logits[0, 5:] = -torch.inf
    targets = torch.randint(0, 5, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5 if heated else None
    d_logprobs, d_entropies = torch.randn(2, rows, generator=generator)

    def run(module, names, device):
        there = lambda t: None if t is None else t.to(device, copy=True)  # noqa: E731
        found = torch.full((3, rows), torch.nan, device=device)
        told = found[2] if entropy else None
        given = there(logits), there(targets), there(temperature)
        getattr(module, names[0])(*given, found[0], found[1], told, softcap)
        again = there(logits)
        getattr(module, names[1])(again, *given[1:], found[1], there(d_logprobs), told, there(d_entropies), softcap)
        return found[: 3 if entropy else 2].cpu(), again.float().cpu()

    mine, ours = run(kernels, ("reduce_rows", "gradient_in_place"), "cuda")
    plain, theirs = run(plain_torch, ("reduce_rows", "gradient_in_place"), "cpu")
    assert torch.isfinite(mine).all() and torch.isfinite(ours).all()
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-5)
