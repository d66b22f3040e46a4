"""Every private name of another package that the product uses is listed here, with its file and the version it is of.

A new version of a package may drop such a name without a word. So a new use needs a line here, and another version of
a package fails the last test, which says what to read again. ``torch.utils._pytree``, whose functions have no public
place, and torch's fused operators (``torch._foreach_*``) are used in many files and left out.
"""

import ast
import importlib.metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("state", "steps", "backends", "verl_fn")
LINKS = {ROOT / "verl_fn" / name for name in (*FOLDERS, "benchmarks")}
PACKAGES = ("megatron", "peft", "ray", "safetensors", "torch", "transformers", "vllm")
EVERYWHERE = ("_pytree", "_foreach_", "_fused_")

# Files that exist to hold such names, each with a test of its own.
OWN_FILES = {"backends/fsdp/torch_private.py", "verl_fn/driver/ray_private.py"}
# Python's own, which its documentation describes.
DOCUMENTED = {"_current_frames", "_exit"}
VERSIONS = {"torch": "2.11", "transformers": "5.9", "ray": "2.60", "megatron-core": "0.19", "megatron-bridge": "0.6"}
USED = {
    "torch": {
        "backends/hf/attention.py": {"_varlen_attn", "_varlen_attn_backward"},
        "backends/hf/folder.py": {"_parameters"},
        "backends/hf/skeleton.py": {"_buffers", "_dynamo", "_forward_hooks"},
        "backends/megatron/conversion.py": {"_parameters"},
        "backends/megatron/layout.py": {"_device_types", "_get_backend"},
        "backends/sampler/llama.py": {"_linear_pointwise", "_reorder_linear_weight"},
        "backends/weight_sync/channel.py": {"_timeout"},
        "state/guards.py": {"_C", "_are_functorch_transforms_active", "_current_level", "_functorch", "_version"},
        "state/ownership.py": {"_C", "_cdata", "_storage_Use_Count", "_version"},
        "verl_fn/driver/serialization.py": {"_C", "_disabled_torch_function_impl", "_make_wrapper_subclass"},
        "verl_fn/driver/host.py": {"_get_sequence_number_for_group", "_world"},
        "verl_fn/testing/violation.py": {"_python_dispatch"},
    },
    "transformers": {
        "backends/checkpoint.py": {"_weight_conversions"},
        "backends/hf/checks.py": {"_model_mapping"},
        "backends/hf/config.py": {"_extra_content"},
        "backends/hf/experts.py": {"_apply_gate", "_experts_implementation", "_grouped_linear"},
        "backends/hf/folder.py": {"_gradient_checkpointing_func", "_is_hf_initialized", "_model_mapping"},
        "backends/hf/vision.py": {"_model_mapping"},
    },
    "megatron-core": {
        "backends/megatron/distributed_optimizer.py": {"_defer_param_sync", "_get_model_param_range_map"},
        "backends/megatron/shards.py": {"_get_item_slice_in_shard", "_replace_param_with_raw_if_needed"},
    },
    "megatron-bridge": {
        "backends/megatron/conversion.py": {"_model_bridge"},
        "backends/megatron/model.py": {"_model_bridge"},
    },
    # The engine refuses other versions of vLLM (vllm.arguments.TESTED).
    "vllm": {
        "backends/vllm/adapters.py": {"_adapter_manager"},
        "backends/vllm/core.py": {"_run_in_subprocess", "_try_inspect_model_cls"},
    },
}


def private(name):
    return name.startswith("_") and not name.startswith("__")


def of_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_of(tree):
    """The private names of other packages in a file: in imports, below imported names, and as attributes."""
    own = set(defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            for alias in node.names:
                yield from filter(private, (*node.module.split("."), alias.name))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own and not of_self(node):
            yield node.attr


def defined(tree):
    """The private names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


def found():
    files = [f for n in FOLDERS for f in sorted((ROOT / n).rglob("*.py")) if not LINKS & set(f.parents)]
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}
    return {
        file: names
        for file, tree in trees.items()
        if file not in OWN_FILES
        and (names := {n for n in names_of(tree) if n not in DOCUMENTED and not n.startswith(EVERYWHERE)})
    }


def test_every_private_name_is_listed_with_its_file():
    listed = {}
    for files in USED.values():
        for file, names in files.items():
            listed[file] = listed.get(file, set()) | names
    assert found() == listed


@pytest.mark.parametrize("package", VERSIONS)
def test_the_names_are_of_the_installed_version(package):
    version = importlib.metadata.version(package)
    files = sorted(USED.get(package, ())) or sorted(OWN_FILES)
    assert version.startswith(f"{VERSIONS[package]}."), f"{package} is {version}: read its names in {files} again"
