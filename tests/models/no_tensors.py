"""Models without inputs, without outputs, and without either."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuserve import Request
from gpuserve.decorators import batch


def answers(requests: list[Request]) -> list[dict[str, Any]]:
    """``y``: the parameter ``n`` of each request, and how many inputs it has."""
    return [{"y": np.array([[one.parameters.get("n", 0), len(one)]], np.int64)} for one in requests]


@batch
def answers_batch() -> dict[str, Any]:
    """``y``: 7, for a batch of one request."""
    return {"y": np.full((1, 2), 7, np.int64)}


def answers_alone(requests: list[Request]) -> list[dict[str, Any]]:
    """For a model that does not batch."""
    return [{"y": np.array([one.parameters.get("n", 0), len(requests)], np.int64)} for one in requests]


def takes(requests: list[Request]) -> list[dict[str, Any]]:
    """Nothing comes back."""
    return [{} for _ in requests]


@batch
def takes_batch(**inputs: Any) -> dict[str, Any]:
    """Nothing comes back."""
    return {}
