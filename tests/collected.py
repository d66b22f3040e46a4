"""Imports the tests as pytest does, in a warm Python whose processes are then workers of pytest-xdist."""

import contextlib
import io
import json
import os

import pytest

with contextlib.redirect_stdout(io.StringIO()):
    pytest.main(["-n0", "--collect-only", *json.loads(os.environ["TESTS"])])
