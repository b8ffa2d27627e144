"""How many doors a server may have: what ``auto`` stands for, and what keeps it from having so many."""

from __future__ import annotations

import resource
from typing import Any, Final

from gpuserve.settings.processors import n_processors

AUTO: Final = "auto"
#: Beside so many processors one door keeps a scheduler busy; more than eight doors have been of no use.
_PROCESSORS_OF_DOOR: Final = 4
_MOST_BY_ITSELF: Final = 8
#: Descriptors that a front keeps for each of its doors: its passage, its process, and memory of its requests.
DESCRIPTORS_OF_DOOR: Final = 64


def read_doors(value: Any) -> Any:
    """The number that ``auto`` stands for here; anything else as it is."""
    return doors_of(n_processors()) if value == AUTO else value


def doors_of(processors: float) -> int:
    """What ``auto`` stands for beside so many processors."""
    return max(1, min(_MOST_BY_ITSELF, int(processors // _PROCESSORS_OF_DOOR)))


def doors_problem(doors: Any, transport: Any) -> str | None:
    """Why a server cannot have so many doors; None where it can, or where they are no number."""
    doors = read_doors(doors)
    if not isinstance(doors, int) or doors <= 1:
        return None
    if transport == "grpcio":
        return f"doors: transport grpcio has its connections in the front, expected 1, got {doors}"
    _, most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, most_descriptors // DESCRIPTORS_OF_DOOR)
    if most_descriptors != resource.RLIM_INFINITY and doors > most:
        return (
            f"doors: a process may have {most_descriptors} open files (RLIMIT_NOFILE), of which each door "
            f"takes {DESCRIPTORS_OF_DOOR}: expected at most {most}, got {doors}"
        )
    return None
