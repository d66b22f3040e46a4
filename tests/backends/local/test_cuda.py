"""What only a GPU can show: FlashAttention on packed rows, bitwise repetition, memory, placement."""

import attrs
import pytest
import torch

from verl_fn.backends.hf.attention import LONG, Packing, packed_attention
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.tensor_file import checksum
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import Batch, Grads, is_donated, tree
from verl_fn.steps import adamw, aggregate, chain, clip_by_global_norm, constant, cross_entropy, entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OPTIMIZER = chain(clip_by_global_norm(1.0), adamw(constant(1e-3)))
LOSS = cross_entropy() - 0.1 * entropy()
LORA = Lora(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("cuda"), chars="abcdefgh>", hidden_size=256, num_hidden_layers=4)


@pytest.fixture(scope="module")
def batch():
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 200, (24,), generator=rng).tolist()
    rows = [torch.randint(4, 13, (n,), generator=rng) for n in lengths]
    return aggregate(Batch.from_rows(rows, {"response_mask": [[0.0] + [1.0] * (n - 1) for n in lengths]}))


def gap(a, b):
    return float((a + b.scale(-1.0)).global_norm() / b.global_norm())


def test_fp32_on_the_gpu_is_fp32_on_the_cpu(model, batch):
    cpu, gpu = Local(model, OPTIMIZER), Local(model, OPTIMIZER, device="cuda", max_tokens=600)
    want, _ = cpu.forward_backward(cpu.load_pretrained(), batch, LOSS)
    got, _ = gpu.forward_backward(gpu.load_pretrained(), batch, LOSS)
    assert gap(tree.map_tensors(torch.Tensor.cpu, got), want) < 1e-4


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("window", [None, 16])
def test_flash_attention_on_packed_rows(model, batch, checkpointing, window, tmp_path):
    options = {} if window is None else {"arch": "mistral", "sliding_window": window}
    folder = new_model(tmp_path, chars="abcdefgh>", hidden_size=256, **options)
    exact = Local(folder, OPTIMIZER, device="cuda")
    half = Local(folder, OPTIMIZER, device="cuda", dtype="bfloat16", max_tokens=600, checkpointing=checkpointing)
    state = exact.load_pretrained()
    want, _ = exact.forward_backward(state, batch, LOSS)
    got, _ = half.forward_backward(state, batch, LOSS)
    assert 1e-4 < gap(got, want) < 3e-2


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("softcap", "sink"), [(20.0, False), (None, True), (20.0, True)])
def test_soft_caps_and_sinks_of_fused_attention(softcap, sink, window, dim):
    """Values and gradients beside the whole table of scores in fp32, at twice the error of the same table in bf16."""
    rng = torch.Generator("cuda").manual_seed(0)
    rows = Batch.from_rows([[1] * n for n in (300, 1, 129, 128, 7, 250)])
    packing = Packing.of(rows, torch.device("cuda"))

    def normal(*sizes):
        return torch.randn(*sizes, generator=rng, device="cuda").bfloat16().float()

    given = [normal(1, heads, rows.num_tokens, dim) * 2 for heads in (8, 2, 2)] + [normal(8)] * sink
    grad = normal(1, rows.num_tokens, 8, dim)

    def attend(dtype, packing):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        q, k, v, *sinks = leaves
        out, _ = packed_attention(
            torch.nn.Module(), q, k, v, None, packing=packing, scaling=dim**-0.5, sliding_window=window,
            softcap=softcap, s_aux=sinks[0] if sinks else None,
        )  # fmt: skip
        return out, *torch.autograd.grad(out, leaves, grad.to(dtype))

    plain = attrs.evolve(packing, plain=True)
    exact, half = attend(torch.float32, packing), attend(torch.bfloat16, plain)
    for found, expected, rounded in zip(attend(torch.bfloat16, packing), exact, half, strict=True):
        error, allowed = ((t.float() - expected).norm() / expected.norm() for t in (found, rounded))
        assert error <= 2 * allowed + 1e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (4, 4, 128)])
def test_a_long_row_alone(heads, kv_heads, dim, request):
    """cuDNN's attention gives the values and gradients of FlashAttention over two rows, of which one is short."""
    before = torch.are_deterministic_algorithms_enabled()
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(before))
    torch.use_deterministic_algorithms(False)
    rng = torch.Generator("cuda").manual_seed(0)
    device, length = torch.device("cuda"), LONG + 3
    alone, two = (Packing.of(Batch.from_rows([[1] * n for n in sizes]), device) for sizes in ((length,), (length, 5)))
    given = [
        torch.randn(1, n, length + 5, dim, generator=rng, device="cuda", dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    ]
    found = []
    for packing, tokens in ((alone, length), (two, length + 5)):
        leaves = [t[:, :, :tokens].clone().requires_grad_() for t in given]
        out, _ = packed_attention(torch.nn.Module(), *leaves, None, packing=packing, scaling=dim**-0.5)
        grads = torch.autograd.grad(out[:, :length].float().square().sum(), leaves)
        found.append([out[:, :length], *(grad[:, :, :length] for grad in grads)])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "gemma2", "gpt_oss", "nanochat", "cohere", "mamba", "granitemoehybrid"]
)
def test_families_on_the_gpu(family, tmp_path):
    """As on the CPU in fp32; in bf16 padding and neighbours change rounding only."""
    folder = tiny_folder(family, tmp_path)
    rows = [[5, 9, 13, 7, 11, 3, 8, 21, 40, 2], [4, 12, 6], [33, 17, 10, 19, 50, 28, 1], [60, 14, 61, 15]]
    mask = [[0.0] + [1.0] * (len(row) - 1) for row in rows]
    batch = aggregate(Batch.from_rows(rows, {"response_mask": mask}))
    cpu, gpu = Local(folder, OPTIMIZER), Local(folder, OPTIMIZER, device="cuda", max_tokens=20)
    half = Local(folder, OPTIMIZER, device="cuda", dtype="bfloat16", checkpointing=True)
    want, _ = cpu.forward_backward(cpu.load_pretrained(), batch, LOSS)
    got, _ = gpu.forward_backward(gpu.load_pretrained(), batch, LOSS)
    assert gap(tree.map_tensors(torch.Tensor.cpu, got), want) < 1e-4
    params = half.load_pretrained().params
    few = Local(folder, OPTIMIZER, device="cuda", dtype="bfloat16", max_tokens=10)
    for other in (few.forward(params, batch), gpu.forward(params, batch)):
        assert float((half.forward(params, batch).logprobs - other.logprobs).abs().mean()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_means_bitwise(model, batch, dtype):
    backend = Local(model, OPTIMIZER, device="cuda", dtype=dtype, max_tokens=600, deterministic=True)
    state = backend.load_pretrained()
    before = tree.digest(state)
    first, first_metrics = backend.forward_backward(state, batch, LOSS)
    again, again_metrics = backend.forward_backward(state, batch, LOSS)
    assert tree.first_difference(first, again) is None
    assert tree.first_difference(first_metrics, again_metrics) is None
    assert tree.digest(state) == before


def test_a_donated_update_makes_no_second_copy(model, batch):
    backend = Local(model, OPTIMIZER, device="cuda")
    state = backend.load_pretrained()
    grads, _ = backend.forward_backward(state, batch, LOSS)
    where = {name: t.data_ptr() for name, t in state.params.items()}
    size = sum(t.numel() * 4 for t in state.params.values())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    state, metrics = backend.apply_update(state, grads)
    assert torch.cuda.max_memory_allocated() - held < 0.02 * 4 * size
    assert {name: t.data_ptr() for name, t in state.params.items()} == where
    assert metrics["perf/residency_copies"].value == 0


def test_lora_shares_its_base_in_bf16_too(model, batch):
    """Reference and policy in turn: an update needs the adapters' memory only, and the base is the first model."""
    plain, backend = (
        Local(model, OPTIMIZER, device="cuda", dtype="bfloat16", deterministic=True, lora=lora)
        for lora in (None, LORA)
    )
    want, state = plain.forward(plain.load_pretrained().params, batch), backend.load_pretrained()
    reference, size = state.params.base, sum(t.numel() * 4 for t in state.params.values())
    for _ in range(3):
        assert tree.equal(backend.forward(reference, batch), want)
        grads, _ = backend.forward_backward(state, batch, LOSS)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        state, metrics = backend.apply_update(state, grads)
        assert torch.cuda.max_memory_allocated() - held < 0.02 * size
        assert metrics["perf/residency_copies"].value == 0
    assert all(state.params[name] is t for name, t in reference.items())
    assert not tree.equal(backend.forward(state.params, batch), want)


def test_a_state_placed_on_the_cpu_means_the_same(model, batch):
    backend = Local(model, OPTIMIZER, device="cuda", deterministic=True)
    state = backend.load_pretrained()
    want, _ = backend.forward_backward(state, batch, LOSS)
    away = backend.place(state, params="cpu", optimizer="cpu")
    assert all(t.device.type == "cpu" for t in tree.leaves(away) if isinstance(t, torch.Tensor))
    got, _ = backend.forward_backward(away, batch, LOSS)
    assert tree.first_difference(got, want) is None
    back = backend.place(away, params="cuda", optimizer="cuda")
    assert tree.equal(back, state)


@pytest.mark.parametrize(("dtype", "of_norm", "of_updates"), [("float32", 1e-4, 1e-2), ("bfloat16", 1e-2, 0.1)])
def test_a_state_on_the_cpu_is_updated_with_gradients_of_the_gpu(model, batch, dtype, of_norm, of_updates):
    """Both are spent, nothing is copied, and the next steps are those of a state that stays on the GPU."""
    backend = Local(model, OPTIMIZER, device="cuda", dtype=dtype, deterministic=True)
    near = backend.load_pretrained()
    away = backend.place(backend.load_pretrained(), params="cpu", optimizer="cpu")
    where = {name: t.data_ptr() for name, t in away.params.items()}
    start = Grads({name: t.clone() for name, t in away.params.items()})
    for _ in range(3):
        (near_grads, _), (grads, _) = (backend.forward_backward(s, batch, LOSS) for s in (near, away))
        assert all(g.is_cuda for g in grads.values())
        state, spent = away, grads
        (near, want), (away, found) = backend.apply_update(near, near_grads), backend.apply_update(away, grads)
        assert found["perf/residency_copies"].value == 0 and is_donated(spent) and is_donated(state)
        assert found["grad_norm"].value == pytest.approx(want["grad_norm"].value, rel=of_norm)
    assert {name: t.data_ptr() for name, t in away.params.items()} == where
    ours, theirs = (Grads({n: t.cpu() - start[n] for n, t in s.params.items()}) for s in (away, near))
    assert gap(ours, theirs) < of_updates
    kept, _ = backend.forward_backward(away, batch, LOSS)
    assert not is_donated(kept)
    backend.apply_update(away, kept, donate=False)
    assert not is_donated(kept) and not is_donated(away)


def test_a_batch_comes_back_from_the_gpu_complete(batch):
    """The host waits: it could read the tensors before the copies end."""
    big = batch.with_tokens(values=torch.arange(batch.num_tokens * 4096.0).view(-1, 4096))
    for _ in range(20):
        assert tree.equal(big.to("cuda").to("cpu"), big)


def test_the_norm_on_the_gpu_neither_overflows_nor_loses_digits():
    values = torch.rand(5_000_001, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e30):
        exact = float((values * scale).double().square().sum().sqrt())
        assert float(Grads({"w": (values * scale).cuda()}).global_norm()) == pytest.approx(exact, rel=1e-9)


def test_autocast_on_the_gpu_changes_nothing(model, batch):
    backend = Local(model, OPTIMIZER, device="cuda", deterministic=True)
    state = backend.load_pretrained()
    expected, _ = backend.forward_backward(state, batch, LOSS)
    with torch.autocast("cuda", torch.bfloat16), torch.inference_mode():
        assert tree.equal(backend.forward_backward(state, batch, LOSS)[0], expected)


def test_sampler_on_the_gpu_agrees_with_the_trainer(model):
    from verl_fn.backends.protocol import Sampling
    from verl_fn.backends.sampler import Sampler
    from verl_fn.state import Key, pack, requests_for

    backend, engine = Local(model, OPTIMIZER, device="cuda"), Sampler(model, device="cuda", slots=8)
    state = backend.load_pretrained()
    engine.publish(0, backend.weights(state.params))
    prompts = [[1, *range(4, 4 + n)] for n in (2, 5, 3, 8)]
    requests = requests_for(prompts, Sampling(40, n=4, temperature=0.8), Key.from_seed(0))
    batch = pack(engine.generate(requests, version=0))
    gap = (backend.forward(state.params, batch).logprobs - batch["rollout_log_probs"]).abs()
    assert float((gap * batch["response_mask"]).max()) < 1e-4


@pytest.fixture(scope="module")
def gpus():
    from ranks import Ranks

    ranks = Ranks(min(2, torch.cuda.device_count()), "cuda")
    yield ranks
    ranks.kill()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"dtype": "bfloat16", "checkpointing": True}, {"head": "value"}, {"sp": 2}, {"lora": LORA},
        {"lora": LORA, "dtype": "bfloat16", "checkpointing": True}, {"compile": True},
        {"compile": True, "sp": 2, "checkpointing": True},
        {"compile": True, "lora": LORA, "dtype": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_sharded_laws_on_gpus(gpus, tmp_path, options):
    if options.get("sp", 1) > len(gpus.processes):
        pytest.skip("sequence parallelism wants two GPUs")
    folder = new_model(tmp_path, chars="abcd", hidden_size=64)
    tolerance = 0.05 if "dtype" in options else 1e-4
    gpus.run("laws", folder, {"device": "cuda", "deterministic": True, **options}, tolerance)


def test_checksums_take_little_memory():
    values = torch.randn(2**25, device="cuda")
    for t, dtype, slices in ((values, None, 1), (values.bfloat16(), None, 1), (values, torch.bfloat16, 2)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        checksum(t, dtype)
        assert torch.cuda.max_memory_allocated() - before < (2 * slices + 1) * 2**20
