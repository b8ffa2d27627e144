"""What a case is made of: requests as the bytes that are sent, and the shared memory that they speak of.

Values only; ``wire`` sends them. The functions at the end build the common ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

Metadata = tuple[tuple[str, str], ...]
#: Which port an HTTP request goes to.
HTTP, METRICS = "http", "metrics"


@dataclass(frozen=True, slots=True)
class HttpStep:
    """A request of HTTP/1.1, as it goes over the socket."""

    raw: bytes
    port: str = HTTP


@dataclass(frozen=True, slots=True)
class UnaryStep:
    """One call of ``inference.GRPCInferenceService`` or, with a slash in ``method``, of another service."""

    method: str
    message: bytes
    metadata: Metadata = ()
    compression: str = ""


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One ModelStreamInfer: all messages are sent, then the client's half is closed."""

    messages: tuple[bytes, ...]
    metadata: Metadata = ()


Step = HttpStep | UnaryStep | StreamStep


@dataclass(frozen=True, slots=True)
class Region:
    """System shared memory, made before the steps and read after them. ``key`` begins with a slash."""

    key: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Case:
    """Steps whose answers are compared. ``ignore`` names fields that differ by nature."""

    name: str
    steps: tuple[Step, ...]
    ignore: frozenset[str] = frozenset()
    regions: tuple[Region, ...] = ()


def http(method: str, path: str, body: bytes = b"", port: str = HTTP, **headers: str) -> HttpStep:
    """A whole request; header names get dashes for underscores, and Content-Length is told with a body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if (body or method == "POST") and "transfer_encoding" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return HttpStep("\r\n".join([*lines, "", ""]).encode() + body, port)


def get(path: str, **headers: str) -> HttpStep:
    """A GET."""
    return http("GET", path, **headers)


def post(path: str, document: Any = b"", **headers: str) -> HttpStep:
    """A POST of bytes, or of what becomes JSON."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return http("POST", path, body, **headers)


def call(
    method: str, message: Message | bytes = b"", metadata: Metadata = (), compression: str = ""
) -> UnaryStep:
    """A unary call."""
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    return UnaryStep(method, raw, metadata, compression)


def stream(*messages: Message, metadata: Metadata = ()) -> StreamStep:
    """A stream of these requests."""
    return StreamStep(tuple(one.SerializeToString() for one in messages), metadata)


def case(
    name: str, *steps: Step, ignore: Sequence[str] = (), regions: Mapping[str, bytes] | None = None
) -> Case:
    """A case; ``regions`` is content by key."""
    made = tuple(Region(key, content) for key, content in (regions or {}).items())
    return Case(name, steps, frozenset(ignore), made)
