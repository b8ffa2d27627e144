"""What is asked of the models in ``served/``, and what they have to answer. Numbers tell requests apart."""

from __future__ import annotations

from typing import Final

from benchmarks.rollout.served.models import N_PARTS

#: Before each response of a stream.
PAUSE_S: Final = 0.02
_EXACT: Final = 1 << 20


def value(number: int) -> float:
    """The input of a request: an integer that float32 and its products here hold exactly."""
    return float(1 + number % _EXACT)


def parts(number: int) -> list[float]:
    """The responses of the model that counts."""
    return [value(number) * times for times in range(1, N_PARTS + 1)]
