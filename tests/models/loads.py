"""Targets of every sort that an import path can lead to."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpuserve.decorators import batch

number = 3


class Scale:
    def __init__(self, factor: float, device: str) -> None:
        self.factor, self.device = factor, device

    def __call__(self, requests: Any) -> Any:
        names = np.full((1, 1), self.factor, np.float32)
        return [{"y": names, "device": np.array([[self.device]])} for _ in requests]

    def method(self, requests: Any) -> Any:
        return self(requests)


class Nothing:
    """An instance of it cannot be called."""


scale = Scale(4.0, "none")


def make(factor: float = 1.0, device: str = "") -> Any:
    return Scale(factor, device).method


def make_number(device: str) -> Any:
    return number


def plain(requests: Any, device: str = "") -> Any:
    return requests


@batch
def takes_device_input(device: Any) -> Any:
    return [device]


def make_failing(device: str) -> Any:
    raise RuntimeError(f"no weights for {device}")


def make_exit(device: str) -> Any:
    sys.exit(5)


async def coroutine(requests: Any) -> Any:
    return requests


def generator(requests: Any) -> Any:
    yield requests
