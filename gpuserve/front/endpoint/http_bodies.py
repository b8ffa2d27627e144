"""The JSON bodies of every HTTP endpoint but inference: metadata, health, repository index, errors.

Pure. What the values are is the service layer's to say; here they only get their written form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gpuserve.errors import InvalidArgument
from gpuserve.front.endpoint.http_json import compact, is_too_deep, loads
from gpuserve.front.endpoint.v2 import IndexEntry
from gpuserve_worker.tensor import TensorSpec

JSON_TYPE: Final = b"application/json"
_NOT_BOOLEAN: Final = "Invalid value for 'ready': expected a boolean"


def json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    """The headers of a response with one of these bodies."""
    return [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(body))]


def error_body(text: str, details: Mapping[str, Any] | None = None) -> bytes:
    """What every failed request is answered with; the text, and the details, are for the client."""
    return compact({"error": text, **(details or {})}).encode()


def live_body(live: bool) -> bytes:
    """The answer of ``/v2/health/live``."""
    return compact({"live": live}).encode()


def ready_body(ready: bool) -> bytes:
    """The answer of ``/v2/health/ready``."""
    return compact({"ready": ready}).encode()


def started_body(started: bool) -> bytes:
    """The answer of ``/v2/health/startup``."""
    return compact({"started": started}).encode()


def server_metadata_body(name: str, version: str, extensions: Sequence[str]) -> bytes:
    """The answer of ``/v2``."""
    return compact({"name": name, "version": version, "extensions": list(extensions)}).encode()


def model_metadata_body(
    name: str,
    versions: Sequence[str],
    platform: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
) -> bytes:
    """The answer of ``/v2/models/{m}``. Shapes are complete, a batch dimension included."""
    members = {
        "name": name,
        "versions": list(versions),
        "platform": platform,
        "inputs": [_tensor_metadata(one) for one in inputs],
        "outputs": [_tensor_metadata(one) for one in outputs],
    }
    return compact(members).encode()


def repository_index_body(entries: Iterable[IndexEntry]) -> bytes:
    """The answer of ``/v2/repository/index``: an array, one element a version."""
    return compact(
        [{key: value for key, value in entry._asdict().items() if value} for entry in entries]
    ).encode()


def parse_repository_index(body: bytes | memoryview) -> bool:
    """Whether only ready models are asked for; an empty body asks for all.

    Raises:
        InvalidArgument: malformed JSON, or ``ready`` is no boolean (however deep it nests).
    """
    text = bytes(body)
    if not text.strip():
        return False
    if is_too_deep(text):  # "ready" is the only member there is, so that is what nests
        raise InvalidArgument(_NOT_BOOLEAN)
    document = loads(text)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a repository index request must be a JSON object")
    ready = document.get("ready", False)
    if not isinstance(ready, bool):
        raise InvalidArgument(_NOT_BOOLEAN)
    return ready


def _tensor_metadata(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
