"""Endpoints of the HTTP port that another folder answers, with errors in a form of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from gpuserve.core.errors import RequestError
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.routes import Refusal
from gpuserve.front.doors.http.answers import HttpAnswer, failure, forbidden, refused
from gpuserve.front.doors.http.control import Awaiting, Immediate


class ErrorForm(NamedTuple):
    """How errors are told: a request failed, leads nowhere, or is not allowed."""

    failure: Callable[[RequestError], HttpAnswer]
    refused: Callable[[Refusal], HttpAnswer]
    forbidden: Callable[[RequestError], HttpAnswer]


class Family(NamedTuple):
    """All endpoints below one prefix."""

    prefix: bytes
    errors: ErrorForm
    immediate: Mapping[Endpoint, Immediate]
    awaiting: Mapping[Endpoint, Awaiting]


#: How v2 tells errors.
V2_ERRORS: Final = ErrorForm(failure, refused, forbidden)
NO_FAMILY: Final = Family(b"", V2_ERRORS, {}, {})
