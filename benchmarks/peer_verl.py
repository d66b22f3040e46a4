"""verl's FSDP2 engine on rows such as those of ``throughput``, in its best configuration, driven without Ray."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from . import workload

LR = 1e-6


class Verl:
    """verl's ``TrainingWorker``: FSDP2, Liger kernels, padding removed, parameters kept after the forward pass."""

    def __init__(
        self, folder: str, rows: Sequence[Sequence[int] | torch.Tensor], prompt: int, checkpointing: bool = False
    ) -> None:
        from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
        from verl.workers.utils.losses import ppo_loss

        model = HFModelConfig(
            path=folder, use_remove_padding=True, enable_gradient_checkpointing=checkpointing, use_liger=True,
            override_config={"attn_implementation": "flash_attention_2"},
        )  # fmt: skip
        engine = FSDPEngineConfig(
            forward_only=False, fsdp_size=-1, strategy="fsdp2", param_offload=False, optimizer_offload=False,
            use_dynamic_bsz=True, use_remove_padding=True, max_token_len_per_gpu=workload.BUDGET,
            infer_max_token_len_per_gpu=workload.BUDGET, reshard_after_forward=False,
        )  # fmt: skip
        self.worker = TrainingWorker(
            config=TrainingWorkerConfig(
                model_type="language_model", model_config=model, engine_config=engine,
                optimizer_config=FSDPOptimizerConfig(lr=LR, total_training_steps=100), checkpoint_config=None,
            )
        )  # fmt: skip
        self.worker.reset()
        actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=-1)
        self.worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
        self.prompt, self.lengths = prompt, [len(row) - prompt for row in rows]
        self.ids = torch.zeros(len(rows), prompt + max(self.lengths), dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for i, row in enumerate(rows):
            self.ids[i, : len(row)] = torch.as_tensor(row)
            self.mask[i, : len(row)] = 1
        self.advantages = workload.advantages(self.lengths)
        self.logprobs()

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
