"""The number of ingress processes of the servers under test: ``TEST_INGRESS``, else one.

Servers that a command starts get the number by the environment variable of the setting; a flag overrides it.
"""

from __future__ import annotations

import os
from typing import Final

INGRESS_PROCESSES: Final = int(os.environ.get("TEST_INGRESS", "1"))
_VARIABLE: Final = "GPUSERVE_SERVER__INGRESS_PROCESSES"


def set_environment() -> None:
    """Set the number for servers that commands start from now on."""
    if INGRESS_PROCESSES > 1:
        os.environ[_VARIABLE] = str(INGRESS_PROCESSES)


#: Flags of a server whose limits are tested exactly: each of several ingress processes has a part of a limit.
ONE: Final = ("--ingress-processes", "1")


def with_ingress(gauge: str) -> tuple[str, ...]:
    """Return the names of a gauge of memory that requests hold, in the front and in the ingress processes."""
    return gauge, gauge.replace("gpuserve_arena", "gpuserve_door_arena")


def flags_of(transport: str) -> tuple[str, ...]:
    """Return the flags of a command whose transport cannot have several ingress processes."""
    return ONE if transport == "grpcio" else ()
