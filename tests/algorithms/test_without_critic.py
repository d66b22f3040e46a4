"""ReMax, RLOO and DAPO on mocks: what they ask engine and reward for, and what they learn from."""

from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch

from verl_fn import steps
from verl_fn.algorithms import Algorithm, Workers, dapo, distill, grpo, rejection, remax, rloo, sft
from verl_fn.algorithms import workers as parts
from verl_fn.algorithms.experience import draw, update_batches
from verl_fn.algorithms.policy import estimator, policy_loss
from verl_fn.algorithms.policy_optimization import NoSignal, joined, split_by_signal, with_baselines
from verl_fn.algorithms.workers import Clock, no_more
from verl_fn.backends.hf.new_model import char_tokenizer
from verl_fn.backends.protocol import Through
from verl_fn.config import (
    DAPO,
    GRPO,
    RLOO,
    SFT,
    ConfigError,
    Distill,
    Outline,
    Rejection,
    ReMax,
    load,
    make_plan,
    notes,
)
from verl_fn.config.algorithms import FilterGroups, OverlongBuffer
from verl_fn.data.tasks import TASKS
from verl_fn.errors import ArgumentError, UserError
from verl_fn.rewards import Reward
from verl_fn.runs.progress import few_groups
from verl_fn.state import Batch, Key, Sampling, TokenOutputs, tree
from verl_fn.steps import adamw, penalize_overlong
from verl_fn.steps import grpo as grpo_advantages
from verl_fn.testing import Mock, MockRollout, sample_table, tiny_batch

TASK = TASKS["count"]
TOKENIZER = char_tokenizer(TASK.alphabet)
KEY = Key.from_seed(0)


class Listening(Through):
    """An engine that remembers its requests."""

    def __init__(self):
        super().__init__(MockRollout(sample_table))
        self.calls = []

    def generate(self, requests, *, version=None):
        self.calls.append(requests)
        return super().generate(requests, version=version)


def by_problem(answers):
    """All responses to every third problem are worth the same."""
    return [
        {"score": 0.25 if a.problem.id % 3 == 0 else sum(map(ord, a.text)) % 97 / 97, "pred": a.text} for a in answers
    ]


def stream(start=4):
    """Problems from ``start`` on, each once."""
    taken = [start]

    def more(count):
        taken[0] += count
        return TASK.train(KEY, taken[0] - count, count)

    return more


def workers(judge=by_problem, **changes):
    actor, sampling = Mock(len(TOKENIZER), adamw(0.1)), Sampling(8, n=3, stop_token_ids=(TOKENIZER.eos_token_id,))
    w = Workers({"actor": actor}, Listening(), Reward(judge, TOKENIZER), TOKENIZER, sampling, more=stream())
    return attrs.evolve(w, **changes)


def step(algorithm, w):
    state = algorithm.init({"actor": w.trainers["actor"].init(KEY)}, KEY)
    experience = algorithm.sample(state, TASK.train(KEY, 0, 4), w)
    return experience, *algorithm.learn(state, experience, w)


def test_remax_asks_for_a_greedy_response_to_each_prompt():
    w = workers()
    experience, state, report = step(remax(ReMax()), w)
    sampled, greedy = w.rollout.calls
    assert [r.sampling.temperature for r in greedy] == [0.0] * 4 and [r.sampling.n for r in greedy] == [1] * 4
    assert [(r.id, r.prompt) for r in greedy] == [(r.id, r.prompt) for r in sampled]
    batch, (reason, rest) = experience.batch, *experience.dropped.items()
    assert (len(batch), reason, len(rest)) == (12, "baseline", 4)
    for group, baseline in zip(batch["group"].tolist(), batch["reward_baselines"].tolist(), strict=True):
        assert baseline == rest["score"][rest["group"] == group].item()
    assert report["critic/baselines/mean"] == pytest.approx(float(batch["reward_baselines"].mean()))
    assert report["critic/advantages/max"] == pytest.approx(float((batch["score"] - batch["reward_baselines"]).max()))
    assert state.step == 1 and "timing_s/gen_max" in report and "rollout/rows_compared_with_none" not in report


def test_remax_leaves_out_problems_whose_greedy_conversation_failed():
    class Failing(Listening):
        def generate(self, requests, *, version=None):
            samples = super().generate(requests, version=version)
            return samples if len(self.calls) == 1 else samples[1:]

    class Apart(Listening):
        def generate(self, requests, *, version=None):
            return super().generate([requests[len(self.calls)]], version=version)

    w = workers(rollout=Failing())
    algorithm = remax(ReMax())
    state = algorithm.init({"actor": w.trainers["actor"].init(KEY)}, KEY)
    problems = TASK.train(KEY, 4, 4)
    experience = algorithm.sample(state, problems, w)
    assert experience.batch["group"].tolist() == [p.id for p in problems[1:] for _ in range(3)]
    state = algorithm.learn(state, experience, w)[0]
    assert state.step == 1
    with pytest.raises(UserError, match="no problem has both a greedy and a sampled conversation"):
        algorithm.sample(state, problems[:2], attrs.evolve(w, rollout=Apart()))


@pytest.mark.parametrize("version", [None, 7])
def test_weights_that_the_engine_holds_are_not_published_again(version):
    """As after an evaluation; a version of the workers' stands for the step."""

    class Counting(Listening):
        published = ()

        def publish(self, version, weights):
            self.published += (version,)
            return super().publish(version, weights)

    w = workers(rollout=Counting(), version=version)
    state = SimpleNamespace(actor=w.trainers["actor"].init(KEY), key=KEY, step=3)
    first, again = (draw(state, TASK.train(KEY, 0, 2), w).batch for _ in range(2))
    assert w.rollout.published == (3 if version is None else 7,) and tree.equal(first, again)
    state.step = 4
    later = draw(state, TASK.train(KEY, 0, 2), w).batch
    assert w.rollout.published == ((3, 4) if version is None else (7,))
    assert not torch.equal(first.tokens, later.tokens), "each step draws with a key of its own"


def test_a_greedy_response_that_is_missing_is_named():
    rows = Batch.from_rows([[1], [2]], per_row={"group": [7, 5]})
    with pytest.raises(ValueError, match="no greedy response to problem 5"):
        with_baselines(rows, Batch.from_rows([[1]], per_row={"group": [7], "score": [0.0]}))


def test_rloo_is_grpo_with_its_estimator():
    ours, theirs = (step(a, workers()) for a in (rloo(RLOO()), grpo(GRPO(adv_estimator="rloo"))))
    assert tree.equal(ours[1], theirs[1])
    assert ours[2]["actor/pg_loss"] == theirs[2]["actor/pg_loss"]


@pytest.mark.parametrize(
    "algorithm",
    [
        grpo(GRPO(reward_model="m")),
        rloo(RLOO(reward_model="m")),
        dapo(DAPO(reward_model="m", filter_groups=FilterGroups(enable=False))),
        distill(Distill(teacher="m")),
        Algorithm(learn=lambda state, experience, w: (state, {}), outline=Outline(needs_reward=False)),
    ],
    ids=["grpo", "rloo", "dapo", "distill", "own"],
)
def test_where_no_reward_is_needed_none_is_asked(algorithm):
    """A rule for the data's answers may not be there."""
    w = workers(judge=lambda answers: pytest.fail("the workers' reward was asked"))
    state = SimpleNamespace(actor=w.trainers["actor"].init(KEY), key=KEY, step=0)
    experience = algorithm.sample(state, TASK.train(KEY, 0, 4), w)
    assert len(experience.batch) == 12 and "score" not in experience.batch and "reward" not in experience.seconds


def test_groups_without_signal_are_replaced_by_new_problems():
    """Of the problems 0 to 3, two have a signal; 4 and 5 take the places, and both have one."""
    w = workers()
    experience, _, report = step(dapo(DAPO()), w)
    assert [[r.id for r in call] for call in w.rollout.calls] == [[0, 1, 2, 3], [4, 5]]
    assert experience.batch["group"].tolist() == [i for i in (1, 2, 4, 5) for _ in range(3)]
    assert experience.dropped["equal_rewards"]["group"].unique().tolist() == [0, 3]
    assert experience.problems == 4 and report["train/num_gen_batches"] == 2.0
    assert report["train/groups_kept"] == pytest.approx(4 / 6) and report["train/groups_missing"] == 0.0


def test_a_step_goes_on_with_what_there_is_when_the_limit_is_reached():
    w = workers()
    experience, state, report = step(dapo(DAPO(filter_groups=FilterGroups(max_num_gen_batches=1))), w)
    said = few_groups(1, report)
    assert "the batch lacks 2 of data.train_batch_size groups: " in said and " (1), 50.0% of the groups have" in said
    assert experience.problems == 2 and len(experience.batch) == 6 and len(w.rollout.calls) == 1
    assert state.step == 1
    equal = workers(judge=lambda answers: [{"score": 1.0, "pred": a.text} for a in answers])
    with pytest.raises(NoSignal, match=r"step 1: in each of 12 groups of responses, in 3 calls .* the same score"):
        step(dapo(DAPO(filter_groups=FilterGroups(max_num_gen_batches=3))), equal)
    with pytest.raises(ConfigError, match=r"metric is acc, which the reward functions do not return"):
        step(dapo(DAPO(filter_groups=FilterGroups(metric="acc"))), workers())
    with pytest.raises(ArgumentError, match=r"asks for 2 more problems, and its workers have no source"):
        step(dapo(DAPO()), workers(more=no_more))


def test_without_filter_and_penalty_dapo_is_grpo_with_its_clip_range():
    plain = DAPO(filter_groups=FilterGroups(enable=False))
    ours, theirs = (step(a, workers()) for a in (dapo(plain), grpo(GRPO(clip_ratio_low=0.2, clip_ratio_high=0.28))))
    assert tree.equal(ours[1], theirs[1])


def test_the_penalty_reaches_rewards_and_not_scores():
    options = DAPO(
        filter_groups=FilterGroups(enable=False), overlong_buffer=OverlongBuffer(len=6, penalty_factor=2.0)
    )
    _, _, report = step(dapo(options), workers())
    assert report["reward/overlong/mean"] < 0
    assert report["critic/rewards/mean"] == pytest.approx(
        report["critic/score/mean"] + report["reward/overlong/mean"], abs=1e-6
    )


def test_the_penalty_is_the_papers_formula():
    rows = [[0.0] * (n - 1) + [1.0] for n in range(1, 13)]
    fields = {"response_mask": [[1.0] * len(row) for row in rows]}
    fields |= dict.fromkeys(("token_level_scores", "token_level_rewards"), rows)
    batch = Batch.from_rows([[5] * len(row) for row in rows], fields)
    shaped = penalize_overlong(batch, 10, 4, 0.5)
    for row, rewards in enumerate(shaped.rows("token_level_rewards")):
        length = row + 1
        penalty = 0.0 if length <= 6 else (6 - length) / 4 if length <= 10 else -1.0
        assert rewards.tolist() == [0.0] * row + [1.0 + 0.5 * penalty]
        assert shaped["reward/overlong"][row] == 0.5 * penalty
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=f"the buffer has {buffer} tokens"):
            penalize_overlong(batch, 10, buffer)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_dropped_has_no_advantage_and_nothing_is_lost(seed):
    """The law of equal rewards: GRPO would learn nothing from the rows that dynamic sampling leaves out."""
    batch = tiny_batch(Key.from_seed(seed), rows=9)
    score = (batch["group"] * torch.arange(9)) % 2
    last = torch.zeros(batch.num_tokens)
    last[batch.last] = 1.0
    batch = batch.with_rows(score=score.float()).with_tokens(token_level_rewards=batch.spread(score.float()) * last)
    batch = batch.with_tokens(response_mask=torch.ones(batch.num_tokens))
    different, equal, groups = split_by_signal(batch)
    assert len(different) + len(equal) == 9 and different["group"].unique().numel() == groups
    assert set(different["group"].tolist()).isdisjoint(equal["group"].tolist())
    singles = [group for group in equal["group"].tolist() if equal["group"].tolist().count(group) == 1]
    shared = equal.take([i for i, group in enumerate(equal["group"].tolist()) if group not in singles])
    if len(shared):
        assert not grpo_advantages(shared)["advantages"].any()
    for group in different["group"].unique():
        assert different["score"][different["group"] == group].unique().numel() > 1


def test_batches_without_rows_are_left_out_of_a_whole():
    one, none = Batch.from_rows([[1]], per_row={"score": [1.0]}), Batch.from_rows([[1]]).take([])
    assert len(joined(none, one, none)) == 1 and len(joined(none, none)) == 0


@pytest.mark.parametrize(
    "algorithm", [sft(SFT()), grpo(GRPO()), rejection(Rejection()), rejection(Rejection(min_score=9))]
)
def test_a_step_reports_what_sample_has_measured(algorithm):
    w = workers()
    state = algorithm.init({"actor": w.trainers["actor"].init(KEY)}, KEY)
    drawn = algorithm.sample(state, TASK.train(KEY, 0, 4), w)
    drawn = attrs.evolve(drawn, seconds={"gen": 50.0, "reward": 10.0}, report={"mine/number": 3.0})
    after, report = algorithm.learn(state, drawn, w)
    assert after.step == 1 and report["mine/number"] == 3.0
    assert report["timing_s/gen"] == 50.0 and 60.0 < report["timing_s/step"] == report["perf/time_per_step"] < 600.0
    assert report["perf/throughput"] == drawn.batch.num_tokens / report["timing_s/step"]
    tokens = {name: value for name, value in report.items() if name.endswith(("global_tokens", "total_num_tokens"))}
    assert list(tokens.values()) == [drawn.batch.num_tokens]


def test_the_rows_that_rejection_keeps_are_fewer_than_the_problems():
    """Of the problems 0 to 3, the best responses to 0 and 3 are worth 0.25."""
    experience, _, report = step(rejection(Rejection(min_score=0.3)), workers())
    kept = experience.batch["score"]
    assert report["rejection/rows_kept"] == len(kept) == 2 and experience.problems == 4
    assert report["rejection/score/mean"] == pytest.approx(float(kept.mean())) and bool((kept >= 0.3).all())


def test_a_phase_has_the_time_of_its_calls_and_of_the_waits_for_their_results(monkeypatch):
    now = 0.0

    def takes(seconds, value=None):
        nonlocal now
        now += seconds
        return value

    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = Clock(lambda value: takes(2.0, value), {"gen": 5.0})
    assert clock.run_all({"ref": lambda: takes(1.0, 7), "values": lambda: takes(4.0, 8)}) == {"ref": 7, "values": 8}
    clock.run("ref", takes, 8.0)
    takes(16.0)
    assert clock.seconds == {"gen": 5.0, "ref": 13.0, "values": 6.0} and clock.total() == 40.0


def test_settings_that_do_not_go_together_are_refused():
    def plan(*overrides):
        return make_plan(load(overrides=["model.path=m", "rollout.n=2", *overrides]))

    for name in ("remax", "dapo"):
        with pytest.raises(ConfigError, match=r"algorithm.reward_model: .*(sample|enable=false)"):
            plan(f"algorithm.name={name}", "algorithm.reward_model=m")
    plan("algorithm.name=dapo", "algorithm.reward_model=m", "algorithm.filter_groups.enable=false")
    with pytest.raises(ConfigError, match=r"overlong_buffer.len is 20, more than data.max_response_length = 16"):
        plan("algorithm.name=dapo", "algorithm.overlong_buffer.len=20")
    apart = ["driver.kind=ray", "rollout.placement=apart", "driver.max_lag=1"]
    with pytest.raises(ConfigError, match=r"driver.max_lag = 1 .*dynamic sampling asks for more.*enable=false"):
        plan("algorithm.name=dapo", *apart)
    assert plan("algorithm.name=remax", *apart).options.rollout_is == "token"
    assert plan("algorithm.name=dapo", "algorithm.filter_groups.enable=false", *apart).driver.max_lag == 1
    with pytest.raises(ConfigError, match=r"rloo compares responses within a group and needs at least 2"):
        plan("algorithm.name=rloo", "rollout.n=1")


def test_keys_without_effect_are_reported():
    def said(*overrides):
        return " ".join(notes(None, ["model.path=m", *overrides]))

    assert "algorithm.gamma has no effect without algorithm.adv_estimator = gae" in said(
        "algorithm.name=remax", "algorithm.gamma=0.9"
    )
    off = ["algorithm.name=dapo", "algorithm.filter_groups.enable=false", "algorithm.filter_groups.metric=acc"]
    assert "algorithm.filter_groups.metric has no effect without algorithm.filter_groups.enable" in said(*off)
    assert "penalty_factor has no effect" in said("algorithm.name=dapo", "algorithm.overlong_buffer.penalty_factor=2")


RANGE = {"clip_ratio": 0.1, "clip_ratio_low": 0.15, "clip_ratio_high": 0.4}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"}


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, steps.ppo_clip(0.2, clip_ratio_c=3.0)),
        (RANGE | {"clip_ratio_c": 1.5}, steps.ppo_clip(0.1, 0.15, 0.4, 1.5)),
        ({"policy_loss": "gspo"} | RANGE, steps.gspo(0.1, 0.15, 0.4)),
        ({"policy_loss": "geo_mean"} | RANGE, steps.geo_mean(0.1, 0.15, 0.4)),
        ({"policy_loss": "cispo"} | RANGE, steps.cispo(0.1, 0.15, 0.4)),
        ({"policy_loss": "sapo", "tau_pos": 2.0, "tau_neg": 3.0}, steps.sapo(2.0, 3.0)),
        ({"policy_loss": "dro", "dro_beta": 0.5}, steps.dro(0.5)),
        ({"policy_loss": "dppo_tv"}, steps.dppo_tv(0.2, clip_ratio_c=20.0)),
        ({"policy_loss": "dppo_kl"}, steps.dppo_kl(0.2, clip_ratio_c=20.0)),
        ({"policy_loss": "dppo_tv", "clip_ratio_c": 1.5} | RANGE, steps.dppo_tv(0.1, 0.15, 0.4, 1.5)),
        ({"policy_loss": "dppo_kl", "clip_ratio_c": 1.5} | RANGE, steps.dppo_kl(0.1, 0.15, 0.4, 1.5)),
        ({"policy_loss": "clip_cov"} | RANGE, steps.clip_cov(0.1, 0.15, 0.4)),
        ({"policy_loss": "kl_cov", "ppo_kl_coef": 0.7}, steps.kl_cov(0.7)),
        ({"policy_loss": "gpg"}, steps.reinforce()),
        ({"policy_loss": "reinforce", "entropy_coeff": 0.5}, steps.reinforce() - 0.5 * steps.entropy()),
        ({"policy_loss": "reinforce", "entropy_coeff": 0.5, "entropy_cap": 1.0},
         steps.reinforce() - 0.5 * steps.entropy(1.0)),
        ({"policy_loss": "reinforce"} | KL, steps.reinforce() + 0.3 * steps.kl_to_reference("k2")),
    ],
)  # fmt: skip
def test_every_option_of_a_loss_reaches_it(options, made):
    """Ratios from 0.02 to 100 lie on all sides of all bounds, beside advantages of both signs."""
    old = torch.tensor([-4.7, -2.0, -1.0, -1.2, -4.0, -1.0, -9.0, -2.0, -1.0, -1.2, -4.0, -1.0])
    fields = {"old_log_probs": old, "ref_log_prob": old - 0.5, "cov_selected": old > -1.5}
    fields |= {"advantages": torch.tensor([1.0, -2.0] * 6), "response_mask": torch.ones(12)}
    batch = Batch.from_rows([[1] * 4, [2] * 5, [3] * 3]).with_tokens(**fields)
    batch = steps.aggregate_rows(steps.aggregate(batch, "token-mean"))
    found = []
    for loss in (policy_loss(GRPO(**options)), made):
        logprobs = (
            old + torch.tensor([4.6, 0.25, -0.13, 0.3, -3.9, 0.9, 1.6, 0.7, -0.3, 0.05, 1.0, -0.5])
        ).requires_grad_()
        spread = torch.linspace(0.1, 2.0, 12).requires_grad_()
        value = steps.total_loss(loss, TokenOutputs({"logprobs": logprobs, "entropy": spread}), batch)[0]
        found.append([value, *torch.autograd.grad(value, [logprobs, spread], allow_unused=True)])
    assert all(tree.equal(one, other) for one, other in zip(*found, strict=True))
    if options:
        default = steps.total_loss(
            policy_loss(GRPO()), TokenOutputs({"logprobs": logprobs, "entropy": spread}), batch
        )[0]
        assert default != value, "the options make a difference"


UNSCALED, NO_TAIL = {"norm_adv_by_std_in_grpo": False}, {"handle_zero_tail": False}


@pytest.mark.parametrize(
    ("name", "options", "made"),
    [
        ("grpo", UNSCALED, partial(steps.grpo, norm_adv_by_std=False)),
        ("grpo_passk", UNSCALED, partial(steps.grpo_passk, norm_adv_by_std=False)),
        ("gdpo", UNSCALED, partial(steps.gdpo, norm_adv_by_std=False)),
        ("gdpo", {"gdpo_reward_keys": ("truth",)}, partial(steps.gdpo, reward_keys=["truth"])),
        ("gdpo", {"gdpo_reward_weights": (1.0, -0.5)}, partial(steps.gdpo, reward_weights=[1.0, -0.5])),
        ("reinforce_plus_plus", {"gamma": 0.9}, partial(steps.reinforce_plus_plus, gamma=0.9)),
        ("optimal_token_baseline", NO_TAIL, partial(steps.optimal_token_baseline, handle_zero_tail=False)),
        ("tir_optimal_token_baseline", NO_TAIL, partial(steps.tir_optimal_token_baseline, handle_zero_tail=False)),
    ],
)  # fmt: skip
def test_every_option_of_an_estimator_reaches_it(name, options, made):
    batch = tiny_batch()
    default, found = (estimator(GRPO(adv_estimator=name, **more))(batch) for more in ({}, options))
    assert torch.equal(found["advantages"], made(batch)["advantages"])
    assert not torch.equal(found["advantages"], default["advantages"]), "the options make a difference"


def test_a_pass_has_as_many_minibatches_as_the_schedule_counts():
    """Seven rows of three problems are divided into three parts, and not by rows."""
    batch = Batch.from_rows([[i] for i in range(7)], {"response_mask": [[1.0]] * 7})
    for size, count in ((1, 3), (2, 2), (3, 1)):
        options = GRPO(ppo_mini_batch_size=size)
        parts = list(update_batches(workers(), batch, 3, options, KEY, policy_loss(options)))
        assert len(parts) == options.minibatches(3) == count
        assert torch.cat([part.tokens for part in parts]).tolist() == list(range(7))
