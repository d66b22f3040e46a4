"""Losses: pure functions of outputs and batch."""
