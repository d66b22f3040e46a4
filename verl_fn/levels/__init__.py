"""Whether a model that Megatron-Bridge knows survives a real RL loop: the levels of ``verl-fn levels``.

``command`` runs Bridge's own tests and each level, every part in a process of its own with a log that stays.
``provenance`` and ``traps`` tell what is under test, and which failures say nothing about it. ``smoke`` has levels 0
and 3, ``resuming`` level 1, ``layouts`` level 2, ``features`` level 4 and ``learning`` level 5; ``parity`` compares
Megatron's model with transformers'. ``verdict`` holds the rules that make verdicts of checks, and ``report`` writes
them down.
"""
