"""A tiny model with a chat template."""

import pytest

from verl_fn.backends.hf.new_model import new_model


@pytest.fixture(scope="session")
def chatty(tmp_path_factory):
    """A Qwen3 folder of 0.02 M parameters with a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 256}
    return new_model(folder, chars="abcdefgh>0123456789", chat_template=True, **sizes)
