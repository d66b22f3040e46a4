"""A run: its folder, its loop, its journal, and its evaluation and replay."""
