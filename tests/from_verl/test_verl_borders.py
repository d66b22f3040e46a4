"""Values of verl's at their borders: which of two counts, what is taken just so, and what is refused just beyond."""

import pytest
from test_from_verl import GRPO_LORA, MEGATRON, PPO, SFT, translated

from verl_fn.config.load import flat

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
COSINE = f"{ACTOR}optim.lr_scheduler_type=cosine"
DAPO = f"{GRPO_LORA} algorithm.filter_groups.enable=True"
PENALTY = "reward.reward_kwargs.overlong_buffer_cfg."
LIMITED = f"{GRPO_LORA} {PENALTY}enable=True {PENALTY}len=100 reward.reward_manager.name=dapo"
SEQUENCE = f"{DAPO} algorithm.filter_groups.metric=seq_reward"
FINAL = f"{DAPO} algorithm.filter_groups.metric=seq_final_reward"
PATH = "custom_reward_function.path"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        # Two names of a lowest rate may agree.
        (
            f"{COSINE} {ACTOR}optim.lr=1e-5 {ACTOR}optim.min_lr=1e-6 {ACTOR}optim.min_lr_ratio=0.1",
            "actor.optim.min_lr_ratio",
            0.1,
        ),
        (f"{COSINE} {ACTOR}optim.lr=0 {ACTOR}optim.min_lr=1e-4", "actor.optim.min_lr_ratio", None),
        (f"{ACTOR}grad_clip=0.5", "actor.optim.clip_grad", 0.5),
        (f"{ACTOR}grad_clip=0.5 {ACTOR}optim.clip_grad=0.7", "actor.optim.clip_grad", 0.7),
        # Shards of 4 on 8 ranks are two replicas; as many as there are, or more, are one.
        (f"{ACTOR}fsdp_config.fsdp_size=4", "actor.fsdp_config.replicate", 2),
        (f"{ACTOR}fsdp_config.fsdp_size=8", "actor.fsdp_config.replicate", None),
        (f"{ACTOR}fsdp_config.fsdp_size=9", "actor.fsdp_config.replicate", None),
        (f"{ACTOR}fsdp_config.fsdp_size=3 trainer.n_gpus_per_node=9", "actor.fsdp_config.replicate", 3),
        (f"{ACTOR}fsdp_config.dtype=bf16", "actor.dtype", "bfloat16"),
        (f"{ACTOR}fsdp_config.dtype=fp32", "actor.dtype", "float32"),
        (f"{ACTOR}fsdp_config.dtype=float32", "actor.dtype", "float32"),
        # A micro-batch counts rows only without dynamic ones.
        (f"{ACTOR}use_dynamic_bsz=False", "actor.ppo_max_token_len_per_gpu", 40 * 1536),
        (
            f"{ACTOR}use_dynamic_bsz=True {ACTOR}ppo_max_token_len_per_gpu=9000",
            "actor.ppo_max_token_len_per_gpu",
            9000,
        ),
        (f"{ROLLOUT}top_k=0", "rollout.top_k", None),
        (f"{ROLLOUT}top_k=5", "rollout.top_k", 5),
        (f"{ROLLOUT}val_kwargs.top_k=3 {ROLLOUT}val_kwargs.temperature=1", "rollout.val_kwargs.top_k", 3),
        (f"{ROLLOUT}nnodes=2 {ROLLOUT}n_gpus_per_node=4", "rollout.engines", 4),
        (f"{ROLLOUT}nnodes=2", "rollout.engines", 8),
        (f"{ROLLOUT}nnodes=1 {ROLLOUT}n_gpus_per_node=1", "rollout.engines", None),
        (f"{ROLLOUT}val_kwargs.n=4", "rollout.val_kwargs.n", None),
        (f"{ROLLOUT}val_kwargs.n=4 {ROLLOUT}val_kwargs.temperature=0.5", "rollout.val_kwargs.n", 4),
        (f"{PATH}=pkg://my.rewards", "reward.functions", ["my.rewards:compute_score"]),
        (f"{PATH}=file:///x/r.py custom_reward_function.name=f", "reward.functions", ["/x/r.py:f"]),
        ("trainer.max_actor_ckpt_to_keep=3", "trainer.max_ckpt_to_keep", 3),
        ("trainer.save_freq=20", "trainer.max_ckpt_to_keep", 1_000_000),
        ("trainer.save_freq=-1", "trainer.max_ckpt_to_keep", None),
        ("data.val_max_samples=7", "data.val_size", 7),
        ("data.val_max_samples=-1", "data.val_size", None),
        (f"{MODEL}exclude_modules=.*visual.*", "actor.freeze_vision_tower", True),
        (f"{MODEL}lora_rank=0 {MODEL}exclude_modules=.*visual.*", "actor.freeze_vision_tower", None),
        (f"{ROLLOUT}engine_kwargs.vllm.max_model_len=1536", "rollout.engine_kwargs.max_model_len", None),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_is", "token"),
        ("critic.enable=False", "algorithm.name", "grpo"),
        ("critic.enable=null", "algorithm.name", "grpo"),
    ],
)
def test_values_that_are_taken(words, key, value):
    translation = translated(f"{GRPO_LORA} {words}")
    refused = [
        line for line in translation.not_possible if "exclude_modules" not in line or "lora_rank=0" not in words
    ]
    assert flat(translation.table).get(key) == value and not refused and not translation.unknown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"{GRPO_LORA} {ACTOR}optim.lr=1e-3 {ACTOR}optim.min_lr=1e-4 {ACTOR}optim.min_lr_ratio=0.2",
            "they name two lowest learning rates; leave one of them",
        ),
        (f"{GRPO_LORA} {ACTOR}fsdp_config.fsdp_size=3", "shards of 3 do not divide 8 ranks"),
        (f"{GRPO_LORA} {ROLLOUT}max_model_len=1535", "1535 is not the longest prompt and response = 1536; set them"),
        (f"{GRPO_LORA} {ROLLOUT}prompt_length=1000", "1000 is not data.max_prompt_length = 512; set them alike"),
        (
            f"{GRPO_LORA} {ROLLOUT}engine_kwargs.vllm.max_model_len=1535",
            "longest prompt and response have 1536 tokens",
        ),
        (f"{GRPO_LORA} {ROLLOUT}repetition_penalty=1.05", "responses are drawn from the model's own distribution"),
        (f"{GRPO_LORA} critic.enable=True", "a critic learns with the estimator gae, and not with grpo; remove it"),
        (f"{PPO} critic.enable=False", "a critic learns with the estimator gae, and not with gae; remove it"),
        (f"{GRPO_LORA} data.train_batch_size=0", "a step has prompts, and not 0"),
        (f"{SEQUENCE} {PENALTY}enable=True {PENALTY}len=9", "before penalties are taken off, not in seq_reward"),
        (f"{FINAL} algorithm.use_kl_in_reward=True", "before penalties are taken off, not in seq_final_reward"),
        (f"{DAPO} algorithm.filter_groups.metric=length", "groups differ in acc or score, not in length"),
        (f"{PPO} {PENALTY}enable=True", "the penalty on long responses goes with groups, not with gae"),
        (
            f"{PPO} algorithm.filter_groups.enable=True",
            "groups are sampled again only with an estimator that compares",
        ),
        (
            f"{GRPO_LORA} reward_model.enable=True reward_model.model.path=R {PATH}=r.py",
            "the function that scores asks the reward model",
        ),
        (f"{GRPO_LORA} reward_model.enable=True", "the reward model has no path"),
        (f"{SFT} optim.lrr=1", "did you mean optim.lr?"),
        (f"{SFT} model.pth=x", "did you mean model.path?"),
    ],
)
def test_values_that_are_refused(line, message):
    translation = translated(line)
    assert not translation.complete and message in " ".join(translation.report().split())


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        # What a reward of a sequence has taken off by nothing is the score.
        (SEQUENCE, True),
        (f"{SEQUENCE} algorithm.use_kl_in_reward=True", True),
        (FINAL, True),
        (LIMITED, True),
        (f"{ROLLOUT}max_model_len=1536", True),
        (f"{ROLLOUT}max_model_len=4096 {ROLLOUT}prompt_length=512 {ROLLOUT}response_length=1024", True),
    ],
)
def test_neighbours_of_refused_values(line, taken):
    translation = translated(line if line.startswith("python3") else f"{GRPO_LORA} {line}")
    assert translation.complete == taken, translation.report()


@pytest.mark.parametrize(("shared", "wanted", "found"), [(2, True, True), (2, False, None), (1, True, None)])
def test_sequence_parallelism_needs_ranks_that_share_matrices(shared, wanted, found):
    words = f"{ACTOR}megatron.tensor_model_parallel_size={shared} {ACTOR}megatron.sequence_parallel={wanted}"
    assert flat(translated(f"{MEGATRON} {words}").table).get("actor.megatron.sequence_parallel") == found


def test_a_replay_of_routes_may_be_named_by_either_key():
    for key in (f"{ACTOR}megatron.router_replay.mode", f"{ACTOR}router_replay.mode"):
        table = flat(translated(f"{MEGATRON} {key}=R3").table)
        assert table["actor.router_replay.mode"] == "R3"
    both = f"{ACTOR}megatron.router_replay.mode=R2 {ACTOR}router_replay.mode=disabled"
    assert flat(translated(f"{MEGATRON} {both}").table)["actor.router_replay.mode"] == "R2"


def test_arguments_that_a_reward_function_takes(tmp_path):
    file = tmp_path / "r.py"
    for signature, taken in (
        ("a, *, scale", True),
        ("a, scale", True),
        ("a, **more", True),
        ("a", False),
        ("a, *b", False),
    ):
        file.write_text(f"def compute_score({signature}):\n    return 0\n")
        words = f"{PATH}={file} custom_reward_function.reward_kwargs.scale=2"
        translation = translated(f"{GRPO_LORA} {words}")
        assert flat(translation.table).get("reward.arguments.scale") == 2
        refused = f"compute_score in {file} has no parameter scale"
        assert any(refused in line for line in translation.not_possible) is not taken


@pytest.mark.parametrize(
    ("named", "layers"),
    [
        (
            ["linear_qkv", "linear_proj", "linear_fc1"],
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
        ),
        (["linear_fc2", "linear_fc1", "linear_proj", "linear_qkv"], None),
    ],
)
def test_all_of_megatrons_layers_are_the_default(named, layers):
    words = f"{MODEL}lora.rank=8 {MODEL}lora.target_modules=[{','.join(named)}]"
    assert flat(translated(f"{MEGATRON} {words}").table).get("actor.target_modules") == layers


def test_fields_of_megatron_that_its_backend_chooses_are_left_out():
    start = f"{ACTOR}megatron.override_transformer_config."
    ours = "actor.megatron.override_transformer_config."
    for words, found in (
        ("attention_backend=flash", {}),
        ("recompute_modules=[core_attn]", {}),
        ("recompute_modules=[mlp]", {"recompute_modules": ["mlp"]}),
        ("recompute_method=uniform", {"recompute_method": "uniform"}),
    ):
        table = flat(translated(f"{MEGATRON} {start}{words}").table)
        assert {k.removeprefix(ours): v for k, v in table.items() if k.startswith(ours)} == found


def test_a_name_on_the_hub_is_one_that_is_no_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/mine").mkdir(parents=True)
    for name, remarked in (("models/mine", False), ("models/other", True), ("./models/other", False)):
        lines = [line for line in translated(f"{MEGATRON} {MODEL}path={name}").translated if "model.path =" in line]
        assert ("a name on the hub" in lines[0]) == remarked and f'"{name}"' in lines[0]
