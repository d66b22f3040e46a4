"""Ranks that serve all tests of a session: it takes them seconds to start."""

import pytest
from ranks import Ranks


def ranks(size):
    @pytest.fixture(scope="session")
    def fixture(warm):
        started = Ranks(size)
        yield started
        # An orderly end takes seconds, and ranks hold nothing that needs one.
        started.kill()

    return fixture


one, two, four = ranks(1), ranks(2), ranks(4)
