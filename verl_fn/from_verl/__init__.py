"""Translation of verl's Hydra configs and command lines (verl 0.9) into configs of this project."""

from .reading import Settings, read_settings
from .translate import Translation, translate

__all__ = ["Settings", "Translation", "read_settings", "translate"]
