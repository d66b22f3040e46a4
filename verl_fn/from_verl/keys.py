"""verl's keys: keys with one key here, keys without effect here, and verl's defaults.

Keys are written as in ``ppo_trainer``. ``ALIASES`` turns keys of older versions and of ``sft_trainer`` into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Prefixes: each one that fits is replaced, in this order. Those of SFT come first, and apply only to its configs.
ALIASES: Mapping[str, str] = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "actor_rollout_ref.actor.policy_loss.tau_": "actor_rollout_ref.actor.tau_",
    **{f"{role}optim.override_optimizer_config.{name}": f"{role}optim.{name}"
       for role in ("actor_rollout_ref.actor.", "critic.") for name in ("lr", "betas", "eps", "weight_decay")},
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_manager.": "reward.reward_manager.",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size":
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
    **{f"{role}optim.{old}": f"{role}optim.{new}"
       for role in ("actor_rollout_ref.actor.", "critic.")
       for old, new in (("warmup_style", "lr_scheduler_type"), ("lr_decay_style", "lr_scheduler_type"),
                        ("grad_clip", "clip_grad"))},
    **{f"{model}lora.": f"{model}lora_" for model in ("actor_rollout_ref.model.", "critic.model.")},
}  # fmt: skip
SFT_ALIASES: Mapping[str, str] = {
    "optim.": "actor_rollout_ref.actor.optim.",
    "model.": "actor_rollout_ref.model.",
    "engine.strategy": "actor_rollout_ref.actor.strategy",
    "data.micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": "actor_rollout_ref.actor.use_dynamic_bsz",
    "checkpoint.": "actor_rollout_ref.actor.checkpoint.",
    "profiler.": "actor_rollout_ref.actor.profiler.",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.seed": "data.seed",
}  # fmt: skip
# The table of the engine's settings, by the engine.
SFT_ENGINES: Mapping[str, str] = {
    "fsdp": "actor_rollout_ref.actor.fsdp_config.",
    "megatron": "actor_rollout_ref.actor.megatron.",
}

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."

ROLES: Mapping[str, str] = {ACTOR: "actor", "critic.": "critic"}
# Keys of the actor and of the critic that are one key here.
SHARED = ("ppo_mini_batch_size", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")

# One key of verl, one key here, the same value. Null leaves the default here.
SAME: Mapping[str, str] = {
    **{f"data.{name}": f"data.{name}" for name in (
        "train_files", "val_files", "train_batch_size", "max_prompt_length", "max_response_length", "prompt_key",
        "filter_overlong_prompts", "truncation", "shuffle")},
    "data.seed": "trainer.seed",
    MODEL + "path": "model.path",
    "critic.model.path": "critic.path",
    **{f"{verl}optim.{name}": f"{ours}.optim.{name}"
       for verl, ours in ROLES.items()
       for name in ("lr", "weight_decay", "betas", "eps", "clip_grad", "lr_scheduler_type")},
    **{f"{verl}{name}": f"{ours}.{name}"
       for verl, ours in ((MODEL, "actor"), ("critic.model.", "critic"))
       for name in ("enable_gradient_checkpointing", "enable_activation_offload", "lora_rank", "lora_alpha",
                    "target_modules")},
    **{f"{verl}.{name}": f"{ours}.fsdp_config.{name}"
       for verl, ours in ((ACTOR + "fsdp_config", "actor"), ("critic.fsdp", "critic"))
       for name in ("ulysses_sequence_parallel_size", "reshard_after_forward", "offload_policy")},
    **{f"{verl}megatron.{name}": f"{ours}.megatron.{name}"
       for verl, ours in ROLES.items()
       for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                    "expert_model_parallel_size", "use_megatron_fsdp")},
    ACTOR + "freeze_vision_tower": "actor.freeze_vision_tower",
    **{ACTOR + name: f"algorithm.{name}" for name in (
        *SHARED, "tau_pos", "tau_neg", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type")},
    **{f"{ACTOR}policy_loss.{name}": f"algorithm.{name}" for name in (
        "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")},
    "critic.cliprange_value": "algorithm.cliprange_value",
    **{ROLLOUT + name: f"rollout.{name}" for name in (
        "n", "temperature", "top_p", "dtype", "gpu_memory_utilization", "enforce_eager", "free_cache_engine")},
    ROLLOUT + "max_num_seqs": "rollout.slots",
    **{f"{ROLLOUT}val_kwargs.{name}": f"rollout.val_kwargs.{name}" for name in ("n", "temperature", "top_p")},
    **{f"algorithm.{name}": f"algorithm.{name}" for name in (
        "gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty", "kl_ctrl.type",
        "kl_ctrl.kl_coef", "kl_ctrl.horizon", "kl_ctrl.target_kl", "gdpo_reward_keys", "gdpo_reward_weights")},
    "algorithm.rollout_correction.rollout_is": "algorithm.rollout_is",
    "reward.num_workers": "reward.num_workers",
    **{f"trainer.{name}": f"trainer.{name}" for name in (
        "project_name", "experiment_name", "save_freq", "test_freq", "val_before_train", "log_val_generations",
        "rollout_data_dir")},
    MODEL.removesuffix("model.") + "nccl_timeout": "ray.timeout",
    ACTOR + "checkpoint.async_save": "trainer.async_save",
}  # fmt: skip
# Tables whose keys become keys of a table here, whatever they are.
TABLES: Mapping[str, str] = {
    "data.apply_chat_template_kwargs.": "data.chat_template_kwargs.",
    ROLLOUT + "engine_kwargs.vllm.": "rollout.engine_kwargs.",
    **{f"{verl}megatron.override_transformer_config.": f"{ours}.megatron.override_transformer_config."
       for verl, ours in ROLES.items()},
}  # fmt: skip

ONE_LAYOUT = "the reference policy has the actor's layout and budget"
RECORDED = "a run's folder keeps every held-out answer; trainer.journal keeps samples"
PACKED = "rows are always packed, without padding"
KERNELS = "kernels and their memory are not options here"
COMPLETE = "checkpoints hold the whole state and a Hugging Face folder"
OFFLOADED = (
    "rollout.offload_trainer decides for all states: by default they move to the CPU while vLLM generates if they do "
    "not fit beside it"
)
TEXT = "problems are texts and images here"
FSDP_ITSELF, MEGATRON_ITSELF = "the fsdp backend sets it itself", "the Megatron backend sets it itself"
AS_AN_ENV = "a conversation needs an environment here; set env.name"
NOT_SAVED = "the optimizer is AdamW with moments and weights in fp32"

# Arguments of vLLM's about a cache of images that its own processor has made.
PROCESSOR_CACHE = ("mm_processor_cache_gb", "disable_mm_preprocessor_cache")

Rule = tuple[tuple[Any, ...], str]
REMOVE = "remove the key, or add the word ~KEY"
# Patterns of keys that may only have these values, and what is missing here otherwise. Null is always allowed. The
# first pattern that fits counts, before the patterns of NO_EFFECT.
ONLY: Mapping[str, Rule] = {
    "data.train_max_samples": ((-1,), "all rows are trained on; write a smaller file"),
    "data.reward_fn_key": (("data_source",), "the column is data_source; rename it, or let data.convert do so"),
    "data.messages_key": (("messages",), "the column is messages; rename it"),
    "data.tools_key": (("tools",), "the column is tools; rename it"),
    "data.enable_thinking_key": (("enable_thinking",), "rename the column to enable_thinking"),
    "data.multiturn.enable": ((True,), "write prompts and answers as messages, in a column messages"),
    "data.custom_cls.*": ((), "rows are read only from files; write them with the class, or set data.convert"),
    "data.sampler.*": ((), "data.shuffle decides on the order of rows; write the file in another order"),
    "data.datagen.*": ((), "rows are read only from files"),
    "data.apply_chat_template_kwargs": (({},), "it is a table of arguments"),
    "data.image_key": (("images", "image"), "images lie in the column images or image; rename it"),
    "data.mm_processor_kwargs*": (({},), "write them into preprocessor_config.json in the model's folder"),
    "data.pad_mode": (("no_padding",), PACKED),
    "data.tokenizer": ((), "the tokenizer lies in the model's folder"),
    "data.*tool_*path": ((), AS_AN_ENV),
    "critic.*freeze_vision_tower": ((False,), "a model with images has no value head here"),
    "*.custom_chat_template": ((), "write it into chat_template.jinja in the model's folder"),
    "*.tokenizer_path": ((), "the tokenizer lies in the model's folder"),
    "*.hf_config_path": ((), "config.json lies in the model's folder"),
    "*.lora_adapter_path": ((), "training continues from merged weights, or from a checkpoint of a run here"),
    "*.model.exclude_modules": (([],), "name the layers in target_modules"),
    "*.model.external_lib": ((), "nothing is imported for its side effects"),
    "*.model.override_config.attn_implementation": (
        ("flash_attention_2", "sdpa", "eager", "flash_attention_3"), KERNELS),
    "*.model.override_config*": (({},), "change config.json in the model's folder"),
    "*.model.mtp.enable*": ((False,), "extra prediction heads are not trained here; set it to False"),
    "*.model.lora_type": (("lora",), "adapters are LoRA's"),
    "*.model.lora_dropout": ((0, 0.0), "adapters have no dropout"),
    "*.model.lora_dtype": ((), "adapters are trained in fp32"),
    "*.model.lora_exclude_modules": (([],), "name the layers in target_modules"),
    "*.model.lora_lora_B_init_method": (("zero",), "adapters start at zero"),
    "actor_rollout_ref.ref.model.*": ((), f"the reference is the actor's first state; {REMOVE}"),
    "*optim.optimizer": (("AdamW", "adamw", "adam", "Adam"), "the optimizer is AdamW"),
    "*optim.optimizer_impl": (("torch.optim",), "the optimizer is AdamW"),
    "*optim.override_optimizer_config": (({},), "the optimizer is AdamW"),
    "*optim.override_optimizer_config.amsgrad": ((False,), "the optimizer is AdamW"),
    "*optim.override_optimizer_config.main_params_dtype": (("fp32", "float32"), NOT_SAVED),
    "*optim.num_cycles": ((0.5,), "a cosine falls once"),
    "*optim.lr_warmup_init": ((0, 0.0), "warm-up starts from 0"),
    "*optim.init_lr_ratio": ((0, 0.0), "warm-up starts from 0"),
    "*optim.zero_indexed_step": ((True,), "the first update has the learning rate of step 0"),
    "*optim.weight_decay_incr_style": (("constant",), "weight decay is constant"),
    "*optim.main_grads_dtype": (("fp32", "float32", 32, "32"), NOT_SAVED),
    "*optim.exp_avg*_dtype": (("fp32", "float32", 32, "32"), NOT_SAVED),
    "*optim.master_weights": ((True,), NOT_SAVED),
    "*model_dtype": (("fp32", "float32"), f"master weights are fp32; {REMOVE}"),
    "*.mixed_precision.param_dtype": (("bf16", "bfloat16"), "set fsdp_config.dtype"),
    "*.qat.enable": ((False,), "there is no training with quantized weights here; set it to False"),
    "*.router_replay.*_file": ((), "routes are kept in memory"),
    ROLLOUT + "ignore_eos": ((False,), "responses end at an end token"),
    ROLLOUT + "do_sample": ((True,), "responses are drawn at rollout.temperature"),
    ROLLOUT + "over_sample_rate": ((0, 0.0), "a step samples what it learns from"),
    ROLLOUT + "multi_turn.enable": ((False,), AS_AN_ENV),
    ROLLOUT + "multi_turn.num_repeat_rollouts": ((), AS_AN_ENV),
    ROLLOUT + "agent.default_agent_loop": (("single_turn_agent",), AS_AN_ENV),
    ROLLOUT + "agent.agent_loop_config_path": ((), AS_AN_ENV),
    ROLLOUT + "agent.custom_async_server.path": ((), "the engines are vLLM's"),
    ROLLOUT + "agent.agent_loop_manager_class": ((), AS_AN_ENV),
    ROLLOUT + "repetition_penalty": ((1, 1.0), "responses are drawn from the model's own distribution"),
    ROLLOUT + "checkpoint_manager_class": ((), "weights are published bucket by bucket"),
    ROLLOUT + "custom*": ((), "the engines are vLLM's"),
    ACTOR + "use_rollout_log_probs": ((False,), "set algorithm.rollout_correction.bypass_mode"),
    "*.model.model_type": (("language_model", "value_model"), "algorithms decide which model has a value head"),
    "*.model.target_parameters": ((), "name the layers in target_modules"),
    ROLLOUT + "quantization*": ((), f"the engine has the trainer's weights, unquantized; {REMOVE}"),
    ROLLOUT + "logprobs_mode": (("processed_logprobs",), "log-probs belong to the drawn distribution"),
    ROLLOUT + "router_config_path": ((), "prompts are divided evenly among engines"),
    ROLLOUT + "disaggregation.enabled": ((False,), "each engine has a prompt and its response"),
    ROLLOUT + "checkpoint_engine.custom_backend_module": ((), "weights are published bucket by bucket"),
    "algorithm.rollout_correction.rollout_rs": ((), "rows are not rejected by their ratio; take rollout_is"),
    "algorithm.rollout_correction.bypass_mode": (
        (False,), "the ratio starts from the trainer's own log-probs; set it to False, and take rollout_is"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (
        (False,), "importance weights are not divided by their mean; set it to False"),
    "algorithm.use_pf_ppo": ((False,), "responses are not reweighted by preference; set it to False"),
    "reward.reward_manager.source": (("register",), "write a reward function, and name it in reward.functions"),
    "reward.reward_manager.module.path": ((), "write a reward function, and name it in reward.functions"),
    "reward.reward_manager.name": (
        ("naive", "batch", "prime", "dapo", "gdpo", "remote"),
        "write a reward function, and name it in custom_reward_function; a limit of requests belongs there too"),
    "reward.reward_kwargs.*": ((), "write the value into the reward function"),
    "reward.custom_reward_function.reward_kwargs": (({},), "it is a table of arguments"),
    "reward_model.reward_loop_*": ((), "write a reward function, and name it in custom_reward_function"),
    "reward_model.input_tokenizer": ((), "the reward model reads the policy's tokens"),
    "*sandbox_fusion.url": ((), "rewards run in processes of their own; call a sandbox from a function of yours"),
    "distillation.enabled": (
        (False,), "write a config with algorithm.name = distill and algorithm.teacher; docs/algorithms.md says how"),
    "trainer.val_only": ((False,), "use verl-fn eval"),
    "trainer.checkpoint_callback_class": ((), "nothing is called after a checkpoint"),
    "trainer.v1.trainer_mode": (("sync",), "set driver.max_lag and rollout.placement yourself"),
    "trainer.v1.sampler.custom_sampler.*": ((), "a step learns from the samples of its prompts"),
    "skip.*.enable": ((False,), "steps are not skipped here"),
    **{f"*.{engine}.*": ((), f"there is no engine {engine}; take fsdp or megatron, and its keys")
       for engine in ("veomni", "torchtitan", "automodel", "mindspeed")},
}  # fmt: skip

# Patterns and the reason why keys that fit have no effect here, whatever their value. The first that fits counts.
NO_EFFECT: Mapping[str, str] = {
    "distillation.*": "distillation.enabled is off",
    "*_target_": "it names a class of verl",
    "hydra.*": "it configures Hydra",
    "*profiler.*": "there is no profiler here",
    "actor_rollout_ref.ref.fsdp_config.model_dtype": "the reference policy has no masters",
    "actor_rollout_ref.ref.*": ONE_LAYOUT,
    "*.mixed_precision.reduce_dtype": "gradients are summed in fp32, or as fsdp_config.reduce_dtype says",
    "*.mixed_precision.buffer_dtype": "buffers are fp32",
    "*.checkpoint.*": COMPLETE,
    "*ppo_micro_batch_size*": "micro-batches are cut by tokens; see ppo_max_token_len_per_gpu",
    "*forward_micro_batch_size*": "micro-batches are cut by tokens; see ppo_max_token_len_per_gpu",
    "*forward_max_token_len_per_gpu": "the budget of training holds for every pass",
    "*infer_*": "the budget of training holds for every pass",
    **{f"{table}.m*_per_gpu": "ppo_max_token_len_per_gpu is the budget"
       for table in ("*_config", "critic.fsdp", "*.megatron")},
    "*log_prob_*": "the budget of training holds for every pass",
    "*use_dynamic_bsz": "micro-batches are always cut by tokens",
    "*use_remove_padding": PACKED,
    "*pad_*": PACKED,
    **dict.fromkeys(("*grad_offload", "*param_offload", "*optimizer_offload"), OFFLOADED),
    **{f"*optim.override_optimizer_config.{name}": "it moves or speeds up the optimizer, whose numbers are the same"
       for name in ("optimizer_cpu_offload", "*offload_fraction", "overlap_cpu_optimizer*", "pin_cpu_*",
                    "use_precision_aware_optimizer", "use_torch_optimizer_for_cpu_offload", "foreach", "fused",
                    "capturable")},
    "*.override_transformer_config.attention_backend": KERNELS,
    "*.override_transformer_config.recompute_modules": "it is Megatron's default",
    "*use_torch_compile": "verl compiles its entropy; here fsdp_config.use_torch_compile compiles layers",
    "*.qat.*": "qat.enable is off",
    "*router_replay.*": "routing is replayed only in updates of the actor, from memory",
    "*data_loader_seed": "trainer.seed is the seed of everything",
    "*.seed": "trainer.seed is the seed of everything",
    "*full_determinism": "runs repeat bitwise; driver.deterministic is on by default",
    "*entropy_*": KERNELS,
    "*calculate_*": "entropies and log-probs are computed where they are needed",
    "*use_prefix_grouper": KERNELS,
    "*rollout_n": "it repeats rollout.n",
    "*.clip_ratio": "verl reads clip_ratio_low and clip_ratio_high, since its defaults set them",
    "*use_shm": "folders are read where they are",
    "*trust_remote_code": "Python code of a model's folder is never run",
    "reward_model.model.external_lib": "Python code of a model's folder is never run",
    "*use_liger": KERNELS,
    "*fused_kernel*": KERNELS,
    "*tiled_mlp.*": KERNELS,
    "*.mtp.*": "extra prediction heads are not trained here",
    "*model.lora.*": "there are no adapters: their rank is 0",
    "*.model.lora_merge": "rollout.adapters decides how adapters reach the engine",
    "*.model.lora_*": "adapters have a rank, an alpha and target modules",
    "*hybrid_engine": "it has no other value in verl",
    "data.num_workers": "rows are read when the run starts",
    "data.dataloader_num_workers": "rows are read when the run starts",
    "data.filter_overlong_prompts_workers": "rows are read when the run starts",
    "data.val_max_samples": "all held-out rows are evaluated",
    "data.val_batch_size": "an evaluation asks for all answers at once",
    "data.gen_batch_size": "a step samples what it learns from",
    "data.return_*": "it selects what verl's data loader returns",
    "data.validation_shuffle": "metrics do not depend on the order of problems",
    "data.enable_thinking_default": "without it a template's own default counts",
    "data.*image*": "the model's own image processor makes patches, from preprocessor_config.json",
    "data.*video*": TEXT,
    "data.*audio*": TEXT,
    "data.ignore_input_ids_mismatch": "rows are tokenized as the template renders them",
    "data.balance_dp_token": "rows are dealt to ranks by their tokens",
    "trainer.balance_batch": "rows are dealt to ranks by their tokens",
    **{f"*.fsdp*.{name}": FSDP_ITSELF for name in (
        "wrap_policy.*", "forward_prefetch", "use_orig_params", "use_no_sync_for_gradient_accumulation",
        "forward_only", "strategy", "turbo_config.*", "mixed_precision")},
    **{f"*.megatron.{name}": MEGATRON_ITSELF for name in (
        "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "use_dist*", "dist*",
        "dynamic_context_parallel", "max_seqlen_per_dp_cp_rank", "override_ddp_config*",
        "override_mcore_model_config*", "strategy", "use_mbridge", "vanilla_mbridge", "forward_only", "offload.*")},
    "*optim.lr_decay_steps": "the learning rate is constant",
    "*optim.lr_wsd*": "the schedules are constant, linear and cosine",
    "*optim.muon*": "the optimizer is AdamW",
    "*optim.use_layer_wise*": "the optimizer is AdamW",
    "*optim.use_precision_aware_optimizer": "its states are in fp32",
    "*optim.use_*": "the optimizer's state is always saved and restored whole",
    "*optim.total_training_steps": "verl's trainer replaces it by the steps of the run",
    **{f"critic.{name}": f"actor and critic share algorithm.{name}" for name in SHARED},
    "critic.enable": "algorithm.adv_estimator decides",
    "critic.nccl_timeout": "ray.timeout decides, for all ranks",
    ROLLOUT + "mode": "engines always run beside the driver",
    ROLLOUT + "val_kwargs.do_sample": "its temperature decides",
    ROLLOUT + "load_format": "engines get their weights from the trainer",
    ROLLOUT + "layered_summon": "weights are published bucket by bucket",
    ROLLOUT + "multi_turn.*": "multi_turn.enable is off",
    ROLLOUT + "agent.*": "responses have one turn",
    ROLLOUT + "engine_kwargs*": "it configures another engine than vLLM",
    ROLLOUT + "checkpoint_engine*": "weights are published bucket by bucket",
    ROLLOUT + "trace.*": "there are no traces; trainer.journal keeps samples",
    ROLLOUT + "disaggregation.*": "disaggregation.enabled is off",
    ROLLOUT + "prompt_length": "it repeats data.max_prompt_length",
    ROLLOUT + "response_length": "it repeats data.max_response_length",
    ROLLOUT + "max_model_len": "prompt and response fit into it",
    ROLLOUT + "engine_kwargs.vllm.max_model_len": "prompt and response fit into it",
    ROLLOUT + "limit_images": "a prompt may have any number of images",
    **{f"{ROLLOUT}engine_kwargs.vllm.{name}": "images are processed once, before vLLM gets them"
       for name in PROCESSOR_CACHE},
    ROLLOUT + "n_gpus_per_node": "rollout.nnodes is 0: engines share the GPUs of training",
    ROLLOUT + "enable_sleep_mode": "rollout.free_cache_engine decides",
    ROLLOUT + "sglang_engine_mode": "it configures another engine than vLLM",
    "*.model.load_tokenizer": "the tokenizer lies in the model's folder",
    ROLLOUT + "enable_rollout_routing_replay": "actor.router_replay.mode decides",
    **{ROLLOUT + name: "it has no counterpart in the rollout engines here" for name in (
        "cudagraph_capture_sizes", "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size",
        "moe_tensor_parallel_size", "enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy",
        "disable_log_stats", "multi_stage_wake_up", "update_weights_bucket_megabytes", "skip_tokenizer_init",
        "moe_load_balance_metrics_interval", "prometheus.*", "mtp", "qat", "server*",
        "standalone_gpu_memory_utilization")},
    "*sandbox_fusion.*": "no sandbox is set",
    "reward.reward_model.*": "the reward model is a model folder with a value head, on the training ranks",
    "reward_model.*": "the reward model is a model folder with a value head, on the training ranks",
    "reward.custom_reward_function.*": "the rule of each data source scores; no function is named",
    "reward.reward_manager.*": "functions are called row by row, or in batches by their signature",
    **{f"reward.reward_kwargs.{name}": "overlong_buffer_cfg.enable is off" for name in (
        "overlong_buffer_cfg.enable", "overlong_buffer_cfg.len", "overlong_buffer_cfg.penalty_factor",
        "overlong_buffer_cfg.log", "max_resp_len")},
    "reward.launch_reward_fn_async": "rewards run in processes of their own",
    "algorithm.pf_ppo.*": "algorithm.use_pf_ppo is off",
    "algorithm.filter_groups.max_inflight_gen_batches": "a step asks for the groups that it lacks",
    "algorithm.filter_groups.*": "algorithm.filter_groups.enable is off",
    "algorithm.rollout_correction.loss_type": "algorithm.rollout_correction.bypass_mode is off",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.rollout_correction.rollout_rs is not set",
    "algorithm.rollout_correction.*": "algorithm.rollout_correction.rollout_is is not set",
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
    "trainer.resume_from_path": "trainer.resume_mode is not resume_path",
    "trainer.v1.*": "trainer.v1.trainer_mode is sync",
    "trainer.profile_*": "there is no profiler here",
    "transfer_queue.*": "batches travel between the workers themselves",
    "ray_kwargs.*": "the [ray] table configures Ray",
    "ray_init.*": "the [ray] table configures Ray",
    "skip.*": "steps are not skipped here",
}  # fmt: skip

# verl's defaults of keys that are translated, as far as they differ from the defaults here or are computed with.
_OPTIM = {
    "weight_decay": 0.01, "betas": [0.9, 0.999], "clip_grad": 1.0, "lr_scheduler_type": "constant",
    "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0,
}  # fmt: skip
_ACTOR = {f"{ACTOR}optim.{name}": value for name, value in _OPTIM.items()} | {
    MODEL + "path": "~/models/deepseek-llm-7b-chat", MODEL + "enable_gradient_checkpointing": True,
    MODEL + "lora_alpha": 16, ACTOR + "fsdp_config.dtype": "bfloat16", ACTOR + "megatron.dtype": "bfloat16",
    "trainer.logger": ["console", "wandb"], "trainer.save_freq": -1, "trainer.test_freq": -1,
    "trainer.log_val_generations": 0, "trainer.nnodes": 1,
}  # fmt: skip
PPO_DEFAULTS: Mapping[str, Any] = _ACTOR | {f"critic.optim.{name}": value for name, value in _OPTIM.items()} | {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet", "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    "data.shuffle": True, "critic.model.path": "~/models/deepseek-llm-7b-chat",
    "critic.model.enable_gradient_checkpointing": True, "critic.model.lora_alpha": 16,
    "critic.fsdp.dtype": "bfloat16", "critic.megatron.dtype": "bfloat16",
    ACTOR + "optim.lr": 1e-6, "critic.optim.lr": 1e-5,
    ACTOR + "ppo_mini_batch_size": 256, ACTOR + "ppo_epochs": 1, ACTOR + "shuffle": False,
    ACTOR + "clip_ratio": 0.2, ACTOR + "clip_ratio_low": 0.2, ACTOR + "clip_ratio_high": 0.2,
    ACTOR + "clip_ratio_c": 3.0, ACTOR + "tau_pos": 1.0, ACTOR + "tau_neg": 1.05,
    ACTOR + "loss_agg_mode": "token-mean", ACTOR + "policy_loss.loss_mode": "vanilla",
    ACTOR + "policy_loss.clip_cov_ratio": 0.0002, ACTOR + "policy_loss.clip_cov_lb": 1.0,
    ACTOR + "policy_loss.clip_cov_ub": 5.0, ACTOR + "policy_loss.kl_cov_ratio": 0.0002,
    ACTOR + "policy_loss.ppo_kl_coef": 0.1, ACTOR + "entropy_coeff": 0.0, ACTOR + "use_kl_loss": False,
    ACTOR + "kl_loss_coef": 0.001, ACTOR + "kl_loss_type": "low_var_kl",
    ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768, "critic.cliprange_value": 0.5,
    ROLLOUT + "name": "vllm", ROLLOUT + "dtype": "bfloat16", ROLLOUT + "max_num_seqs": 256,
    ROLLOUT + "max_num_batched_tokens": 8192, ROLLOUT + "gpu_memory_utilization": 0.5,
    ROLLOUT + "free_cache_engine": True, ROLLOUT + "enforce_eager": False,
    ROLLOUT + "tensor_model_parallel_size": 2, ROLLOUT + "nnodes": 0, ROLLOUT + "n": 1,
    ROLLOUT + "temperature": 1.0, ROLLOUT + "top_k": -1, ROLLOUT + "top_p": 1.0,
    ROLLOUT + "val_kwargs.n": 1, ROLLOUT + "val_kwargs.temperature": 0.0, ROLLOUT + "val_kwargs.top_k": -1,
    ROLLOUT + "val_kwargs.top_p": 1.0,
    "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.filter_groups.metric": "reward",
    "algorithm.filter_groups.max_num_gen_batches": 0, "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000, "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.rollout_correction.rollout_is_threshold": "2.0",
    "reward.num_workers": 8, "reward.custom_reward_function.name": "compute_score",
    "reward.reward_manager.name": "naive", ACTOR.removesuffix("actor.") + "nccl_timeout": 600,
    "trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k", "trainer.total_epochs": 30,
    "trainer.n_gpus_per_node": 8, "trainer.val_before_train": True, "trainer.critic_warmup": 0,
    "trainer.resume_mode": "auto",
}  # fmt: skip
SFT_DEFAULTS: Mapping[str, Any] = _ACTOR | {
    "data.train_files": "~/data/gsm8k/train.parquet", "data.train_batch_size": 256, "data.max_length": 1024,
    "data.seed": 1, ACTOR + "optim.lr": 1e-3, ACTOR + "use_dynamic_bsz": True,
    ACTOR + "ppo_max_token_len_per_gpu": 8192, ACTOR + "ppo_micro_batch_size_per_gpu": 4,
    "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test", "trainer.total_epochs": 4,
    "trainer.n_gpus_per_node": 1, "trainer.val_before_train": False, "trainer.resume_mode": "auto",
}  # fmt: skip
# Further keys that are computed with; verl has no number by default.
NUMBERS = frozenset({
    *(role + name for role in ROLES for name in (
        "ppo_micro_batch_size_per_gpu", "grad_clip", "optim.lr_decay_steps", "optim.min_lr", "optim.min_lr_ratio",
        "megatron.context_parallel_size", "megatron.tensor_model_parallel_size")),
    *(fsdp + name for fsdp in (ACTOR + "fsdp_config.", "critic.fsdp.")
      for name in ("fsdp_size", "ulysses_sequence_parallel_size")),
    *(ROLLOUT + name for name in (
        "prompt_length", "response_length", "max_model_len", "n_gpus_per_node", "engine_kwargs.vllm.max_model_len")),
    "trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", "data.val_max_samples", "data.seed",
    "reward.reward_kwargs.max_resp_len", "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
})  # fmt: skip
# Fields of Megatron's provider with verl's default, the same as Megatron's; None: any value, without effect here.
MEGATRON_CHOICES: Mapping[str, Any] = {"recompute_modules": ["core_attn"], "attention_backend": None}
# Fields of Megatron's provider that a user cannot set here, since its backend refuses them, and why.
PROVIDER_FIELDS: Mapping[str, str] = {
    **dict.fromkeys((
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size",
        "sequence_parallel", "params_dtype", "bf16", "fp16", "pipeline_dtype", "autocast_dtype", "hidden_dropout",
        "attention_dropout", "calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func",
        "share_embeddings_and_output_weights", "vocab_size", "perform_initialization", "use_cpu_initialization",
        "moe_enable_routing_replay", "mtp_num_layers", "use_mup"),
        "the Megatron backend decides it, from the keys of its table; remove it"),
    **dict.fromkeys((
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"),
        "config.json in the model's folder decides it; remove it"),
    **dict.fromkeys(("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
        "it changes a buffer of the model between calls, which no state holds; remove it"),
    "moe_input_jitter_eps": "it draws random numbers in each pass; remove it",
    "moe_router_force_load_balancing": "it draws random experts in each pass; remove it",
    "moe_router_force_biased": "it draws random numbers for each layer; remove it",
    "moe_expert_capacity_factor": "it drops tokens by what else is in their micro-batch; remove it",
}  # fmt: skip
# Arguments of vLLM that a user cannot set here: its engine refuses them.
ENGINE_ARGUMENTS = frozenset({
    "model", "load_format", "tokenizer", "skip_tokenizer_init", "generation_config", "override_generation_config",
    "logprobs_mode", "max_logprobs", "logits_processors", "speculative_config", "quantization", "hf_overrides",
    "trust_remote_code", "worker_extension_cls", "worker_cls", "pipeline_parallel_size", "data_parallel_size",
    "tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "dtype", "max_num_seqs", "max_model_len",
    "seed", "enable_sleep_mode", "enable_lora", "enable_return_routed_experts", "kv_transfer_config",
    "mm_processor_cache_gb", "mm_processor_kwargs", "limit_mm_per_prompt",
})  # fmt: skip
# With verl's files for Megatron.
MEGATRON_DEFAULTS: Mapping[str, Any] = {
    ACTOR + "strategy": "megatron", "critic.strategy": "megatron", ACTOR + "megatron.sequence_parallel": True,
    "critic.megatron.sequence_parallel": True,
}  # fmt: skip
