"""Collects the differences that the comparisons measure, and writes them where ``VERL_FN_PEERS_REPORT`` says."""

import json
import os
import platform
from pathlib import Path

import padded
import pytest
import torch


@pytest.fixture(scope="session")
def measured():
    """A table of the largest differences: kind, name, field."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    yield table
    if place := os.environ.get("VERL_FN_PEERS_REPORT"):
        import verl

        about = {
            "command": "make test-peers",
            "verl": verl.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "batches": padded.BATCHES,
            "dtype": "float64",
            "tolerance": padded.TOLERANCE,
            "difference": "the largest |ours - verl's| / (1 + |verl's|) over all tokens of all batches",
        }
        Path(place).write_text(json.dumps(about | table, indent=2) + "\n")
