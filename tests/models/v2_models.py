"""Models for the end-to-end tests of the protocol; ``tests/e2e/conftest.py`` says how each is declared."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from gpuserve import Request
from gpuserve.decorators import batch

_recorded: list[str] = []


@batch
def echo(x: Any) -> dict[str, Any]:
    """``x`` comes back as ``y``."""
    return {"y": x}


def complains(x: Any) -> dict[str, Any]:
    """Fails with a long text that few characters of are ASCII."""
    raise ValueError("größer als möglich: 大きすぎる 🙂 " * 400)


def echo_list(requests: list[Request]) -> list[Request]:
    """Each request stands for its data; outputs go by position."""
    return requests


def optional(requests: list[Request]) -> list[dict[str, Any]]:
    """``sum``: the inputs that came; ``given``: their names, sorted."""
    return [
        {
            "sum": sum(one.values()),
            "given": np.array([[",".join(sorted(one)).encode()]] * len(one["a"]), dtype=object),
        }
        for one in requests
    ]


def parameters(requests: list[Request]) -> list[dict[str, Any]]:
    """``seen``: the request's parameters and requested outputs, as text."""
    return [
        {
            "seen": np.array([[repr(sorted(one.parameters.items())).encode()]], dtype=object),
            "wanted": np.array([[repr(one.requested_output_names).encode()]], dtype=object),
        }
        for one in requests
    ]


@batch
def batch_rows(x: Any) -> dict[str, Any]:
    """``rows``: how many rows the batch had, in each of them; ``y``: ``x`` again."""
    return {"rows": np.full((len(x), 1), len(x), dtype=np.int32), "y": x}


class Gate:
    """Runs a batch only when a byte can be read from the FIFO at ``path``, and remembers what it ran.

    ``x`` identifies a request; 0 is not gated and answers the identities that ran so far. A batch with a
    negative one raises.
    """

    def __init__(self, path: str) -> None:
        self._gate = os.open(path, os.O_RDWR)
        self._seen: list[int] = []
        self._lock = threading.Lock()

    @batch
    def __call__(self, x: Any) -> dict[str, Any]:
        with self._lock:
            if x[0, 0] == 0:
                text = ",".join(map(str, self._seen)).encode()
                return {"seen": np.array([[text]] * len(x), dtype=object)}
            self._seen += x[:, 0].tolist()
            os.read(self._gate, 1)
            if (x < 0).any():
                raise ValueError(f"{x.min()} is negative, says {__file__}")
            return {"seen": np.array([[b""]] * len(x), dtype=object)}
