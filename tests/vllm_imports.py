"""What the server of warm processes imports for vLLM's engines, beside what all processes need."""

import importlib
import os
import sys

# Compilers start threads as they are imported, and a process with threads cannot be forked.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from verl_fn.backends.vllm.arguments import prepare_environment
from verl_fn.backends.vllm.process import IMPORTED

prepare_environment("cpu")
# vLLM does without Ray, and a Ray that is imported here would keep this process's settings in Ray's actors.
assert "ray" not in sys.modules
sys.modules["ray"] = None
for name in (
    "vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "verl_fn.backends.vllm", *IMPORTED,
    "vllm.v1.worker.cpu_worker", "verl_fn.testing.rollouts",
):  # fmt: skip
    importlib.import_module(name)
del sys.modules["ray"]
