"""The models as this server runs them: one inference callable for each behaviour of ``model_table``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuserve import Request, errors
from gpuserve.decorators import batch, sample

_SUMS: dict[int, int] = {}
_FAILURES = (
    *(errors.InvalidArgument, errors.NotFound, errors.Unavailable),
    *(errors.Unimplemented, errors.Internal, errors.Cancelled),
)


def echo(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"y": one["x"]} for one in requests]


@batch
def add_sub(INPUT0: Any, INPUT1: Any) -> dict[str, Any]:
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


def optional(requests: list[Request]) -> list[dict[str, Any]]:
    return [
        {
            "sum": sum(one.values()),
            "given": np.array([[",".join(one).encode()]] * len(one["a"]), dtype=object),
        }
        for one in requests
    ]


@sample
def fails(x: Any) -> dict[str, Any]:
    which = int(x[0])
    if which == len(_FAILURES):
        raise ValueError("the model raised")
    if which < len(_FAILURES):
        raise _FAILURES[which]("the model refused")
    return {"y": np.zeros(1, np.int32)}


def parameters(requests: list[Request]) -> list[dict[str, Any]]:
    return [
        {"seen": np.array([json.dumps(one.parameters, sort_keys=True).encode()], dtype=object)}
        for one in requests
    ]


@batch
def shout(PROMPT: Any) -> dict[str, Any]:
    return {"TEXT": np.array([[one.upper() for one in row] for row in PROMPT], dtype=object)}


def accumulate(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"OUTPUT": np.array([[_add(one)]], np.int32)} for one in requests]


def _add(request: Request) -> int:
    sequence = int(request["CORRID"][0, 0])
    if request["START"][0, 0]:
        _SUMS[sequence] = 0
    _SUMS[sequence] = _SUMS.get(sequence, 0) + int(request["INPUT"][0, 0])
    return _SUMS[sequence]


def repeat(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    for number in range(int(requests[0]["count"][0])):
        yield [{"number": np.array([number], np.int32)}]


def text(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    request = requests[0]
    count = int(request["COUNT"][0]) if "COUNT" in request else 1
    for _ in range(count):
        yield [{"TEXT": request["PROMPT"]}]
