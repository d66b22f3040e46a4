"""Settings that do not go together are refused with a reason, and their neighbours that do are taken."""

import re

import pytest

from verl_fn.config import ConfigError, load, make_plan

GRPO = ["algorithm.name=grpo", "rollout.n=2"]
APART = ["driver.kind=ray", "rollout.placement=apart"]
EXACT = [*GRPO, "rollout.exact=audit"]
GDPO = [*GRPO, "algorithm.adv_estimator=gdpo", 'algorithm.gdpo_reward_keys=["length"]']
LORA = ["driver.kind=ray", "rollout.name=vllm", "actor.lora_rank=2", "rollout.adapters=alone"]
AHEAD = [*GRPO, *APART, "driver.max_lag=1"]
REWARDED = "algorithm.reward_model=r"
IN_FLIGHT = "rollout.in_flight_weight_updates=true"
DISTILL = [*APART, "driver.max_lag=1", "algorithm.name=distill", "algorithm.teacher=t"]


def planned(*words):
    return make_plan(load(overrides=["model.path=m", *words]))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ([*AHEAD, IN_FLIGHT], [*GRPO, *APART, IN_FLIGHT], "with driver.max_lag = 0 they do not; set driver"),
        (
            [*AHEAD, IN_FLIGHT, "actor.strategy=megatron", "actor.router_replay.mode=R2"],
            [*AHEAD, IN_FLIGHT, "actor.strategy=megatron", "actor.router_replay.mode=R3"],
            "may send earlier tokens to other experts",
        ),
        (AHEAD, [*GRPO, "driver.max_lag=1"], "driver.kind = local has one process for both"),
        (AHEAD, [*GRPO, "driver.kind=ray", "driver.max_lag=1"], "rollout.placement = colocated lets them share"),
        ([*DISTILL, "algorithm.top_k=4"], DISTILL, "set algorithm.top_k=64 or so"),
        (
            ["data.truncation=left", *GRPO],
            ["data.truncation=left", "algorithm.name=sft"],
            "data.truncation is left, which cuts prompts that are sampled from; rows of sft are not cut",
        ),
        (
            ["data.truncation=error", "env.name=e.py:E"],
            ["data.truncation=middle", "env.name=e.py:E"],
            "data.truncation is middle, which cuts prompts that are sampled from; conversations are not cut",
        ),
        ([*LORA, "actor.strategy=fsdp"], [*LORA, "actor.strategy=megatron"], "rollout.adapters=merged for megatron"),
        (GDPO, GDPO[:-1], "compares numbers that reward functions return: name them in algorithm.gdpo_reward_keys"),
        (EXACT, [*EXACT, "actor.strategy=megatron"], "megatron has kernels of its own"),
        (EXACT, [*EXACT, "driver.kind=ray", "rollout.name=vllm"], "the engine vllm has kernels of its own"),
        (
            [*EXACT, "actor.fsdp_config.use_torch_compile=true"],
            [*EXACT, "actor.fsdp_config.use_torch_compile=true", "actor.strategy=fsdp"],
            "compiled layers have kernels of their own",
        ),
        (EXACT, [*EXACT, *AHEAD], "with driver.max_lag older weights than the actor's draw the tokens; set it to 0"),
        (
            [*EXACT, "actor.dtype=float32", "rollout.dtype=float32"],
            [*EXACT, "rollout.dtype=float32"],
            "actor and engine must compute in one dtype",
        ),
        (EXACT, ["algorithm.name=rejection", *EXACT[1:]], "rejection does not compare log-probs with the engine's"),
        (
            ["reward.functions=r.py:f"],
            ["reward.functions=r.py:f", "reward.url=http://h/v1", "reward.model=j"],
            "reward.url and reward.functions are both set, and one of them must score",
        ),
        (["env.name=e.py:E"], ["env.name=echo"], "env.name is 'echo'; it must be a class as FILE.py:NAME"),
        (
            [*APART, "rollout.name=vllm", "rollout.tensor_parallel_size=2"],
            ["driver.kind=ray", "rollout.name=vllm", "rollout.tensor_parallel_size=2"],
            "rollout.tensor_parallel_size = 2 takes whole GPUs: set rollout.placement=apart",
        ),
        (
            ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=0.1"],
            ["rollout.val_kwargs.n=2"],
            "rollout.val_kwargs.n is 2 at temperature 0, where all answers are the same",
        ),
        (
            ["data.val_size=20000"],
            ["data.val_size=20001"],
            "data.val_size is 20001; a generated task gives at most 20000",
        ),
        (["data.val_size=20001", "data.val_files=v.jsonl"], ["data.val_size=0"], "data.val_size: must be >= 1"),
        (["data.convert=c.py:f"], ["data.convert=gsm8k"], "data.convert has 'gsm8k'; it must be a function as"),
        (
            ["data.chat_template_kwargs.enable_thinking=true"],
            ["data.chat_template_kwargs.tokenize=true"],
            "data.chat_template_kwargs.tokenize is decided by the run; remove it",
        ),
        (
            ["data.task=reasoning_gym:chain_sum", "data.task_options.chain_sum.min_terms=2"],
            ["data.task=reasoning_gym:chain_sum", "data.task_options.leg_counting.min_terms=2"],
            "but must be a table of options of a set that data.task names (chain_sum)",
        ),
        (
            [],
            ["data.task=reasoning_gym:chain_sum", "data.task_options.chain_sum=2"],
            "data.task_options.chain_sum is 2, but must be a table of options",
        ),
        ([], ["data.task_options.chain_sum.min_terms=2"], "of a set that data.task names (none)"),
        (["data.date=2026-02-28"], ["data.date=2026-02-30"], "must be a day as YYYY-MM-DD (got '2026-02-30')"),
        ([], ["data.date=20260228"], "data.date: must be a day as YYYY-MM-DD (got '20260228')"),
        (
            ["algorithm.name=remax"],
            ["algorithm.name=remax", REWARDED],
            "remax needs the score of the greedy response while it samples",
        ),
        (
            ["algorithm.name=dapo", "rollout.n=2", "algorithm.filter_groups.enable=false", REWARDED],
            ["algorithm.name=dapo", "rollout.n=2", REWARDED],
            "dynamic sampling needs scores while it samples, and a reward model scores later",
        ),
        (["rollout.top_k=-1"], ["rollout.top_k=-2"], "rollout.top_k: must be -1 (keeps all) or at least 1 (got -2)"),
        ([], ["trainer.dir=x", "trainer.dir.y=x"], "trainer.dir.y: dir is a value, not a table of keys"),
        (["actor.optim.betas=[0.9, 0.99]"], ["actor.optim.betas=[0.9, 0.99, 0.5]"], "expected 2 values"),
        (["trainer.seed=9223372036854775807"], ["trainer.seed=9223372036854775808"], "of at most 64 bits"),
        (
            ["reward.url=http://h:1/v1", "reward.model=j"],
            ["reward.url=http://h:0/v1", "reward.model=j"],
            "reward.url: must be an address such as http://localhost:8000/v1",
        ),
        (
            ["reward.prompt='{response} {colour}'"],
            ["reward.prompt='{response} {responce}'"],
            "{responce} stands for nothing; write {response}",
        ),
        ([], ["reward.prompt='{response} {solution}'"], "{solution} stands for nothing; write {response}"),
        ([], ["reward.prompt='{prompt}'"], "reward.prompt: must contain {response}"),
        ([], [f"actor.optim.betas={'[' * 5000}"], "is not a list; strings in it need quotes"),
        *(
            (
                [*GRPO, f"algorithm.rollout_is={kind}"],
                [*GRPO, f"algorithm.rollout_is={kind}s"],
                f"did you mean {kind}",
            )
            for kind in ("token", "sequence", "geometric")
        ),
        (["actor.optim.lr=1"], ["actor.optim.lr=-1"], "actor.optim.lr: must be >= 0"),
    ],
)
def test_of_two_neighbours_one_is_refused(right, wrong, message):
    assert planned(*right)
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(*wrong)


def test_a_number_in_place_of_a_path_is_a_name_without_spaces():
    assert load(overrides=["model.path= 7 ", "data.train_files= 2027-01-05 "]).model.path == "7"
    assert load(overrides=["data.train_files= 2027-01-05 "]).data.train_files == ("2027-01-05",)


def test_the_file_of_a_reference_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.name: there is no file {tmp_path}/mine.py")):
        load(overrides=[f"algorithm.name={tmp_path}/mine.py:mine"])
