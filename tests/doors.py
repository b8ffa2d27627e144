"""How many doors the servers of the tests have: ``TEST_DOORS``, else one.

Those that a command starts are told by the variable of their setting; a flag may say otherwise.
"""

from __future__ import annotations

import os
from typing import Final

DOORS: Final = int(os.environ.get("TEST_DOORS", "1"))
_VARIABLE: Final = "GPUSERVE_SERVER__DOORS"


def tell_commands() -> None:
    """Have the servers that commands start from now on have as many."""
    if DOORS > 1:
        os.environ[_VARIABLE] = str(DOORS)


#: For a server whose limits are looked at one by one: each of several doors has a part of them.
ONE: Final = ("--ingress-processes", "1")


def with_doors(gauge: str) -> tuple[str, ...]:
    """The names of a gauge of what requests hold, in the front and in the doors."""
    return gauge, gauge.replace("gpuserve_arena", "gpuserve_door_arena")


def flags_of(transport: str) -> tuple[str, ...]:
    """What a command needs besides where its transport cannot have several."""
    return ONE if transport == "grpcio" else ()
