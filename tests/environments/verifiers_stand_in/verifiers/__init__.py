"""The few names of verifiers that the adapter uses, for tests where the package is not installed."""

import importlib


def load_environment(name, **arguments):
    return importlib.import_module(name).load_environment(**arguments)
