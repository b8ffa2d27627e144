"""A process of ours becomes one of another environment: same number, same descriptors, other interpreter. So
what takes time, unpacking above all, is done by the process that needs it, and the supervisor waits for
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

from gpuserve.environments.interpreter import interpreter_of
from gpuserve.environments.lending import environment_of, lent_path
from gpuserve.environments.problem import EnvironmentProblem


def become(environment: str, module: str, arguments: Sequence[str]) -> NoReturn:
    """Run ``python -m module`` in place of this program, in an environment.

    Raises:
        EnvironmentProblem: that cannot be.
    """
    interpreter = interpreter_of(environment)
    variables = environment_of(interpreter, lent_path(interpreter))
    try:
        os.execve(interpreter, [interpreter, "-P", "-m", module, *arguments], variables)
    except OSError as error:
        raise EnvironmentProblem(f"the interpreter {interpreter} cannot be run: {error.strerror}") from error
