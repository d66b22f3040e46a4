"""``verl-fn``: the command line."""

from .main import main, parse, run

__all__ = ["main", "parse", "run"]
