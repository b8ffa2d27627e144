"""What is kept of an answer: a tree of plain values, the same for both servers. Pure.

Left out is what belongs to the connection (Date, Server, chunks) and not to the protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2

#: A JSON object as its pairs, in order: a name that comes twice, and the order, are seen.
Pairs = tuple[tuple[str, Any], ...]
_KEPT_HEADERS = ("content-type", "content-encoding", "accept-encoding", "allow")
_HEADER_LENGTH = "inference-header-content-length"
_RESPONSES = {"ModelStreamInfer": "ModelStreamInferResponse"}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response of HTTP; header names are lower-case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class GrpcAnswer:
    """What a call of ``path`` came to: the status, and the messages that came before it."""

    path: str
    code: str
    details: str
    messages: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The connection ended, or the time did, without a response."""

    why: str


Answer = HttpAnswer | GrpcAnswer | NoAnswer


def tree(answer: Answer) -> dict[str, Any]:
    """The answer as values that can be compared. Texts for people are under the key ``text``."""
    match answer:
        case HttpAnswer():
            return _http_tree(answer)
        case GrpcAnswer():
            return _grpc_tree(answer)
        case NoAnswer():
            return {"no answer": answer.why}


def _http_tree(answer: HttpAnswer) -> dict[str, Any]:
    headers = {name: answer.headers[name] for name in _KEPT_HEADERS if name in answer.headers}
    if answer.status != 200 or not answer.body:
        headers.pop("content-type", None)  # Triton gives those of errors at random
    found: dict[str, Any] = {"status": answer.status, "headers": headers}
    if _HEADER_LENGTH in answer.headers:
        length = int(answer.headers[_HEADER_LENGTH])
        return found | {"body": _json(answer.body[:length]), "binary": answer.body[length:].hex()}
    if headers.get("content-encoding") in {"gzip", "deflate"}:
        return found | {"body": _json(_decompressed(answer.body, headers["content-encoding"]))}
    if answer.body.startswith(b"# HELP"):
        return found | {"metrics": _metric_names(answer.body.decode())}
    if headers.get("content-type", "").startswith("text/event-stream"):
        return found | {"events": [_event(one) for one in answer.body.decode().split("\n\n")]}
    return found | _body(answer.body)


def _body(body: bytes) -> dict[str, Any]:
    parsed = _json(body)
    match parsed:
        case (("error", str(text)),):
            return {"body": "error", "text": text}
    return {"body": parsed}


def _event(event: str) -> Any:
    if not event.startswith("data: "):
        return event
    return _body(event.removeprefix("data: ").encode())


def _json(body: bytes) -> Any:
    try:
        return json.loads(body, object_pairs_hook=_pairs, parse_constant=str)
    except ValueError:
        return body.decode("latin-1")


def _pairs(found: Sequence[tuple[str, Any]]) -> Pairs:
    return tuple(found)


def _decompressed(body: bytes, encoding: str) -> bytes:
    import gzip
    import zlib

    return gzip.decompress(body) if encoding == "gzip" else zlib.decompress(body)


def _metric_names(page: str) -> dict[str, str]:
    """Type by name, of Triton's names only; values and our own names are not compared."""
    return dict(re.findall(r"^# TYPE (nv_\w+) (\w+)$", page, re.MULTILINE))


def _grpc_tree(answer: GrpcAnswer) -> dict[str, Any]:
    found: dict[str, Any] = {"code": answer.code, "text": answer.details}
    service, _, method = answer.path.removeprefix("/").partition("/")
    response_type = getattr(service_pb2, _RESPONSES.get(method, f"{method}Response"), None)
    if service != "inference.GRPCInferenceService" or response_type is None:
        return found | {"messages": [one.hex() for one in answer.messages]}
    return found | {"messages": [_message(response_type.FromString(one)) for one in answer.messages]}


def _message(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    if text := found.pop("error_message", ""):
        found |= {"body": "error", "text": text}
    return found
