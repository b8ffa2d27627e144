"""Gives its inputs back, in each of the ways a callable may."""

from __future__ import annotations

from typing import Any

from gpuserve.decorators import batch, sample


def raw(requests: Any) -> Any:
    return requests


@batch
def batched(**inputs: Any) -> Any:
    return list(inputs.values())


@sample
def single(**inputs: Any) -> Any:
    return inputs


def listed(requests: Any) -> Any:
    return [dict(request) for request in requests]


class Echo:
    @batch
    def __call__(self, **inputs: Any) -> Any:
        return list(inputs.values())
