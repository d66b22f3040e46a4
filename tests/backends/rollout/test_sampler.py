"""The embedded sampler: what it draws, from which distribution, and that nothing but the key decides."""

import itertools
import json
import shutil

import attrs
import pytest
import torch
from sampler_models import EOS, KEY, PROMPTS, SAMPLINGS, draw, make, responses

from verl_fn.backends.protocol import Sampling
from verl_fn.backends.sampler import Sampler
from verl_fn.backends.sampler import engine as module
from verl_fn.backends.weight_sync import Weights
from verl_fn.state import Key, uniform_at


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    return make(tmp_path_factory.mktemp("olmo2"), "olmo2")


@pytest.fixture(scope="module")
def sampler(made):
    return made.sampler(slots=5)


def processed(logits, sampling):
    """Log-probs after temperature, top-k and top-p, by sorting; and those after temperature alone."""
    full = (logits / (sampling.temperature or 1.0)).double().log_softmax(-1)
    if sampling.temperature == 0:
        return full, full
    ordered, order = full.exp().sort(-1, descending=True)
    kept = torch.ones_like(ordered)
    if sampling.top_k > 0:
        kept[..., sampling.top_k :] = 0
    ordered = ordered * kept / (ordered * kept).sum(-1, keepdim=True)
    kept[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
    cut = torch.zeros_like(kept).scatter(-1, order, ordered * kept)
    return (cut / cut.sum(-1, keepdim=True)).log(), full


# What is in the batch


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("which", ["made", "general"])
def test_log_probs_are_those_of_a_plain_forward(request, which, sampling):
    this = request.getfixturevalue(which)
    batch = draw(this.sampler(slots=5), PROMPTS, sampling, KEY)
    cuts = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
    assert ("rollout_full_log_probs" in batch) == cuts
    for row, (tokens, mask) in enumerate(zip(batch.rows(), batch.rows("response_mask"), strict=True)):
        start = int(batch["prompt_length"][row])
        assert mask.tolist() == [0.0] * start + [1.0] * (len(tokens) - start)
        with torch.no_grad():
            logits = this.plain(tokens[None]).logits[0, start - 1 : -1]
        for name, log_probs in zip(
            ("rollout_log_probs", "rollout_full_log_probs"), processed(logits, sampling), strict=True
        ):
            if name in batch:
                told = batch.rows(name)[row]
                assert (told[start:] - log_probs.gather(1, tokens[start:, None])[:, 0]).abs().max() < 1e-4
                assert not told[:start].any()


def test_fields(sampler):
    batch = draw(sampler, [[1, 4], [1, 5, 6]], Sampling(40, n=3, temperature=0.7), KEY, ids=[8, 5])
    assert batch["group"].tolist() == [8, 8, 8, 5, 5, 5]
    assert batch["prompt_length"].tolist() == [2, 2, 2, 3, 3, 3]
    assert batch["version"].tolist() == [3] * 6
    assert torch.equal(batch["temperature"], torch.full((6,), 0.7))
    ended = [float(row[-1] == EOS) for row in batch.rows()]
    assert batch["finished"].tolist() == ended
    assert sum(ended) > 0
    for row, start in zip(batch.rows(), batch["prompt_length"].tolist(), strict=True):
        assert row[:start].tolist() in ([1, 4], [1, 5, 6])
        assert EOS not in row[start:-1]
        assert row[-1] == EOS or len(row) == start + 40
    assert draw(sampler, [[1]], Sampling(2, temperature=0.0), KEY)["temperature"].tolist() == [1.0]


def test_tensors_are_fit_for_autograd(sampler):
    batch = draw(sampler, PROMPTS[:2], Sampling(4, top_k=3), KEY)
    assert not any(t.is_inference() for t in [batch.tokens, *batch.per_token.values(), *batch.per_row.values()])
    weight = torch.ones((), requires_grad=True)
    (weight * batch["rollout_log_probs"]).sum().backward()
    assert torch.isclose(weight.grad, batch["rollout_log_probs"].sum())


# Which tokens


@pytest.mark.parametrize("sampling", SAMPLINGS[:6], ids=str)
def test_draws_have_the_distribution(made, sampling):
    """Chi-square of 4000 draws after one prompt, at the 99.9 % level, with a fixed key."""
    prompt, n = [1, 4, 9], 4000
    batch = draw(made.sampler(slots=1000), [prompt], attrs.evolve(sampling, max_tokens=1, n=n), KEY)
    with torch.no_grad():
        probs = processed(made.plain(torch.tensor([prompt])).logits[0, -1], sampling)[0].exp()
    counts = batch.tokens[batch.last].bincount(minlength=len(probs))
    assert not counts[probs == 0].any()
    likely = probs * n > 5
    want = torch.cat([probs[likely], probs[~likely].sum()[None]])
    got = torch.cat([counts[likely], counts[~likely].sum()[None]])
    statistic = ((got - n * want)[want > 0] ** 2 / (n * want[want > 0])).sum()
    freedom = int((want > 0).sum()) - 1
    # The 99.9 % quantile, by Wilson and Hilferty.
    assert freedom > 1 and statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_positions_and_samples_are_independent(sampler):
    """Each sample and each position has a number of its own: no row repeats another and no draw the one before."""
    batch = draw(sampler, [[1, 4]], Sampling(24, n=64, temperature=3.0), KEY)
    found = responses(batch)
    long = [tuple(r[:6]) for r in found.values() if len(r) >= 6]
    assert len(set(long)) == len(long) > 30
    repeated = [a == b for r in found.values() for a, b in itertools.pairwise(r)]
    assert sum(repeated) < 0.3 * len(repeated)


@pytest.mark.parametrize("which", ["made", "general"])
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[5], SAMPLINGS[6]], ids=str)
def test_order_size_and_slots_do_not_matter(request, which, sampling):
    this = request.getfixturevalue(which)
    ids = list(range(len(PROMPTS)))
    whole = draw(this.sampler(slots=64), PROMPTS, sampling, KEY)
    want, near = responses(whole), whole["near_ties"].sum()
    for slots, order in ((64, ids[::-1]), (4, ids[3:] + ids[:3]), (1, ids[:4]), (7, [2, 10])):
        batch = draw(this.sampler(slots=slots), [PROMPTS[i] for i in order], sampling, KEY, ids=order)
        got = responses(batch)
        differ = {name for name in got if got[name] != want[name]}
        assert len(differ) <= near <= 1
        assert got.keys() == {(i, s) for i in order for s in range(sampling.n)}


def test_draws_are_a_function_of_key_id_sample_and_position(sampler):
    """The contract in full, on a model that likes all 13 tokens alike."""
    flat = Sampler(sampler.folder, slots=3)
    flat.publish(0, Weights.of({name: torch.zeros(shape) for name, shape in flat.decoder.shapes.items()}))
    ids = [5, 9, 11, 0]
    found = responses(draw(flat, [[1] * (1 + i) for i in range(4)], Sampling(9, n=2), KEY, ids=ids))
    for (i, sample), tokens in found.items():
        seed = KEY.fold_in(i).fold_in(sample).seed()
        positions = torch.arange(len(tokens)) + 1 + ids.index(i)
        u = uniform_at(torch.tensor([seed]), positions)
        assert tokens == (((1 - u) * 13).ceil().long() - 1).tolist()


@pytest.mark.parametrize("slots", [4, 64])
def test_no_step_is_wasted(made, slots, monkeypatch):
    """A row takes part in as many steps as it has tokens after its first, and free slots are filled at once."""
    sampler, alive, begun = made.sampler(slots=slots), [], []
    step, prefill = sampler.decoder.step, sampler.decoder.prefill
    monkeypatch.setattr(sampler.decoder, "step", lambda *args: alive.append(len(args[0])) or step(*args))
    monkeypatch.setattr(
        sampler.decoder, "prefill", lambda rows, to: begun.append((len(alive), len(rows))) or prefill(rows, to)
    )
    batch = draw(sampler, PROMPTS, Sampling(12), KEY)
    assert sum(alive) == int(batch["response_mask"].sum()) - len(PROMPTS)
    assert sum(rows for _, rows in begun) == len(PROMPTS)
    assert max(alive) <= slots
    # With so few slots a single free one is reason enough to fill it.
    refilled, last = dict(begun), begun[-1][0]
    assert (last > 0) == (slots < len(PROMPTS))
    assert all(alive[k - 1] + refilled.get(k, 0) == slots for k in range(1, last + 1))


def test_prefills_in_parts_are_the_same(sampler, monkeypatch):
    want = responses(draw(sampler, PROMPTS, Sampling(12, n=3), KEY))
    monkeypatch.setattr(module, "PREFILL_TOKENS", 7)
    assert responses(draw(sampler, PROMPTS, Sampling(12, n=3), KEY)) == want


def test_another_key_or_id_draws_otherwise(sampler):
    sampling = Sampling(12, n=2)
    first = responses(draw(sampler, PROMPTS, sampling, KEY))
    again = responses(draw(sampler, PROMPTS, sampling, KEY))
    other = responses(draw(sampler, PROMPTS, sampling, Key.from_seed(8)))
    shifted = responses(draw(sampler, PROMPTS, sampling, KEY, ids=range(1, 12)))
    assert first == again
    assert all(first[i, s] != other[i, s] for i in range(4, 8) for s in range(2))
    assert all(first[i, s] != shifted[i + 1, s] for i in range(4, 8) for s in range(2))


def test_a_sample_does_not_depend_on_how_many_there_are(sampler):
    few = responses(draw(sampler, PROMPTS, Sampling(12, n=1), KEY))
    many = responses(draw(sampler, PROMPTS, Sampling(12, n=5), KEY))
    assert len(many) == 5 * len(few)
    assert all(many[name] == tokens for name, tokens in few.items())
    assert len({tuple(many[5, s]) for s in range(5)}) > 1


@pytest.mark.parametrize("which", ["made", "general"])
def test_greedy_is_transformers_greedy(request, which):
    this = request.getfixturevalue(which)
    got = responses(draw(this.sampler(slots=3), PROMPTS, Sampling(12, temperature=0.0), KEY))
    for i, prompt in enumerate(PROMPTS):
        want = this.plain.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=12
        )
        assert got[i, 0] == want[0, len(prompt) :].tolist()


def test_responses_end_at_any_stop_token(made, sampler):
    free = responses(draw(sampler, PROMPTS, Sampling(20, n=2), KEY))
    batch = draw(sampler, PROMPTS, Sampling(20, n=2, stop_token_ids=(5, 7)), KEY)
    ends = set()
    for (name, got), finished in zip(responses(batch).items(), batch["finished"], strict=True):
        stop = next((i for i, token in enumerate(free[name]) if token in (EOS, 5, 7)), 19)
        assert got == free[name][: stop + 1]
        assert finished == float(got[-1] in (EOS, 5, 7))
        ends.add(got[-1])
    assert {EOS, 5, 7} <= ends


@pytest.mark.parametrize("told, ends", [([5, 7], {5, 7}), (7, {7}), (None, {EOS})])
def test_the_models_own_end_tokens(made, tmp_path, told, ends):
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({} if told is None else {"eos_token_id": told}))
    assert Sampler(tmp_path).end_tokens == ends
    path.unlink()
    assert Sampler(tmp_path).end_tokens == {EOS}


def test_half_precision_draws_almost_alike(made, sampler):
    """In bf16 the log-probs are those of its own distribution, and near those of fp32."""
    half = made.sampler(dtype="bfloat16")
    batch = draw(half, PROMPTS, Sampling(12, n=4), KEY)
    gaps = []
    for tokens, told, start in zip(
        batch.rows(), batch.rows("rollout_log_probs"), batch["prompt_length"].tolist(), strict=True
    ):
        with torch.no_grad():
            log_probs = made.plain(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
        gaps.append((told[start:] - log_probs.gather(1, tokens[start:, None])[:, 0]).abs())
    assert torch.cat(gaps).mean() < 0.05


# The benchmark


def test_the_benchmarks_responses_end_at_mixed_lengths():
    from verl_fn.benchmarks import sampler as benchmark

    result = benchmark.compare(benchmark.SIZES["0.1M"], pairs=1)
    assert result["lengths"] == {"mean": 50.0, "min": 4, "max": 96}
    assert result["speedup"]["median"] > 0
