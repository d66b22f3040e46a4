"""verl's keys: those with one key here, those without effect here, and verl's defaults.

Keys are written as in ``ppo_trainer``. ``ALIASES`` turns those of older versions and of ``sft_trainer`` into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Prefixes: the first one that fits is replaced. Those of SFT apply to its configs alone.
ALIASES: Mapping[str, str] = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_manager.": "reward.reward_manager.",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size":
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.lr_decay_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.lr_decay_style": "critic.optim.lr_scheduler_type",
    "actor_rollout_ref.model.lora.rank": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "critic.model.lora.rank": "critic.model.lora_rank",
    "critic.model.lora.alpha": "critic.model.lora_alpha",
}  # fmt: skip
SFT_ALIASES: Mapping[str, str] = {
    "optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "optim.lr_decay_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "optim.": "actor_rollout_ref.actor.optim.",
    "model.": "actor_rollout_ref.model.",
    "engine.strategy": "actor_rollout_ref.actor.strategy",
    "engine.": "actor_rollout_ref.actor.fsdp_config.",
    "data.micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": "actor_rollout_ref.actor.use_dynamic_bsz",
    "checkpoint.": "actor_rollout_ref.actor.checkpoint.",
    "profiler.": "actor_rollout_ref.actor.profiler.",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.seed": "data.seed",
}

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."

# One key of verl, one key here, the same value. Null leaves the default here.
SAME: Mapping[str, str] = {
    **{f"data.{name}": f"data.{name}" for name in (
        "train_files", "val_files", "train_batch_size", "max_prompt_length", "max_response_length", "prompt_key",
        "filter_overlong_prompts", "shuffle")},
    "data.seed": "trainer.seed",
    MODEL + "path": "model.path",
    "critic.model.path": "critic.path",
    **{f"{verl}.optim.{name}": f"{ours}.optim.{name}"
       for verl, ours in ((ACTOR[:-1], "actor"), ("critic", "critic"))
       for name in ("lr", "weight_decay", "betas", "clip_grad", "lr_scheduler_type")},
    **{f"{verl}{name}": f"{ours}.{name}"
       for verl, ours in ((MODEL, "actor"), ("critic.model.", "critic"))
       for name in ("enable_gradient_checkpointing", "lora_rank", "lora_alpha", "target_modules")},
    **{f"{verl}.{name}": f"{ours}.fsdp_config.{name}"
       for verl, ours in ((ACTOR + "fsdp_config", "actor"), ("critic.fsdp", "critic"))
       for name in ("ulysses_sequence_parallel_size", "reshard_after_forward", "offload_policy")},
    **{f"{verl}.{name}": f"{ours}.megatron.{name}"
       for verl, ours in ((ACTOR + "megatron", "actor"), ("critic.megatron", "critic"))
       for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                    "expert_model_parallel_size", "use_megatron_fsdp")},
    **{ACTOR + name: f"algorithm.{name}" for name in (
        "ppo_mini_batch_size", "ppo_epochs", "shuffle", "clip_ratio_c", "tau_pos", "tau_neg", "loss_agg_mode",
        "loss_scale_factor", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type")},
    **{f"{ACTOR}policy_loss.{name}": f"algorithm.{name}" for name in (
        "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")},
    "critic.cliprange_value": "algorithm.cliprange_value",
    **{ROLLOUT + name: f"rollout.{name}" for name in (
        "n", "temperature", "top_k", "top_p", "dtype", "gpu_memory_utilization", "enforce_eager",
        "free_cache_engine")},
    ROLLOUT + "max_num_seqs": "rollout.slots",
    **{f"{ROLLOUT}val_kwargs.{name}": f"rollout.val_kwargs.{name}"
       for name in ("n", "temperature", "top_k", "top_p")},
    **{f"algorithm.{name}": f"algorithm.{name}" for name in (
        "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty", "kl_ctrl.type",
        "kl_ctrl.kl_coef", "kl_ctrl.horizon", "kl_ctrl.target_kl", "gdpo_reward_keys", "gdpo_reward_weights")},
    "algorithm.rollout_correction.rollout_is": "algorithm.rollout_is",
    "reward.num_workers": "reward.num_workers",
    **{f"trainer.{name}": f"trainer.{name}" for name in (
        "project_name", "experiment_name", "save_freq", "test_freq", "val_before_train", "log_val_generations",
        "resume_from_path")},
    "trainer.critic_warmup": "algorithm.critic_warmup",
    MODEL.removesuffix("model.") + "nccl_timeout": "ray.timeout",
}  # fmt: skip

ONE_LAYOUT = "the reference policy has the actor's layout and budget"
RECORDED = "a run's folder keeps every held-out answer; trainer.journal keeps samples"
PACKED = "rows are always packed, without padding"
KERNELS = "kernels and their memory are not options here"
COMPLETE = "checkpoints hold the whole state and a Hugging Face folder"
OFFLOADED = "rollout.offload_trainer decides for all states: they move to the CPU while vLLM generates"

# Patterns and the reason why keys that fit have no effect here. The first that fits counts.
NO_EFFECT: Mapping[str, str] = {
    "*_target_": "it names a class of verl",
    "defaults": "it composes verl's config from its own files",
    "hydra.*": "it configures Hydra",
    "*.profiler.*": "there is no profiler here",
    "global_profiler.*": "there is no profiler here",
    "actor_rollout_ref.ref.*": ONE_LAYOUT,
    "*.checkpoint.*": COMPLETE,
    "*ppo_micro_batch_size*": "micro-batches are cut by tokens; see ppo_max_token_len_per_gpu",
    "*forward_micro_batch_size*": "micro-batches are cut by tokens; see ppo_max_token_len_per_gpu",
    "*forward_max_token_len_per_gpu": "the budget of training holds for every pass",
    "*log_prob_*": "the budget of training holds for every pass",
    "*use_dynamic_bsz": "micro-batches are always cut by tokens",
    "*use_remove_padding": PACKED,
    "*pad_*": PACKED,
    "*grad_offload": OFFLOADED,
    "*param_offload": OFFLOADED,
    "*optimizer_offload": OFFLOADED,
    "*use_torch_compile": "verl compiles its entropy; here fsdp_config.use_torch_compile compiles layers",
    "*.qat.*": "there is no training with quantized weights here",
    "*router_replay.*": "routing is replayed in updates of the actor alone, from memory",
    "*data_loader_seed": "trainer.seed is the seed of everything",
    "*.seed": "trainer.seed is the seed of everything",
    "*full_determinism": "runs repeat bitwise; driver.deterministic is on by default",
    "*entropy_*": KERNELS,
    "*calculate_*": "entropies and log-probs are computed where they are needed",
    "*use_prefix_grouper": KERNELS,
    "*freeze_vision_*": "models are language models",
    "*rollout_n": "it repeats rollout.n",
    "*.clip_ratio": "verl reads clip_ratio_low and clip_ratio_high, which its defaults set",
    "*use_shm": "folders are read where they are",
    "*trust_remote_code": "Python code of a model's folder is never run",
    "*external_lib": "nothing is imported for its side effects",
    "*use_liger": KERNELS,
    "*fused_kernel*": KERNELS,
    "*enable_activation_offload": KERNELS,
    "*tiled_mlp.*": KERNELS,
    "*.mtp.*": "extra prediction heads are not trained here",
    "*.model.lora.*": "adapters have a rank, an alpha and target modules",
    "*hybrid_engine": "it has no other value in verl",
    "data.dataloader_num_workers": "rows are read when the run starts",
    "data.num_workers": "rows are read when the run starts",
    "data.filter_overlong_prompts_workers": "rows are read when the run starts",
    "data.val_max_samples": "all held-out problems are evaluated",
    "data.val_batch_size": "an evaluation asks for all answers at once",
    "data.gen_batch_size": "a step samples what it learns from",
    "data.return_*": "it selects what verl's data loader returns",
    "data.validation_shuffle": "metrics do not depend on the order of problems",
    "data.tools_key": "tools are not rendered here",
    "data.enable_thinking*": "templates get no such argument here",
    "data.*image*": "problems are text",
    "data.*video*": "problems are text",
    "data.*audio*": "problems are text",
    "data.mm_processor_kwargs*": "problems are text",
    "data.balance_dp_token": "rows are dealt to ranks by their tokens",
    "data.ignore_input_ids_mismatch": "a template that changes earlier turns is an error here",
    "data.tool_config_path": "tools are not called here",
    "data.function_tool_path": "tools are not called here",
    "trainer.balance_batch": "rows are dealt to ranks by their tokens",
    **{
        f"*.fsdp*.{name}": "the fsdp backend sets it itself"
        for name in (
            "wrap_policy.*",
            "forward_prefetch",
            "use_orig_params",
            "use_no_sync_for_gradient_accumulation",
            "forward_only",
            "strategy",
            "turbo_config.*",
            "mixed_precision*",
        )
    },
    **{
        f"*.megatron.{name}": "the Megatron backend sets it itself"
        for name in (
            "virtual_pipeline_model_parallel_size",
            "expert_tensor_parallel_size",
            "use_dist*",
            "dist*",
            "dynamic_context_parallel",
            "max_seqlen_per_dp_cp_rank",
            "override_ddp_config*",
            "override_mcore_model_config*",
            "use_mbridge",
            "vanilla_mbridge",
            "forward_only",
            "offload.*",
        )
    },
    "*optim.lr_wsd*": "the schedules are constant, linear and cosine",
    "*optim.muon*": "the optimizer is AdamW",
    "*optim.use_*": "the optimizer's state is always saved and restored whole",
    "*optim.total_training_steps": "a schedule decays over the whole run",
    "*optim.zero_indexed_step": "warm-up starts from 0",
    **{
        f"critic.{name}": f"actor and critic share algorithm.{name}"
        for name in ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")
    },
    "critic.enable": "algorithm.adv_estimator decides",
    "actor_rollout_ref.rollout.mode": "engines always run beside the driver",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "its temperature decides",
    "actor_rollout_ref.rollout.do_sample": "its temperature decides",
    "actor_rollout_ref.rollout.load_format": "engines get their weights from the trainer",
    "actor_rollout_ref.rollout.layered_summon": "weights are published bucket by bucket",
    "actor_rollout_ref.rollout.multi_turn.*": "multi_turn.enable is off",
    "actor_rollout_ref.rollout.agent.*": "responses have one turn",
    "actor_rollout_ref.rollout.engine_kwargs.*": "it configures another engine than vLLM",
    **{
        ROLLOUT + name: "it has no counterpart in the rollout engines here"
        for name in (
            "prompt_length",
            "response_length",
            "cudagraph_capture_sizes",
            "data_parallel_size",
            "expert_parallel_size",
            "pipeline_model_parallel_size",
            "max_model_len",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "logprobs_mode",
            "scheduling_policy",
            "disable_log_stats",
            "multi_stage_wake_up",
            "checkpoint_engine.*",
            "update_weights_bucket_megabytes",
            "trace.*",
            "skip_tokenizer_init",
            "enable_rollout_routing_replay",
            "moe_load_balance_metrics_interval",
            "prometheus.*",
            "quantization_config_file",
            "disaggregation.*",
            "limit_images",
            "mtp",
            "qat",
        )
    },
    "reward.sandbox_fusion.*": "rewards run in processes of their own; call a sandbox from a function",
    "reward.reward_model.*": "the reward model is a model folder with a value head, on the training ranks",
    "reward_model.*": "the reward model is a model folder with a value head, on the training ranks",
    "reward.custom_reward_function.*": "the rule of each data source scores; no function is named",
    "reward.reward_manager.*": "functions are called row by row, or in batches by their signature",
    "sandbox_fusion.*": "rewards run in processes of their own; call a sandbox from a function",
    "algorithm.pf_ppo.*": "algorithm.use_pf_ppo is off",
    "algorithm.filter_groups.*": "algorithm.filter_groups.enable is off",
    "algorithm.rollout_correction.*": "without bypass_mode, rollout_is and its threshold decide",
    "distillation.*": "distillation.enabled is off",
    "trainer.rollout_data_dir": RECORDED,
    "trainer.validation_data_dir": RECORDED,
    "trainer.default_hdfs_dir": "checkpoints are written to trainer.dir",
    "trainer.del_local_ckpt_after_load": "checkpoints are written to trainer.dir",
    "trainer.remove_previous_ckpt_in_save": "max_ckpt_to_keep decides",
    "trainer.total_training_steps": "trainer.total_epochs decides",
    "trainer.total_epochs": "trainer.total_training_steps decides",
    "trainer.max_actor_ckpt_to_keep": "only the last step is saved",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds all models; max_actor_ckpt_to_keep decides",
    "trainer.esi_redundant_time": "SIGTERM saves a run",
    "trainer.ray_wait_register_center_timeout": "ray.timeout decides",
    "trainer.use_v1": "there is one trainer",
    "trainer.use_legacy_worker_impl": "there is one trainer",
    "trainer.v1.*": "trainer.v1.trainer_mode is sync",
    "trainer.profile_*": "there is no profiler here",
    "transfer_queue.*": "batches travel between the workers themselves",
    "ray_kwargs.*": "the [ray] table configures Ray",
    "ray_init.*": "the [ray] table configures Ray",
    "skip.*": "steps are not skipped here",
}

_MODEL_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "custom_chat_template": ((), "write it into chat_template.jinja in the model's folder"),
    "tokenizer_path": ((), "the tokenizer lies in the model's folder"),
    "hf_config_path": ((), "config.json lies in the model's folder"),
    "lora_adapter_path": ((), "training continues from merged weights or from a checkpoint"),
    "exclude_modules": (([],), "name the layers in target_modules"),
    "override_config": (({},), "change config.json in the model's folder"),
}
_OPTIM_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "optimizer": (("AdamW", "adamw", "adam"), "the optimizer is AdamW"),
    "optimizer_impl": (("torch.optim",), "the optimizer is AdamW"),
    "override_optimizer_config": (({},), "the optimizer is AdamW"),
    "num_cycles": ((0.5,), "a cosine falls once"),
    "lr_warmup_init": ((0.0,), "warm-up starts from 0"),
    "lr_decay_steps": ((), "a schedule decays over the whole run"),
    "weight_decay_incr_style": (("constant",), "weight decay is constant"),
}
# Keys that may only have these values, and what is missing here otherwise. Null is always allowed.
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "data.train_max_samples": ((-1,), "all rows are trained on; write a smaller file"),
    "data.reward_fn_key": (("data_source",), "the column is data_source; rename it"),
    "data.truncation": (("error",), "prompts are never cut; set data.filter_overlong_prompts"),
    "data.messages_key": (("messages",), "the column is messages; rename it"),
    "data.custom_cls.path": ((), "rows are read from files alone"),
    "data.custom_cls.name": ((), "rows are read from files alone"),
    "data.apply_chat_template_kwargs": (({},), "templates get no arguments; write them into chat_template.jinja"),
    "data.pad_mode": (("no_padding",), PACKED),
    "data.tokenizer": ((), "the tokenizer lies in the model's folder"),
    **{model + name: rule for model in (MODEL, "critic.model.") for name, rule in _MODEL_ONLY.items()},
    **{f"{role}optim.{name}": rule for role in (ACTOR, "critic.") for name, rule in _OPTIM_ONLY.items()},
    ACTOR + "fsdp_config.model_dtype": (("fp32", "float32"), "master weights are fp32"),
    "critic.fsdp.model_dtype": (("fp32", "float32"), "master weights are fp32"),
    ROLLOUT + "ignore_eos": ((False,), "responses end at an end token"),
    ROLLOUT + "over_sample_rate": ((0,), "a step samples what it learns from"),
    ROLLOUT + "multi_turn.enable": ((False,), "a conversation needs an environment here; set env.name"),
    ROLLOUT + "agent.default_agent_loop": (
        ("single_turn_agent",), "a conversation needs an environment here; set env.name",
    ),
    ROLLOUT + "quantization": ((), "the engine has the trainer's weights, unquantized"),
    "algorithm.use_pf_ppo": ((False,), "responses are not reweighted by preference"),
    "algorithm.rollout_correction.rollout_rs": ((), "rows are not rejected by their ratio"),
    "algorithm.rollout_correction.bypass_mode": ((False,), "the ratio starts from the trainer's own log-probs"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": ((False,), "importance weights are not normalized"),
    "reward.reward_manager.name": (("naive", "batch", "prime"), "its manager is not here; write a reward function"),
    "reward.custom_reward_function.reward_kwargs": (({},), "write the values into the function"),
    "distillation.enabled": ((False,), "use algorithm.name = distill"),
    "trainer.val_only": ((False,), "use verl-fn eval"),
    "trainer.v1.trainer_mode": (("sync",), "set driver.max_lag and rollout.placement yourself"),
}  # fmt: skip

_OPTIM = {"weight_decay": 0.01, "clip_grad": 1.0, "lr_scheduler_type": "constant", "lr_warmup_steps": -1}
_ACTOR = {f"{ACTOR}optim.{name}": value for name, value in _OPTIM.items()}
# verl's defaults that differ from those here, or that other keys are computed with.
PPO_DEFAULTS: Mapping[str, Any] = _ACTOR | {f"critic.optim.{name}": value for name, value in _OPTIM.items()} | {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet", "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    MODEL + "path": "~/models/deepseek-llm-7b-chat", MODEL + "enable_gradient_checkpointing": True,
    "critic.model.enable_gradient_checkpointing": True,
    ACTOR + "optim.lr": 1e-6, "critic.optim.lr": 1e-5,
    ACTOR + "ppo_mini_batch_size": 256, ACTOR + "ppo_epochs": 1, ACTOR + "clip_ratio_low": 0.2,
    ACTOR + "clip_ratio_high": 0.2, ACTOR + "loss_agg_mode": "token-mean", ACTOR + "policy_loss.loss_mode": "vanilla",
    ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768,
    ROLLOUT + "name": "vllm", ROLLOUT + "dtype": "bfloat16", ROLLOUT + "max_num_seqs": 256,
    ROLLOUT + "tensor_model_parallel_size": 2, ROLLOUT + "nnodes": 0, ROLLOUT + "n": 1,
    "algorithm.adv_estimator": "gae",
    "reward.num_workers": 8,
    "trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k", "trainer.total_epochs": 30,
    "trainer.logger": ["console", "wandb"], "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.log_val_generations": 0, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
}  # fmt: skip
SFT_DEFAULTS: Mapping[str, Any] = _ACTOR | {
    "data.train_files": "~/data/gsm8k/train.parquet", "data.train_batch_size": 256, "data.max_length": 1024,
    "data.seed": 1, MODEL + "path": "~/models/deepseek-llm-7b-chat", MODEL + "enable_gradient_checkpointing": True,
    ACTOR + "optim.lr": 1e-3, ACTOR + "use_dynamic_bsz": True, ACTOR + "ppo_max_token_len_per_gpu": 8192,
    "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test", "trainer.total_epochs": 4,
    "trainer.logger": ["console", "wandb"], "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.log_val_generations": 0, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1,
    "trainer.val_before_train": False,
}  # fmt: skip
