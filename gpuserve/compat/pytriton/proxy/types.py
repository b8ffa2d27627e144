"""``Request`` and ``Response``."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

from gpuserve_worker.calling.request import Request

__all__ = ["Request", "Requests", "Response", "Responses"]


class Response(UserDict[str, Any]):
    """The outputs of one request by name; ``data`` is the dictionary."""


@dataclass
class Requests:
    """The requests that one call of a callable gets."""

    requests: list[Request]


@dataclass
class Responses:
    """The responses to them, in the same order."""

    responses: list[Response]
