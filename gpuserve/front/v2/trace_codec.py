"""The trace settings as JSON and as ``TraceSetting`` messages: lists of texts, None: taken back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.json_values import compact, loads, typed
from gpuserve.front.v2.limits import check_entries

#: The one setting that is a list in JSON; any other is a string.
_LEVEL: Final = "trace_level"


def parse_json(body: bytes) -> dict[str, list[str] | None]:
    """What a body changes, or InvalidArgument; null takes a setting back."""
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a trace setting request must be a JSON object")
    check_entries("settings", document)
    return {name: None if value is None else _texts(name, value) for name, value in document.items()}


def json_body(settings: Mapping[str, Sequence[str]]) -> bytes:
    return compact({name: texts if name == _LEVEL else texts[0] for name, texts in settings.items()}).encode()


def parse_message(request: Any) -> dict[str, list[str] | None]:
    """What a ``TraceSettingRequest`` changes; a setting without a value is taken back."""
    check_entries("settings", request.settings)
    for one in request.settings.values():
        check_entries("values of a setting", one.value)
    return {name: list(one.value) or None for name, one in request.settings.items()}


def message(settings: Mapping[str, Sequence[str]]) -> Any:
    response = pb.TraceSettingResponse()
    for name, texts in settings.items():
        response.settings[name].value.extend(texts)
    return response


def _texts(name: str, value: Any) -> list[str]:
    if name == _LEVEL:
        check_entries("values of a setting", value if isinstance(value, list) else ())
        return [typed(one, str, f"'{name}'") for one in typed(value, list, f"'{name}'")]
    return [typed(value, str, f"'{name}'")]
