"""The interpreter of environment processes, which may have other packages than the trainer's."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from verl_fn.errors import UserError

OLDEST = (3, 11)
START_SECONDS = 60.0
OF_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that describe the trainer's interpreter, and would lead another one to the trainer's packages."""


class EnvError(UserError, RuntimeError):
    """Raised where an environment cannot be used; the message names it and the problem."""


def check_interpreter(python: str) -> None:
    """Checks that a program is an interpreter that can run environments.

    Args:
        python: its path.

    Raises:
        EnvError: it cannot be run, or it is no Python of a version that is new enough.

    Example:
        >>> check_interpreter("/no/such/python")
        Traceback (most recent call last):
        verl_fn.environments.interpreter.EnvError: env.python: /no/such/python cannot be run (No such file or
        directory); set it to the interpreter of a virtual environment, such as .venv-env/bin/python
    """
    advice = "set it to the interpreter of a virtual environment, such as .venv-env/bin/python"
    # This runs in any version of Python, so that one that is too old is named.
    command = [python, "-c", "import sys; print('%d %d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise EnvError(f"env.python: {python} did not start within {START_SECONDS:g} s; {advice}") from None
    except (OSError, ValueError) as error:
        raise EnvError(
            f"env.python: {python} cannot be run ({getattr(error, 'strerror', error)}); {advice}"
        ) from error
    numbers = done.stdout.split()
    if done.returncode or len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise EnvError(f"env.python: {python} is no Python interpreter; {advice}")
    version = tuple(map(int, numbers))
    if version < OLDEST:
        raise EnvError(
            f"env.python: {python} is Python {version[0]}.{version[1]}, and environments need Python "
            f"{OLDEST[0]}.{OLDEST[1]} or later; make the virtual environment with a later one"
        )


def variables_of_its_own(variables: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Returns environment variables without those of the trainer's interpreter.

    Args:
        variables: all variables of the processes.
        names: those that the user names, which are kept.

    Example:
        >>> variables_of_its_own({"HOME": "/h", "PYTHONPATH": "/a", "VIRTUAL_ENV": "/b"}, ["PYTHONPATH"])
        {'HOME': '/h', 'PYTHONPATH': '/a'}
    """
    return {name: value for name, value in variables.items() if name in names or name not in OF_INTERPRETER}
