"""Models with experts on the Megatron backend: first steps, replayed routes and auxiliary losses."""

import pytest
import torch
from megatron_support import EXPERTS, FP32, MARKS, ROOT, call, check_first_step, read_lines
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from verl_fn.backends.hf.config import ModelError
from verl_fn.backends.hf.lora import Lora
from verl_fn.backends.hf.new_model import new_model
from verl_fn.backends.local import Local
from verl_fn.backends.megatron.names import Canonical
from verl_fn.backends.megatron.routing import Routers
from verl_fn.data.tasks import TASKS
from verl_fn.state import Batch, tree
from verl_fn.steps import ppo_clip
from verl_fn.testing import tiny_batch

pytestmark = MARKS
LORA = Lora(rank=4, alpha=8.0)
BOTH = {"tp": 2, "sp": True, "ep": 2}


@pytest.fixture
def two(megatron_ranks):
    return megatron_ranks(2)


@pytest.fixture
def four(megatron_ranks):
    return megatron_ranks(4)


def test_replayed_routes_obey_the_law_of_splits(two, experts):
    call(two, "replay_splits", experts, {"ep": 2}, FP32)


@pytest.mark.parametrize("options", [{"ep": 2}, {"tp": 2, "sp": True}, {"pp": 2}], ids=str)
def test_the_first_steps_with_experts(two, experts, options):
    """A coefficient of a loss of the router, which the config inherits, changes nothing."""
    check_first_step(call(two, "first_step", experts, options, 9)[0])


@pytest.mark.parametrize(
    "options",
    [
        {**BOTH, "checkpointing": True},
        {"tp": 2, "sp": True, "head": "value"},
        {"pp": 2, "ep": 2},
        {"cp": 2, "ep": 2},
        {**BOTH, "ep": 4, "lora": LORA},
    ],
    ids=str,
)
def test_the_first_steps_of_four_ranks(four, experts, options):
    """With ``tp=2`` and ``ep=2``, the experts of two ranks lie on ranks that share the matrices of other layers."""
    check_first_step(call(four, "first_step", experts, options, 9)[0])


def test_routers_on_cpus_need_no_kernel_of_transformer_engine(two, experts):
    check_first_step(call(two, "first_step_beside_transformer_engine", experts, {"tp": 2, "sp": True}, 9)[0])


def test_laws_on_two_ranks(two, shallow_experts):
    """Also for the dense layers between the experts; the laws of adapters are in test_megatron.py."""
    call(two, "laws", shallow_experts, {**BOTH, "checkpointing": True}, FP32)


@pytest.mark.parametrize("options", [BOTH, {"pp": 2, "ep": 2}, {"tp": 2, "sp": True}], ids=str)
def test_norms_of_parameters_in_an_own_optimizer(four, experts, options):
    for worst, unnamed in call(four, "norms_by_parameter", experts, options):
        assert worst <= 1e-6
        assert unnamed is None if "ep" not in options else "call update.reduce(t, name)" in unnamed


@pytest.mark.parametrize("options", [BOTH, {"ep": 2}], ids=str)
def test_updates_of_four_ranks_are_those_of_megatrons_own_optimizer(four, experts, options):
    for weight, norm, change in call(four, "beside_megatrons_optimizer", experts, options):
        assert weight <= 1e-6 and norm <= 1e-6 and change > 1e-3


def test_a_norm_without_other_ranks_experts_differs(four, experts):
    assert call(four, "first_step", experts, BOTH, 9, "NormOfOneRank")[0]["grad_norm"] > 1e-3


@pytest.mark.parametrize("lora", [None, LORA], ids=["all parameters", "adapters"])
def test_states_with_experts_move_between_layouts(four, experts, tmp_path, lora):
    """One process, ``tp=2`` with ``ep=2``, ``ep=4`` and one process again: parameters and moments, bitwise."""
    from rank_cases import KEY, optimizer

    one = Local(experts, optimizer(), max_tokens=24, lora=lora)
    state = one.init(KEY)
    for _ in range(2):
        state, _ = one.apply_update(state, one.forward_backward(state, tiny_batch(), ppo_clip())[0])
    one.save(state, tmp_path / "one")
    digest, places = tree.digest(dict(state.params)), [tmp_path / name for name in ("one", "two", "three")]
    for sizes, source, into in zip((BOTH, {"ep": 4}), places, places[1:], strict=False):
        assert call(four, "moves", experts, {"lora": lora, **sizes}, source, into) == [digest] * 4
    assert tree.equal(one.restore(places[-1]), state)
    for file in ("model.safetensors", "train_state.safetensors"):
        assert (places[-1] / file).read_bytes() == (places[0] / file).read_bytes(), file
    assert call(four, "published", experts, {"lora": lora, **BOTH}) == [True] * 4


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_run_replays_routes(megatron_ranks, tmp_path, mode):
    """Two updates of shuffled minibatches, which would be refused without a recording; the critic replays nothing."""
    model = new_model(tmp_path / "model", chars=TASKS["reverse"].alphabet, hidden_size=16, **EXPERTS)
    arguments = [
        "train", str(ROOT / "recipes/ppo_reverse.toml"), f"model.path={model}", "driver.device=cpu",
        "data.train_batch_size=4", "algorithm.ppo_mini_batch_size=2", "algorithm.critic_warmup=0", "data.val_size=4",
        "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false",
        "algorithm.entropy_coeff=0.01", "actor.strategy=megatron", f"actor.router_replay.mode={mode}",
        f"trainer.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert call(megatron_ranks(1), "run", arguments) == [0]
    (line,) = (line for line in read_lines(tmp_path / "run") if "actor/grad_norm" in line)
    assert line["actor/grad_norm"] > 0 and "critic/grad_norm" in line


def test_an_auxiliary_loss_differs_from_the_loss_that_was_given(two, experts):
    """The provider's own loss of the router, which a config would set; see ``test_the_first_steps_with_experts``."""
    added = {"provider": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}}
    assert call(two, "first_step", experts, {"ep": 2, **added}, 9)[0]["gradient"] > 1e-3


@pytest.mark.parametrize("options", [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {"ep": 2}], ids=str)
@pytest.mark.parametrize("coefficients", [(0.1, 0.0), (0.0, 0.05)], ids=["balance", "large logits"])
def test_losses_of_routers_are_means_over_tokens(two, experts, options, coefficients):
    """Beside transformers' model: no rank's part of a router's gradient is counted twice, or by its tokens."""
    for worst, scale in call(two, "losses_of_routers", experts, options, coefficients):
        assert worst <= 1e-5 and scale > 1e-4


@pytest.mark.parametrize("options", [BOTH, {"tp": 2, "sp": True, "cp": 2, "checkpointing": True}], ids=str)
def test_losses_of_routers_on_four_ranks(four, experts, options):
    for worst, scale in call(four, "losses_of_routers", experts, options):
        assert worst <= 1e-5 and scale > 1e-4


@pytest.mark.parametrize(
    "options",
    [{"ep": 2, "checkpointing": True}, {"tp": 2, "sp": True}, {"pp": 2, "checkpointing": True}, {"cp": 2}],
    ids=str,
)
def test_replayed_routes_are_those_of_the_recording(two, experts, options):
    """The ratio of the first update is 1 on other micro-batches and layouts, where routers decide otherwise."""
    for change, free, gradient in call(two, "replayed", experts, options):
        assert change <= 1e-6 and gradient <= 1e-5 and free > 1e-4


def test_replayed_routes_are_those_of_the_engine(two, experts):
    """The ratio of the first update is 1; experts of the last token, which the engine does not have, are not read."""
    for error, wrong, kl in call(two, "replayed_from_engine", experts, {"pp": 2}):
        assert error <= 1e-6 and wrong.pop("last") == error and abs(kl) <= 1e-6
        assert min(wrong.values()) > 1e-4, wrong


@pytest.mark.parametrize(
    ("name", "options"),
    [("ReplaysThePackedOrder", {"cp": 2}), ("RoutesBackwardAlone", {"pp": 2, "checkpointing": True})],
)
def test_wrong_replays_differ(two, experts, name, options):
    change, _, gradient = call(two, "replayed", experts, options, name)[0]
    assert (change if name == "ReplaysThePackedOrder" else gradient) > 1e-4


@pytest.mark.parametrize("count", [4, 256, 512])
def test_recordings_name_each_expert_that_there_is_and_no_other(count):
    """With 256 experts a recording is uint8, and torch compares uint8 with 256 as if it were 0."""
    routers, batch = Routers((), (), 1, 2, count), Batch.from_rows([[1]])
    last = torch.tensor([[[0, count - 1]]])
    routers.check(batch.with_tokens(routed_experts=last.to(routers.dtype)))
    for wrong in (last + 1, last - 1):
        with pytest.raises(ValueError, match=f"the numbers 0 to {count - 1}"):
            routers.check(batch.with_tokens(routed_experts=wrong))


def test_what_cannot_be_replayed_is_refused(two, experts, folder):
    for errors in call(two, "replay_refused", experts, folder):
        for error, message in zip(
            errors,
            (
                "the batch has no 'routed_experts' to replay",
                "this model's is torch.uint8[",
                "goes to the experts [10, 10] in layer 0 of the layers with experts; experts have the numbers 0 to 3",
                "goes to one expert twice",
                "not ['routed_experts']",
                "router_replay needs a model with experts",
                "leave moe_router_fusion out",
            ),
            strict=True,
        ):
            assert message in error


def test_experts_are_exported_once():
    """Ranks of expert parallelism that all name their experts from 0 on are refused (vime#388)."""
    conversions = get_checkpoint_conversion_mapping("qwen3_moe")
    canonical = Canonical({"mlp.experts.down_proj": torch.empty(4, 4, 3)}, conversions)
    by_rank = [[(f"mlp.experts.{i}.down_proj.weight", torch.zeros(4, 3)) for i in range(2)] for _ in range(2)]
    with pytest.raises(ModelError, match=r"gives mlp\.experts\.0\.down_proj\.weight twice"):
        dict(canonical.joined(part for parts in by_rank for part in parts))
    with pytest.raises(ModelError, match="no parameter for 1 tensors"):
        dict(canonical.joined(by_rank[0]))
