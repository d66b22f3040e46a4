"""Tells mypy that ``@node`` and ``@named`` make frozen attrs classes, whose ``attrs.evolve`` it then checks."""

from mypy.plugin import Plugin
from mypy.plugins.attrs import attr_attrib_makers, attr_frozen_makers

attr_frozen_makers |= {"verl_fn.state.node.node", "verl_fn.state.node.named"}
attr_attrib_makers |= {"verl_fn.state.node.static"}


def plugin(version: str) -> type[Plugin]:
    """Returns a plugin without hooks of its own; importing this file has already extended the hooks for attrs."""
    return Plugin
