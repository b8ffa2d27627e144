"""``Request`` and ``Response``."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

from gpuserve_worker.request import Request

__all__ = ["Request", "Requests", "Response", "Responses"]


class Response(UserDict[str, Any]):
    """The outputs of one request by name; ``data`` is the dictionary."""


@dataclass
class Requests:
    """The requests of one call."""

    requests: list[Request]


@dataclass
class Responses:
    """The responses to them, in the same order."""

    responses: list[Response]
