"""What the server of warm processes imports for ranks of Megatron, beside what all processes need."""

import importlib
import os
import sys
from pathlib import Path

# Compilers start threads as they are imported, and a process with threads cannot be forked.
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

from verl_fn.backends.megatron.importing import load_bridge

load_bridge()
# Actors of Ray look for it by name, and do not see this folder.
sys.path.insert(0, str(Path(__file__).parent))
importlib.import_module("megatron_on_cpu")
del sys.path[0]
for name in (
    "verl_fn.backends.megatron.backend", "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel", "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama",
):  # fmt: skip
    importlib.import_module(name)
