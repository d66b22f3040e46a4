"""Runs: their folders, the training loop, the journal, evaluation and replay."""
