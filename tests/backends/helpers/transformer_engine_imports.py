"""What the server of warm processes imports for ranks with a stand-in for transformer-engine, and then Megatron."""

import importlib
import os
import sys
from pathlib import Path

# Compilers start threads as they are imported, and a process with threads cannot be forked.
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parent))

import transformer_engine_on_cpu

transformer_engine_on_cpu.install()
importlib.import_module("megatron_imports")
