"""Parameters that a ``model.py`` gives a request or a response: checked by what every protocol can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpuserve.python_backend.errors import TritonModelException
from gpuserve_worker.calling.response import PARAMETER, is_parameter


def checked_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters; ``TritonModelException``: one cannot be carried."""
    given = dict(parameters or {})
    for key, value in given.items():
        if not isinstance(key, str) or not is_parameter(value):
            raise TritonModelException(
                f"parameter {key!r} is of type {type(value).__name__}: expected {PARAMETER}, by a name that "
                "is a str"
            )
    return given


def as_json(parameters: Mapping[str, Any] | None) -> str:
    return json.dumps(parameters) if parameters else "{}"
