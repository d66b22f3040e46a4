"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = (
    "verl_fn",
    "verl_fn.state",
    "verl_fn.steps",
    "verl_fn.backends",
    "verl_fn.algorithms",
    "verl_fn.driver",
    "verl_fn.testing",
)
MODULES = sorted(
    {package for package in PACKAGES}
    | {m.name for p in PACKAGES for m in pkgutil.iter_modules(importlib.import_module(p).__path__, p + ".")}
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
