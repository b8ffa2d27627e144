"""``Request`` and ``Response`` at PyTriton's import path."""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING, Any, TypeAlias

from gpuserve.compat.pytriton.proxy.telemetry import traced_span
from gpuserve_worker.inference.inference_request import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "Request", "Requests", "Response", "Responses", "ResponsesNoneOrError", "ResponsesOrError", "Scope",
    "traced_span",
]  # fmt: skip


class Response(UserDict[str, "NDArray[Any]"]):
    """The outputs of one request by name; ``data`` is the dictionary itself."""

    def __init__(self, data: dict[str, NDArray[Any]]) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"Response(data={self.data!r})"


Requests: TypeAlias = list[Request]
Responses: TypeAlias = list[Response]
ResponsesOrError: TypeAlias = Responses | Exception
ResponsesNoneOrError: TypeAlias = Responses | Exception | None
Scope: TypeAlias = dict[str, Any]
