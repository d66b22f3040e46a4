"""Whether a model that Megatron-Bridge knows survives a real RL loop: the levels of ``verl-fn levels``.

``command`` runs Bridge's own tests and each level, every part in a process of its own (``worker``) with a log that
stays. ``provenance`` tells what is under test. ``training`` has levels 0, 1, 3 and 5, ``parity`` level 2 and the
model beside transformers', ``levels`` level 4 and the table of all. ``verdict`` makes verdicts of checks and knows
failures that say nothing about the model, and ``report`` writes them down.
"""
