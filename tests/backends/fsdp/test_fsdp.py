"""The sharded backend on 1, 2 and 4 processes: the laws, the first step beside one process, and what it refuses."""

import json

import pytest
import torch

from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.benchmarks import scaling
from verl_fn.benchmarks.tiny_models import tiny_folder
from verl_fn.state import tree

FP32, BF16 = 1e-5, 0.02
LORA = Lora(rank=3, alpha=6.0)  # a rank that no layout here divides


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """A model of one layer, for checks that run it a hundred times."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, num_hidden_layers=1)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, tie_word_embeddings=False)


# Options are combined, since each run of all laws takes seconds; the first steps below vary them one by one, and
# tests/driver/test_groups.py checks the laws without any.
@pytest.mark.parametrize(
    "options",
    [
        {"sp": 2, "checkpointing": "offload", "head": "value"},
        {"replicate": 2, "reshard_after_forward": False, "lora": LORA, "row_layout": "padded"},
    ],
    ids=str,
)
def test_laws_on_two_ranks(two, shallow, options):
    two.run("laws", shallow, options, FP32)


def test_moments_in_bf16_on_two_ranks(two, shallow, tmp_path):
    two.run("moments_in_bf16", shallow, tmp_path / "state")


def test_gradients_summed_in_bf16_on_two_ranks(two, shallow):
    (dtypes, gap), _ = two.run("summed_in_bf16", shallow)
    assert dtypes == {torch.float32} and 0 < gap < BF16


def test_families_on_two_ranks(two, tmp_path):
    """Buffers among the weights, a factor of the logits, soft caps, sinks, linear attention."""
    names, shared = ["deepseek_v3", "cohere", "gemma2", "gpt_oss", "qwen3_5_text"], ["gemma2", "gpt_oss"]
    (worst, refusal), _ = two.run("families", names, tmp_path, shared)
    assert len(worst) == len(names) + len(shared)
    for name, errors in worst.items():
        assert errors["loss"] <= 1e-5 and errors["grad_norm"] <= 1e-5 and errors["gradient"] <= 1e-4, (name, errors)
    assert "needs padded rows, which ranks cannot share; set ulysses_sequence_parallel_size to 1" in refusal


def test_a_states_own_buffers_decide(two, tmp_path):
    folder = tiny_folder("deepseek_v3", tmp_path / "model")
    for facts, worst, different in two.run("buffer_checks.on_ranks", "fsdp", folder, {}, tmp_path / "saved"):
        assert all(facts.values()), facts
        assert worst <= 1e-5 and different > 1e-2


def test_laws_on_one_rank(one, untied):
    one.run("laws", untied, {"head": "value", "checkpointing": True}, FP32)


@pytest.mark.parametrize("name", ["IgnoresParameters", "DropsARank", "AliasedGradients"])
def test_broken_backends_are_caught_on_one_rank(one, shallow, name):
    (law,) = one.run("rank_mutants.mutant", shallow, name)
    assert law in {"Purity", "Persistence", "Donation"}


def test_laws_in_bf16(two, shallow):
    options = {"dtype": "bfloat16", "reduce_dtype": "bfloat16", "head": "value", "lora": LORA, "checkpointing": True}
    two.run("laws", shallow, options, BF16)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sp": 4},
        {"replicate": 2, "head": "value"},
        {"lora": LORA, "sp": 2, "replicate": 2},
    ],
    ids=str,
)
def test_the_first_steps_are_those_of_one_process(four, untied, options):
    worst = four.run("first_step", untied, options, 9)[0]
    assert worst["loss"] <= 1e-6 and worst["grad_norm"] <= 1e-6, worst
    assert worst["gradient"] <= 1e-5 and worst["update"] <= 1e-5, worst


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 1e-6), ({"sp": 2}, 1e-6), ({"dtype": "bfloat16"}, BF16)], ids=str
)
def test_without_adapters_the_parameters_are_the_base_model(two, folder, options, tolerance):
    assert max(two.run("adapters_off", folder, options | {"lora": LORA})) <= tolerance


def test_compiled_layers_compute_the_same(two, shallow):
    worst = two.run("compiled", shallow, {"checkpointing": "offload"}, 9)[0]
    assert worst["loss"] <= 1e-6 and worst["grad_norm"] <= 1e-6, worst
    assert worst["gradient"] <= 1e-5 and worst["update"] <= 1e-5, worst


def test_layers_are_compiled_once_for_all_sizes(two, shallow):
    """Of ranks that share the sequence, which also compute the same."""
    assert 0.0 < max(two.run("compiled_once", shallow, {"sp": 2})) <= 1e-5


KEPT = {"reshard_after_forward": False, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("forward", {}),
        ("forward", KEPT),
        ("backward", {}),
        ("later forward", {}),
        ("later backward", {}),
        ("later backward", KEPT),
        ("loss forward", {}),
        ("loss backward", KEPT),
    ],
)
def test_a_call_that_fails_leaves_nothing_behind(two, folder, where, options):
    assert two.run("after_failure", folder, where, options) == [True, True]


def test_a_reset_that_does_nothing_is_caught(two, folder):
    assert two.run("without_reset", folder) == [False, False]


def test_what_is_private_to_torch_is_there(one, folder):
    """Every private name of PyTorch that sharding touches; a new version is tried here first."""
    assert torch.__version__.startswith("2.11."), "read backends/fsdp/torch_private.py again"
    assert one.run("private_names", folder) == [[]]


@pytest.mark.parametrize(("dtype", "tolerance", "reshard"), [("float32", FP32, False), ("bfloat16", 0.05, True)])
def test_what_is_trained_may_change_from_call_to_call(one, two, untied, dtype, tolerance, reshard):
    for ranks in (one, two):
        options = {"dtype": dtype, "reshard_after_forward": reshard}
        assert max(ranks.run("trained_in_turn", untied, options)) < tolerance


@pytest.mark.parametrize(
    ("loss", "rows", "options"),
    [
        ("both", 10, {}),
        ("pairs", 2, {}),
        ("both", 2, {}),
        ("pairs", 6, {"sp": 2}),
        ("both", 10, {"reshard_after_forward": False, "checkpointing": True}),
    ],
    ids=str,
)
def test_losses_of_rows_that_belong_together(two, folder, loss, rows, options):
    """Also with fewer pairs than ranks, where a rank fills up with a pair of no weight."""
    assert max(two.run("levels", folder, options, rows, loss)) < 1e-5


def test_a_backend_that_splits_pairs_is_caught(two, folder):
    messages = two.run("rank_mutants.split_groups", folder)
    assert all(message and "do not have two rows" in message for message in messages)


def test_groups_that_cannot_stay_together_are_refused(two, folder):
    for long, missing in two.run("refused_groups", folder):
        assert "the group pair = " in long and "more than the budget of 30" in long
        assert "no per-row field of that name" in missing


@pytest.mark.parametrize("options", [{}, {"sp": 2}, {"replicate": 2}], ids=str)
def test_whole_tensors_by_canonical_name(two, folder, options):
    assert max(two.run("named", folder, options)) < 1e-6


def test_values_keep_their_meaning(two, folder):
    norms = two.run("holds", folder)
    assert norms[0] == norms[1]


@pytest.mark.parametrize(("rows", "options"), [(1, {}), (3, {}), (1, {"sp": 2})])
def test_fewer_rows_than_ranks(four, folder, rows, options):
    assert max(four.run("few_rows", folder, options, rows)) < 1e-6


def test_ranks_with_different_batches_are_refused(two, folder):
    messages = two.run("other_batches", folder)
    assert messages[0] == messages[1]
    assert all("ranks [1] were given another batch than rank 0" in message for message in messages[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sp": 3}, "sp = 3 does not divide the 4 ranks"),
        ({"replicate": 3}, "replicate = 3 does not divide the 4 ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(four, folder, options, message):
    assert all(message in error for error in four.run("refused", folder, options))


def test_tokens_that_the_model_does_not_know_are_named(four, folder):
    assert all("row 0 of the batch has the token id -" in error for error in four.run("refused_token", folder))


def test_sequence_parallelism_wants_heads_to_share(four, tmp_path):
    three = new_model(tmp_path, chars="abcd", hidden_size=24, num_attention_heads=6, num_key_value_heads=3)
    assert all("does not divide the model's 6 attention heads" in t for t in four.run("refused", three, {"sp": 4}))
    assert all("key-value heads: one must be a multiple" in t for t in four.run("refused", three, {"sp": 2}))


@pytest.mark.parametrize("options", [{}, {"head": "value"}], ids=str)
def test_frozen_shards_lie_in_the_compute_dtype(two, untied, options):
    for bytes_each, error in two.run("narrow_base", untied, {"lora": LORA, "dtype": "bfloat16", **options}):
        assert bytes_each == {"frozen": 2, "trained": 4}
        assert "model.embed_tokens.weight, are frozen in this backend's model and lie in its compute dtype" in error


def test_a_model_that_is_never_trained_has_half_the_bytes(two, folder, tmp_path):
    for (full, half), error in two.run("never_trained", folder, tmp_path):
        assert full == 2 * half > 0 and "made with the optimizer frozen()" in error


def test_first_steps_beside_a_backend_that_each_rank_has(two, untied):
    (of_first, of_second) = two.run("compared", untied)
    assert of_first == of_second
    for loss, grad_norm, worst in of_first:
        assert loss[0] == pytest.approx(loss[1], abs=1e-6) and grad_norm[0] == pytest.approx(grad_norm[1], rel=1e-5)
        assert 0.0 < worst < 1e-4


NARROW = {"lora": LORA, "dtype": "bfloat16"}


@pytest.mark.parametrize("options", [{}, {"replicate": 2}, NARROW], ids=str)
def test_a_state_moves_between_one_two_and_four_ranks(two, four, folder, tmp_path, options):
    """Saved by four, restored by two and by one process, saved again, and restored by four: bitwise."""
    from rank_cases import optimizer

    (digest, *others) = four.run("save", folder, tmp_path / "four", options)
    assert others == [digest] * 3
    lora = {name: options[name] for name in NARROW if name in options}
    assert two.run("restore", folder, tmp_path / "four", lora) == [digest] * 2
    local = Local(folder, optimizer(), **lora)
    state = local.restore(tmp_path / "four")
    assert tree.digest(state) == digest
    local.save(state, tmp_path / "one")
    assert four.run("restore", folder, tmp_path / "one", options) == [digest] * 4


@pytest.mark.parametrize(
    ("name", "laws", "part"),
    [
        ("IgnoresParameters", {"Purity", "Persistence"}, None),
        ("DropsARank", {"Purity", "Split invariance", "Layout"}, None),
        ("Averages", {"Derivative"}, "gradients"),
        ("NormOfOneRank", {"Layout"}, "layouts"),
        ("AliasedGradients", {"Purity", "Persistence", "Donation"}, None),
    ],
)
def test_broken_sharded_backends_are_caught(two, shallow, name, laws, part):
    broken = two.run("rank_mutants.mutant", shallow, name, part)
    assert set(broken) <= laws and None not in broken, broken


def test_the_benchmark_of_scaling(warm, tmp_path, capsys):
    """On one number of ranks, which is compared with itself."""
    arguments = ["--device", "cpu", "--shapes", "tiny", "--ranks", "2", "--rounds", "1", "--rows", "2"]
    scaling.main([*arguments, "--json", str(tmp_path / "a.json")])
    table, results = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())["results"]["tiny"]
    assert table.splitlines()[-1].startswith("held")
    assert {call: set(by_size) for call, by_size in results.items()} == {"logprobs": {"2"}, "update": {"2"}}
    assert results["update"]["2"]["efficiency"]["median"] == 1.0


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "checkpointing": True}], ids=str)
def test_the_callers_settings_change_nothing(two, folder, options):
    for differences in two.run("rank_calls.settings", folder, options):
        assert differences == dict.fromkeys(("autocast", "no_grad", "inference_mode", "default device"))


def test_memory_that_is_held_and_gradients_that_were_moved(two, folder):
    two.run("rank_calls.storages", folder)


def test_calls_that_cannot_be_answered_are_refused(two, folder):
    for says in two.run("rank_calls.refusals", folder):
        optimizer, gradients, params, loss, derivative, thread = says
        assert "this state's optimizer tree" in optimizer and "takes the Grads that" in gradients
        assert "pass state.params" in params and "a loss is a Loss" in loss
        assert "forward_backward has no derivative" in derivative and "make them from one thread" in thread


@pytest.mark.parametrize("options", [{"replicate": 2}, {"sp": 2}], ids=str)
def test_models_of_one_layout_share_its_process_groups(two, folder, options):
    two.run("rank_calls.shared_groups", folder, options)


def test_fields_of_a_batch_are_constants(two, folder):
    two.run("rank_calls.constants", folder)


@pytest.mark.parametrize(
    ("options", "gathers"),
    [({}, 0), ({"replicate": 2}, 0), ({"lora": LORA}, 14)],
    ids=str,
)
def test_each_rank_publishes_the_rows_that_it_holds(four, folder, options, gathers):
    """Of adapters, A is gathered for each of the 14 layers, to merge it into the rows of its weight."""
    assert max(four.run("rank_calls.held_rows", folder, options, gathers)) < 1e-6


def test_several_tokens_at_each_place(two, folder):
    two.run("several_tokens", folder, {"sp": 2})
    two.run("several_tokens", folder, {})
