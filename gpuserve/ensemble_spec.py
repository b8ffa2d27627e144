"""The steps of an ensemble as a part of ``ModelSpec``: which models are asked, and which of their tensors are
which of the ensemble's. Plain values only. What must hold between them is in ``ensembles.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One model that an ensemble asks; version 0 is the latest.

    ``inputs`` and ``outputs`` are pairs: a tensor of that model, and the tensor of the ensemble that it is.
    Outputs that are not named are not asked for.
    """

    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @classmethod
    def from_wire(cls, plain: tuple[Any, ...]) -> StepSpec:
        """The inverse of ``dataclasses.astuple``."""
        model, version, inputs, outputs = plain
        return cls(model, version, _pairs(inputs), _pairs(outputs))


def _pairs(plain: tuple[Any, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((theirs, ours) for theirs, ours in plain)
