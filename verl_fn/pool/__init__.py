"""Worker processes that run code of the user: reward functions and environments.

``pool`` is the trainer's side: it starts workers, gives them calls, ends and replaces them. A worker runs
``keeper``, ``worker``, and ``scoring`` for reward functions or ``playing`` for environments. Its interpreter may have
no packages, so these modules import only the standard library, and numpy if there is one.
"""
