"""Ranks that serve all tests of a session: it takes them seconds to start."""

import pytest
from megatron_support import EXPERTS, HELPERS
from ranks import Ranks, ranks_by_size
from warm_python import warm_python

from verl_fn.backends.hf.new_model import new_model


def ranks(size):
    @pytest.fixture(scope="session")
    def fixture(warm):
        started = Ranks(size)
        yield started
        # An orderly end takes seconds, and ranks hold nothing that needs one.
        started.kill()

    return fixture


one, two, four = ranks(1), ranks(2), ranks(4)


@pytest.fixture(scope="session")
def megatron_python(warm):
    """A warm Python that has imported Megatron, too."""
    with warm_python(HELPERS / "megatron_imports.py", python=warm) as path:
        yield path


@pytest.fixture(scope="session")
def megatron_ranks(megatron_python):
    """Starts ranks that share what one process has imported, or returns those that it has started before."""
    with ranks_by_size(megatron_python) as of:
        yield of


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, num_hidden_layers=1)


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """Its 9 tokens are padded for two ranks."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcde", hidden_size=16, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, **EXPERTS)


@pytest.fixture(scope="session")
def shallow_experts(tmp_path_factory):
    """For laws, which run a model a hundred times."""
    return new_model(tmp_path_factory.mktemp("model"), chars="abcd", hidden_size=16, num_hidden_layers=1, **EXPERTS)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Makes a small model of these settings once; its 9 tokens are padded for two ranks."""
    made = {}

    def of(**settings):
        key = repr(settings)
        if key not in made:
            made[key] = new_model(tmp_path_factory.mktemp("model"), chars="abcde", hidden_size=16, **settings)
        return made[key]

    return of
