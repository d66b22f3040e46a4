"""Environments: classes of the user that answer the policy, so that a response becomes a conversation.

This package is imported by the processes that run environments, so it loads neither torch nor any part of an engine.
"""

from .contract import Done, Environment, Message

__all__ = ["Done", "Environment", "Message"]
