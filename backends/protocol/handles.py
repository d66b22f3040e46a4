"""Values that lie elsewhere."""


class Freed(LookupError):
    """A handle stands for a value that its worker does not hold."""
