"""What the server of warm processes imports for environments of the package verifiers."""

import datasets  # noqa: F401
import verifiers

# The package imports these, and the clients of several services, when they are first used.
_ = verifiers.Rubric, verifiers.ToolEnv
