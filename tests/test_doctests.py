"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import verl_fn

MODULES = [
    module.name
    for module in pkgutil.walk_packages(verl_fn.__path__, "verl_fn.")
    if not module.name.endswith("__main__") and ".benchmarks." not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    if name == "verl_fn.backends.vllm.models":
        # vLLM for GPUs brings it.
        pytest.importorskip("torchvision")
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
