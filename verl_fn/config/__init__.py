"""The configuration: its keys, how it is read, and what it means. Nothing here loads torch."""

from .loading import (
    describe,
    flat,
    keys,
    load,
    notes,
    origins,
    structure,
    to_table,
)
from .schema import Config, ConfigError

__all__ = [
    "Config", "ConfigError", "describe", "flat", "keys", "load", "notes", "origins", "structure", "to_table",
]  # fmt: skip
