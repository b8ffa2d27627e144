"""Raises, for a whole batch or for one of its requests."""

from __future__ import annotations

from typing import Any


def always(requests: Any) -> Any:
    raise ValueError("the weights in '/secret/dir with space/weights.bin' are spoiled\nand a second line")


def negative(requests: Any) -> Any:
    """One answer for each request; an exception object for those with a negative element."""
    return [
        ValueError(f"{request['x'].min():g} is negative") if (request["x"] < 0).any() else {"y": request["x"]}
        for request in requests
    ]


def half_a_pair(requests: Any) -> Any:
    """Names a file whose name is not UTF-8, as a callable may do with what a client sent."""
    raise ValueError("there is no " + b"caf\xe9".decode("utf-8", "surrogateescape"))
