"""Temperatures in other units; the models of the three programs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuserve import Tensor
from gpuserve.decorators import batch

TEMPERATURE = Tensor(name="temperature", shape=(1,), dtype=np.float64)


@batch
def to_fahrenheit(temperature: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """``temperature``: in °C, float64 [rows, 1]. Answers ``temperature`` in °F."""
    return {"temperature": temperature * 9 / 5 + 32}


@batch
def to_kelvin(temperature: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """``temperature``: in °C, float64 [rows, 1]. Answers ``temperature`` in K."""
    return {"temperature": temperature + 273.15}


@batch
def to_rankine(temperature: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """``temperature``: in °C, float64 [rows, 1]. Answers ``temperature`` in °R."""
    return {"temperature": (temperature + 273.15) * 9 / 5}
