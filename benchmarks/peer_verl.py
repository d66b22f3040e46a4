"""verl's engines on rows such as ``throughput`` has, each in its best configuration, driven without Ray."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from . import megatron_loop, workload

LR = 1e-6


class Verl:
    """verl's ``TrainingWorker``: FSDP2, Liger kernels, padding removed, parameters kept after the forward pass."""

    strategy = "fsdp2"

    def __init__(
        self,
        folder: str,
        rows: Sequence[Sequence[int] | torch.Tensor],
        prompt: int,
        checkpointing: bool,
        device: str,
    ) -> None:
        self.prepare(device)
        from verl.workers.config import ActorConfig
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
        from verl.workers.utils.losses import ppo_loss

        model, engine, optimizer = self.configs(folder, checkpointing, device)
        self.worker = TrainingWorker(
            config=TrainingWorkerConfig(
                model_type="language_model", model_config=model, engine_config=engine, optimizer_config=optimizer,
                checkpoint_config=None,
            )
        )  # fmt: skip
        self.initialize(device)
        actor = ActorConfig(strategy=self.strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=-1)
        self.worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
        self.prompt, self.lengths = prompt, [len(row) - prompt for row in rows]
        self.ids = torch.zeros(len(rows), prompt + max(self.lengths), dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for i, row in enumerate(rows):
            self.ids[i, : len(row)] = torch.as_tensor(row)
            self.mask[i, : len(row)] = 1
        self.advantages = workload.advantages(self.lengths)
        self.logprobs()

    def prepare(self, device: str) -> None:
        """Is called before verl is imported."""

    def configs(self, folder: str, checkpointing: bool, device: str) -> tuple[Any, Any, Any]:
        """verl's configs of the model, the engine and the optimizer."""
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

        model = HFModelConfig(
            path=folder, use_remove_padding=True, enable_gradient_checkpointing=checkpointing, use_liger=True,
            override_config={"attn_implementation": "flash_attention_2"},
        )  # fmt: skip
        engine = FSDPEngineConfig(
            forward_only=False, fsdp_size=-1, strategy="fsdp2", param_offload=False, optimizer_offload=False,
            use_dynamic_bsz=True, use_remove_padding=True, max_token_len_per_gpu=workload.BUDGET,
            infer_max_token_len_per_gpu=workload.BUDGET, reshard_after_forward=False,
        )  # fmt: skip
        return model, engine, FSDPOptimizerConfig(lr=LR, total_training_steps=100)

    def initialize(self, device: str) -> None:
        """Makes the model and the optimizer."""
        self.worker.reset()

    def logprobs(self) -> dict[str, float]:
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import no_padding_2_padding

        data = self._data({}, calculate_entropy=True, compute_loss=False)
        outputs = self.worker.infer_batch(data)
        logprobs = tensordict_utils.get(outputs, "log_probs").cpu().float()
        self.old = no_padding_2_padding(logprobs, data)
        mask = self.mask[:, self.prompt :].bool()
        return {"mean": float(self.old[mask].mean())}

    def update(self) -> dict[str, float]:
        from verl.utils import tensordict_utils

        fields = {"old_log_probs": self.old, "advantages": self.advantages}
        outputs = self.worker.train_batch(self._data(fields, calculate_entropy=False))
        return {"grad_norm": float(tensordict_utils.get(outputs, "metrics")["grad_norm"])}

    def _data(self, fields: dict[str, torch.Tensor], **meta: Any) -> Any:
        from verl import DataProto
        from verl.utils import tensordict_utils
        from verl.utils.model import compute_position_id_with_mask
        from verl.workers.utils.padding import left_right_2_no_padding

        common = {
            "input_ids": self.ids, "prompts": self.ids[:, : self.prompt].clone(), "attention_mask": self.mask,
            "position_ids": compute_position_id_with_mask(self.mask),
            "responses": self.ids[:, self.prompt :].clone(),
            "response_mask": self.mask[:, self.prompt :].clone(),
        }  # fmt: skip
        tokens = [self.prompt + n for n in self.lengths]
        data = DataProto.from_single_dict(
            common | fields, meta_info={"temperature": 1.0, "global_token_num": tokens, **meta}
        )
        unpadded = left_right_2_no_padding(data.to_tensordict())
        tensordict_utils.assign_non_tensor(unpadded, global_batch_size=len(tokens))
        return unpadded


class VerlMegatron(Verl):
    """verl's ``TrainingWorker`` on Megatron-Bridge's model, padding removed, with Megatron's distributed optimizer.

    Log-probs come from logits of the whole micro-batch, as by default; see ``VerlMegatronFused``.
    """

    strategy = "megatron"
    fused_logprobs = False

    def prepare(self, device: str) -> None:
        megatron_loop.prepare(device)
        if device == "cpu":
            _without_cuda()
        _without_bridges_trainer()

    def configs(self, folder: str, checkpointing: bool, device: str) -> tuple[Any, Any, Any]:
        from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
        from verl.workers.engine import MegatronEngine

        if MegatronEngine is None:
            raise RuntimeError("verl's Megatron engine cannot be imported; the warning above names the module")
        transformer = _fields_on_cpu() if device == "cpu" else dict(_FIELDS)
        if checkpointing:
            transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        model = HFModelConfig(path=folder, use_remove_padding=True, use_fused_kernels=self.fused_logprobs)
        engine = McoreEngineConfig(
            forward_only=False, param_offload=False, optimizer_offload=False, use_dynamic_bsz=True,
            use_remove_padding=True, max_token_len_per_gpu=workload.BUDGET,
            infer_max_token_len_per_gpu=workload.BUDGET, vanilla_mbridge=False, use_distributed_optimizer=True,
            override_transformer_config=transformer,
        )  # fmt: skip
        return model, engine, McoreOptimizerConfig(lr=LR, total_training_steps=100, lr_decay_style="constant")

    def initialize(self, device: str) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if device == "cpu":
            # verl seeds Megatron's generators where there are GPUs.
            model_parallel_cuda_manual_seed(0)
        super().initialize(device)


class VerlMegatronFused(VerlMegatron):
    """The same with verl's kernel that computes log-probs from hidden states."""

    fused_logprobs = True


def _without_cuda() -> None:
    """Answers what verl asks about a GPU; its engine for Megatron is registered only for CUDA."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    torch.distributed.init_process_group("gloo")
    torch.cuda.mem_get_info = lambda device=None: (0, 1)
    torch.cuda.get_device_name = lambda device=None: "CPU"
    from verl.plugin.platform import get_platform

    type(get_platform()).device_name = "cpu"


def _without_bridges_trainer() -> None:
    """Stands in for a module of Bridge's trainer, of which verl takes a config of megatron-core.

    Bridge's own module imports its data sets, and with them megatron-energon and what that needs.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    class Finalized(DistributedDataParallelConfig):
        def finalize(self) -> None:
            """Megatron-core does this as the config is made."""

    name = "megatron.bridge.training.config"
    sys.modules[name] = module = types.ModuleType(name)
    module.DistributedDataParallelConfig = Finalized  # type: ignore[attr-defined]


# Without flash-attn and Apex: verl asks for the one, and Bridge beside transformer-engine for the other. The kernels
# are the ones that the ``Megatron`` backend turns on.
_FIELDS = {
    "attention_backend": "auto", "gradient_accumulation_fusion": False, "apply_rope_fusion": True,
    "bias_activation_fusion": True,
}  # fmt: skip


def _fields_on_cpu() -> dict[str, Any]:
    """Without transformer-engine: attention and norms of the ``Megatron`` backend."""
    from verl_fn.backends.megatron.model import PLAIN, plain_spec

    return {"transformer_layer_spec": plain_spec, "attention_backend": "auto", **PLAIN}
