"""The protobuf files of every gRPC service, as descriptors in a pool of their own. Those of health and
reflection are written down here: the packages that have them want a protobuf of their own.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)
from tritonclient.grpc import model_config_pb2, service_pb2

#: The versions of the reflection service; their messages are the same.
REFLECTION_PACKAGES: Final = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_REQUEST: Final = "ServerReflectionRequest"
_RESPONSE: Final = "ServerReflectionResponse"
_Proto: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {"string": _Proto.TYPE_STRING, "bytes": _Proto.TYPE_BYTES, "int32": _Proto.TYPE_INT32}

_Node: TypeAlias = dict[str, Any]


def _field(number: int, kind: str, name: str, **more: Any) -> _Node:
    """A field of a message. ``kind``: a scalar, or the name of a message or an enum of the same file."""
    type_ = {"type": _SCALARS[kind]} if kind in _SCALARS else {"type_name": kind}
    return {"number": number, "name": name, "label": _Proto.LABEL_OPTIONAL, **type_, **more}


def _repeated(number: int, kind: str, name: str) -> _Node:
    return _field(number, kind, name, label=_Proto.LABEL_REPEATED)


def _choice(number: int, kind: str, name: str) -> _Node:
    """A field of the only oneof of its message."""
    return _field(number, kind, name, oneof_index=0)


def _message(name: str, *fields: _Node, **more: Any) -> _Node:
    return {"name": name, "field": fields, **more}


def _method(name: str, request: str, response: str, **streams: bool) -> _Node:
    return {"name": name, "input_type": request, "output_type": response, **streams}


_REFLECTION: Final[_Node] = {
    "message_type": [
        _message(
            _REQUEST,
            _field(1, "string", "host"),
            _choice(3, "string", "file_by_filename"),
            _choice(4, "string", "file_containing_symbol"),
            _choice(5, "ExtensionRequest", "file_containing_extension"),
            _choice(6, "string", "all_extension_numbers_of_type"),
            _choice(7, "string", "list_services"),
            oneof_decl=[{"name": "message_request"}],
        ),
        _message(
            "ExtensionRequest",
            _field(1, "string", "containing_type"),
            _field(2, "int32", "extension_number"),
        ),
        _message(
            _RESPONSE,
            _field(1, "string", "valid_host"),
            _field(2, _REQUEST, "original_request"),
            _choice(4, "FileDescriptorResponse", "file_descriptor_response"),
            _choice(5, "ExtensionNumberResponse", "all_extension_numbers_response"),
            _choice(6, "ListServiceResponse", "list_services_response"),
            _choice(7, "ErrorResponse", "error_response"),
            oneof_decl=[{"name": "message_response"}],
        ),
        _message("FileDescriptorResponse", _repeated(1, "bytes", "file_descriptor_proto")),
        _message(
            "ExtensionNumberResponse",
            _field(1, "string", "base_type_name"),
            _repeated(2, "int32", "extension_number"),
        ),
        _message("ListServiceResponse", _repeated(1, "ServiceResponse", "service")),
        _message("ServiceResponse", _field(1, "string", "name")),
        _message("ErrorResponse", _field(1, "int32", "error_code"), _field(2, "string", "error_message")),
    ],
    "service": [
        {
            "name": "ServerReflection",
            "method": [
                _method(
                    "ServerReflectionInfo", _REQUEST, _RESPONSE, client_streaming=True, server_streaming=True
                )
            ],
        }
    ],
}
_STATES: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_SERVING_STATUS: Final = {
    "name": "ServingStatus",
    "value": [{"name": name, "number": number} for number, name in enumerate(_STATES)],
}
#: Of its methods only those that are served.
_HEALTH: Final[_Node] = {
    "message_type": [
        _message("HealthCheckRequest", _field(1, "string", "service")),
        _message("HealthCheckResponse", _field(1, "ServingStatus", "status"), enum_type=[_SERVING_STATUS]),
    ],
    "service": [
        {
            "name": "Health",
            "method": [
                _method("Check", "HealthCheckRequest", "HealthCheckResponse"),
                _method("Watch", "HealthCheckRequest", "HealthCheckResponse", server_streaming=True),
            ],
        }
    ],
}


class Schema(NamedTuple):
    """Every file, by ``pool``, the full names of the services in them, and the reflection messages."""

    pool: Any
    services: tuple[str, ...]

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def reflection_messages(self, package: str) -> tuple[Any, Any]:
        return self.message(f"{package}.{_REQUEST}"), self.message(f"{package}.{_RESPONSE}")


@functools.cache
def schema() -> Schema:
    """The one schema of the process, made when it is first asked for."""
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    generated = (model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR)  # each after what it imports
    written = [_file("grpc.health.v1", "health", _HEALTH)]
    written += [_file(package, "reflection", _REFLECTION) for package in REFLECTION_PACKAGES]
    for data in [one.serialized_pb for one in generated] + [one.SerializeToString() for one in written]:
        file = pool.AddSerializedFile(data)
        names += [service.full_name for service in file.services_by_name.values()]
    return Schema(pool, tuple(sorted(names)))


def _file(package: str, name: str, content: _Node) -> Any:
    path = f"{package.replace('.', '/')}/{name}.proto"
    return descriptor_pb2.FileDescriptorProto(name=path, package=package, syntax="proto3", **content)
