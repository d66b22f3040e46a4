"""Steps of algorithms of one's own: what a run keeps of them, and which fields a check of their parts misses."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from test_own_parts import learn, own, sample
from test_without_critic import step, workers

from verl_fn.algorithms import Algorithm, AlgorithmError, Workers
from verl_fn.algorithms.own import check_fields
from verl_fn.algorithms.policy import estimator, policy_loss
from verl_fn.algorithms.workers import Roles
from verl_fn.config import GRPO, ConfigError, Outline, Role
from verl_fn.state import Sampling
from verl_fn.steps import dr_grpo, loss
from verl_fn.testing.advantages import estimator_batch


def test_what_sample_reports_and_has_taken_is_in_the_report_of_the_step():
    def slow(state, problems, w):
        return attrs.evolve(sample(state, problems, w), seconds={"gen": 50.0}, report={"mine/number": 3.0})

    _, _, report = step(own(sample=slow), workers())
    assert report["mine/number"] == 3.0 and report["timing_s/gen"] == 50.0 < report["timing_s/step"] < 600.0


def test_a_report_may_refer_to_results_of_other_processes():
    """As what a trainer over Ray returns; the workers' ``get`` fetches them."""

    def asks(state, experience, w):
        after, report = learn(state, experience, w)
        return after, {**report, "rows": SimpleNamespace(here=12.0)}

    def get(value):
        return {k: getattr(v, "here", v) for k, v in value.items()} if isinstance(value, dict) else value

    assert step(own(learn=asks), workers(get=get))[2]["actor/rows"] == 12.0


@pytest.mark.parametrize("steps", [-1, 2])
def test_a_step_adds_one_and_no_more(steps):
    def leaps(state, experience, w):
        after, report = learn(state, experience, w)
        return attrs.evolve(after, step=state.step + steps), report

    with pytest.raises(
        AlgorithmError, match=rf"leaps .* returns a state of step {steps} after step 0; it must add 1"
    ):
        step(own(learn=leaps), workers())


def test_a_row_without_a_sampled_token_that_learn_leaves_out_is_counted():
    def first(state, experience, w):
        batch = experience.batch
        empty = batch.with_tokens(
            response_mask=batch["response_mask"] * batch.spread(batch["row_of_experience"] != 11)
        )
        return learn(state, attrs.evolve(experience, batch=empty.take(torch.arange(11))), w)

    def some(state, problems, w):
        drawn = sample(state, problems, w)
        mask = drawn.batch["response_mask"] * drawn.batch.spread(torch.arange(12) != 11)
        return attrs.evolve(drawn, batch=drawn.batch.with_tokens(response_mask=mask))

    _, _, report = step(own(sample=some, learn=first), workers())
    assert (report["rollout/rows_dropped/learn"], report["rollout/tokens_dropped/learn"]) == (1.0, 0.0)


def test_a_role_that_is_not_there_is_named_with_the_ones_that_are():
    with pytest.raises(AlgorithmError, match="there is no role 'critic', but actor, reference; in a run"):
        Roles(actor=1, reference=2)["critic"]
    with pytest.raises(AlgorithmError, match="there is no role 'actor', but none; in a run"):
        Roles()["actor"]


@pytest.mark.parametrize(("own_end", "ends"), [(0, (0,)), (7, (7,)), (None, ())])
def test_a_response_ends_with_the_tokenizers_own_token(own_end, ends):
    w = Workers({}, None, None, SimpleNamespace(eos_token_id=own_end), Sampling(8))
    assert w.end_tokens == ends


@loss(needs=["logprobs"])
def of_a_reward(outputs, batch):
    return -batch.spread(batch["reward/length"]) * outputs.logprobs, {}


@loss(needs=["logprobs"])
def misspelled(outputs, batch):
    return -batch["advantage"] * outputs.logprobs, {}


@loss(needs=["logprobs"])
def of_an_environment(outputs, batch):
    return -batch.spread(batch["env_colour"]) * outputs.logprobs, {}


def too_early(batch):
    return dr_grpo(batch).with_tokens(advantages=batch["advantages"])


@loss(needs=["logprobs"], together="pair")
def of_pairs(outputs, batch):
    return -batch["advantages"] * outputs.logprobs, {}


def counts(batch):
    return batch.with_tokens(advantages=batch["response_mask"].long())


def fails(batch):
    raise RuntimeError("no such kernel")


@pytest.fixture
def here(monkeypatch):
    """References to the functions of this file."""
    monkeypatch.setattr(
        "verl_fn.algorithms.policy.load_object", lambda reference, key: globals()[reference.partition(":")[2]]
    )


def test_a_loss_of_ones_own_takes_no_options_and_keeps_no_rows_together(here):
    with pytest.raises(ConfigError, match="me:misspelled is a loss and takes no options, but weight are given"):
        policy_loss(GRPO(policy_loss="me:misspelled", policy_loss_kwargs={"weight": 1}))
    with pytest.raises(ConfigError, match="me:of_pairs keeps rows together by 'pair', but the minibatches"):
        policy_loss(GRPO(policy_loss="me:of_pairs"))


def test_an_estimators_whole_numbers_are_advantages_and_its_errors_name_it(here):
    batch = estimator_batch()
    advantages = estimator(GRPO(adv_estimator="me:counts"))(batch)["advantages"]
    assert advantages.dtype == torch.float32 and torch.equal(advantages, batch["response_mask"])
    with pytest.raises(RuntimeError, match="no such kernel") as error:
        estimator(GRPO(adv_estimator="me:fails"))(batch)
    assert error.value.__notes__ == ["raised in algorithm.adv_estimator = me:fails"]


@pytest.mark.parametrize(
    ("key", "name", "rewards", "message"),
    [
        ("policy_loss", "of_a_reward", (), "the batch has no field 'reward/length'"),
        ("policy_loss", "of_a_reward", ("reward/length",), None),
        # Another answer may get more fields than the one that was tried, and functions may not be known.
        ("policy_loss", "of_a_reward", ("reward/words",), None),
        ("policy_loss", "of_a_reward", None, None),
        ("policy_loss", "misspelled", None, "'advantage'; did you mean advantages?"),
        ("policy_loss", "of_an_environment", (), None),
        ("adv_estimator", "too_early", None, "the batch has no field 'advantages'"),
    ],
)
def test_a_field_that_no_reward_and_no_environment_writes_is_named(here, key, name, rewards, message):
    options = GRPO(**{key: f"me:{name}"})
    if message is None:
        assert check_fields(options, rewards) == {}
        return
    with pytest.raises(ConfigError) as error:
        check_fields(options, rewards)
    assert message in str(error.value) and str(error.value).startswith(f"algorithm.{key}: me:{name}: ")


def test_a_function_that_a_run_cannot_call_is_named_with_its_call():
    def learns(state, experience, w):
        return state, {}

    def counts(role):
        return 1

    for functions, name, call in (
        ({"outline": Outline(updates=counts)}, "counts", r"updates\(role, prompts, steps\), and it takes \(role\)"),
        ({"evaluate": counts}, "counts", r"evaluate\(state, problems, workers\), and it takes \(role\)"),
        ({"init": learns}, "learns", r"init\(states, key\), and it takes \(state, experience, w\)"),
        ({"sample": counts}, "counts", r"sample\(state, problems, workers\), and it takes"),
    ):
        with pytest.raises(AlgorithmError, match=rf"{name} \(.* of an algorithm, which is called as {call}"):
            Algorithm(**{"learn": learns} | functions)
    with pytest.raises(AlgorithmError, match="learns from pairs needs a sample"):
        Algorithm(learn=learns, outline=Outline(learns_from="pairs"))
    with pytest.raises(AlgorithmError, match="with the roles policy needs an init"):
        Algorithm(learn=learns, outline=Outline({"policy": Role()}))
