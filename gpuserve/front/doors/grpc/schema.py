"""The protobuf files of every gRPC service, as descriptors in a pool of their own. Nothing is served here.

The inference service has generated modules. Health and reflection have none: three small files that gRPC
fixed long ago are written down below. The packages that have them want a protobuf of their own, and none
has reflection's v1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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


class _Field(NamedTuple):
    """A field of a message. ``kind``: a scalar, or the name of a message of the same file."""

    number: int
    kind: str
    name: str
    repeated: bool = False


class _Message(NamedTuple):
    """A message; the fields of ``choice`` are one oneof, of that name."""

    name: str
    fields: tuple[_Field, ...]
    choice: str = ""
    choices: tuple[_Field, ...] = ()


class _Method(NamedTuple):
    """A method of a service, and which of its ends is a stream."""

    name: str
    request: str
    response: str
    streams_requests: bool
    streams_responses: bool


_REFLECTION_MESSAGES: Final = (
    _Message(
        _REQUEST,
        (_Field(1, "string", "host"),),
        "message_request",
        (
            _Field(3, "string", "file_by_filename"),
            _Field(4, "string", "file_containing_symbol"),
            _Field(5, "ExtensionRequest", "file_containing_extension"),
            _Field(6, "string", "all_extension_numbers_of_type"),
            _Field(7, "string", "list_services"),
        ),
    ),
    _Message(
        "ExtensionRequest", (_Field(1, "string", "containing_type"), _Field(2, "int32", "extension_number"))
    ),
    _Message(
        _RESPONSE,
        (_Field(1, "string", "valid_host"), _Field(2, _REQUEST, "original_request")),
        "message_response",
        (
            _Field(4, "FileDescriptorResponse", "file_descriptor_response"),
            _Field(5, "ExtensionNumberResponse", "all_extension_numbers_response"),
            _Field(6, "ListServiceResponse", "list_services_response"),
            _Field(7, "ErrorResponse", "error_response"),
        ),
    ),
    _Message("FileDescriptorResponse", (_Field(1, "bytes", "file_descriptor_proto", True),)),
    _Message(
        "ExtensionNumberResponse",
        (_Field(1, "string", "base_type_name"), _Field(2, "int32", "extension_number", True)),
    ),
    _Message("ListServiceResponse", (_Field(1, "ServiceResponse", "service", True),)),
    _Message("ServiceResponse", (_Field(1, "string", "name"),)),
    _Message("ErrorResponse", (_Field(1, "int32", "error_code"), _Field(2, "string", "error_message"))),
)
_REFLECTION_METHOD: Final = _Method("ServerReflectionInfo", _REQUEST, _RESPONSE, True, True)
#: Only the methods that are served.
_HEALTH_METHODS: Final = (
    _Method("Check", "HealthCheckRequest", "HealthCheckResponse", False, False),
    _Method("Watch", "HealthCheckRequest", "HealthCheckResponse", False, True),
)
_SERVING_STATUS: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


class Schema(NamedTuple):
    """Every file, by ``pool``, the full names of the services in them, and the reflection messages."""

    pool: Any
    services: tuple[str, ...]

    def reflection_messages(self, package: str) -> tuple[Any, Any]:
        """The classes of the request and the response of a reflection service."""
        found = [self.pool.FindMessageTypeByName(f"{package}.{name}") for name in (_REQUEST, _RESPONSE)]
        return message_factory.GetMessageClass(found[0]), message_factory.GetMessageClass(found[1])


@functools.cache
def schema() -> Schema:
    """The one schema of the process, made when it is first asked for."""
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    generated = (model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR)  # each after what it imports
    written = (_health(), *map(_reflection, REFLECTION_PACKAGES))
    for data in [one.serialized_pb for one in generated] + [one.SerializeToString() for one in written]:
        file = pool.AddSerializedFile(data)
        names += [service.full_name for service in file.services_by_name.values()]
    return Schema(pool, tuple(sorted(names)))


def _reflection(package: str) -> Any:
    file = _file(package, "reflection")
    for message in _REFLECTION_MESSAGES:
        _add_message(file, message)
    _add_service(file, "ServerReflection", (_REFLECTION_METHOD,))
    return file


def _health() -> Any:
    file = _file("grpc.health.v1", "health")
    _add_message(file, _Message("HealthCheckRequest", (_Field(1, "string", "service"),)))
    response = file.message_type.add(name="HealthCheckResponse")
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(_SERVING_STATUS):
        status.value.add(name=name, number=number)
    response.field.add(
        name="status",
        number=1,
        label=_Proto.LABEL_OPTIONAL,
        type=_Proto.TYPE_ENUM,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )
    _add_service(file, "Health", _HEALTH_METHODS)
    return file


def _file(package: str, name: str) -> Any:
    path = f"{package.replace('.', '/')}/{name}.proto"
    return descriptor_pb2.FileDescriptorProto(name=path, package=package, syntax="proto3")


def _add_message(file: Any, message: _Message) -> None:
    added = file.message_type.add(name=message.name)
    for field in message.fields:
        _add_field(added, file.package, field)
    if message.choice:
        added.oneof_decl.add(name=message.choice)
    for field in message.choices:
        _add_field(added, file.package, field).oneof_index = 0


def _add_field(message: Any, package: str, field: _Field) -> Any:
    label = _Proto.LABEL_REPEATED if field.repeated else _Proto.LABEL_OPTIONAL
    added = message.field.add(name=field.name, number=field.number, label=label)
    if field.kind in _SCALARS:
        added.type = _SCALARS[field.kind]
    else:
        added.type = _Proto.TYPE_MESSAGE
        added.type_name = f".{package}.{field.kind}"
    return added


def _add_service(file: Any, name: str, methods: Sequence[_Method]) -> None:
    service = file.service.add(name=name)
    for method in methods:
        service.method.add(
            name=method.name,
            input_type=f".{file.package}.{method.request}",
            output_type=f".{file.package}.{method.response}",
            client_streaming=method.streams_requests,
            server_streaming=method.streams_responses,
        )
