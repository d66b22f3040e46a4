"""``verl-fn``: the command line."""

from .main import main, parse

__all__ = ["main", "parse"]
