"""Optimizers, learning-rate schedules, and ``apply_update`` to apply an optimizer to a state."""
