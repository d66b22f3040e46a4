"""Hugging Face models as functions of packed rows and of parameters by name."""
