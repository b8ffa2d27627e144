"""The OpenAPI document: every endpoint of the HTTP door, and each loaded model with bodies that fit it. Pure.

The endpoints are described in ``openapi_operations``, their bodies in ``openapi_schemas``. Names of models,
tensors and the server are data of the document like any other: whoever shows them has to escape them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

from gpuserve.front.endpoint import openapi_examples as examples
from gpuserve.front.endpoint.http_json import compact
from gpuserve.front.endpoint.openapi_admin import ADMIN_OPERATIONS, ADMIN_SCHEMAS
from gpuserve.front.endpoint.openapi_operations import (
    BINARY,
    EVENTS,
    JSON,
    MODEL,
    OPERATIONS,
    Operation,
)
from gpuserve.front.endpoint.openapi_schemas import SCHEMAS, Schema, reference
from gpuserve.front.endpoint.routes import Endpoint
from gpuserve.settings import TOKEN_HEADER
from gpuserve.spec import ModelSpec

OPENAPI_VERSION: Final = "3.1.0"
#: What an example leaves empty, by input; a member of ours, which other readers pass over.
LEFT_OUT: Final = "x-left-out"
_HEADER_LENGTH: Final[Schema] = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Where binary tensors follow the JSON: how many bytes the JSON is.",
    "schema": {"type": "integer", "minimum": 0},
}
_VARIABLE: Final = re.compile(r"\{(\w+)\}")
_FAILED: Final[Schema] = {"$ref": "#/components/responses/Failed"}
#: The endpoints that are described once more for each model.
_RUNS: Final = (Endpoint.MODEL_INFER, Endpoint.MODEL_GENERATE, Endpoint.MODEL_GENERATE_STREAM)


class Description:
    """The document of one server as JSON, made anew where its models are not those of the last time."""

    def __init__(self, server_name: str, server_version: str, *, admin: bool = False) -> None:
        self._server = server_name, server_version
        self._admin = admin
        self._specs: list[ModelSpec] = []
        self._body = b""

    def body(self, specs: Iterable[ModelSpec]) -> bytes:
        """The document with these models."""
        given = list(specs)
        if not self._body or list(map(id, given)) != list(map(id, self._specs)):
            self._specs = given
            self._body = compact(document(*self._server, given, admin=self._admin)).encode()
        return self._body


def document(
    server_name: str, server_version: str, specs: Iterable[ModelSpec], *, admin: bool = False
) -> dict[str, Any]:
    """The OpenAPI document of a server with these models, and with the admin API where it has one."""
    models = sorted(specs, key=lambda spec: spec.name)
    operations = {**OPERATIONS, **ADMIN_OPERATIONS} if admin else OPERATIONS
    schemas = {**SCHEMAS, **ADMIN_SCHEMAS} if admin else SCHEMAS
    paths: dict[str, Any] = {}
    for endpoint, operation in operations.items():
        for path in operation.paths:
            described = _operation(endpoint, operation, path, models)
            paths.setdefault(path, {})[endpoint.method.lower()] = described
    for spec in models:
        paths.update(_paths_of_model(spec))
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": server_name,
            "version": server_version,
            "description": "Inference by the Open Inference Protocol, version 2.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"Failed": _response("The request failed.", {JSON: {"schema": reference("Error")}})},
            "securitySchemes": {
                "accessToken": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
                "bearerToken": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{}, {"accessToken": []}, {"bearerToken": []}],
        "tags": [_tag(spec) for spec in models]
        + [{"name": tag} for tag in dict.fromkeys(one.tag for one in operations.values())],
    }


def _operation(endpoint: Endpoint, operation: Operation, path: str, models: list[ModelSpec]) -> Schema:
    described: Schema = {
        "operationId": _operation_id(endpoint, operation, path),
        "tags": [operation.tag],
        "summary": operation.summary,
    }
    if operation.description:
        described["description"] = operation.description
    parameters = [_path_parameter(name, models) for name in _VARIABLE.findall(path)]
    if operation.binary:
        parameters.append(_HEADER_LENGTH)
    if parameters:
        described["parameters"] = parameters
    if operation.body:
        described["requestBody"] = _body(operation, {"schema": reference(operation.body)})
    answer = {"schema": reference(operation.answer)} if operation.answer else {}
    described["responses"] = _responses(operation, answer)
    return described


def _operation_id(endpoint: Endpoint, operation: Operation, path: str) -> str:
    """The endpoint's name, for its first path; the others say what is different about them."""
    name = endpoint.name.lower()
    first = operation.paths[0]
    if path == first:
        return name
    last = path.rpartition("/")[2]
    if not _VARIABLE.fullmatch(last) and not first.endswith((last, "}")):
        name = f"{name}_{last}"
    more = [variable for variable in _VARIABLE.findall(path) if variable not in _VARIABLE.findall(first)]
    return f"{name}_with_{'_and_'.join(more)}" if more else f"{name}_of_all"


def _path_parameter(name: str, models: list[ModelSpec]) -> Schema:
    schema: Schema = {"type": "string"}
    if name == "model_version":
        schema["pattern"] = "^[0-9]+$"
    elif name == "model_name" and models:
        schema["examples"] = [spec.name for spec in models]
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _body(operation: Operation, content: Schema) -> Schema:
    media = {JSON: content, BINARY: {}} if operation.binary else {JSON: content}
    return {"required": operation.body_required, "content": media}


def _responses(operation: Operation, answer: Schema) -> Schema:
    if not operation.answer_type:
        return {"200": {"description": "Done; the answer is empty."}, "default": _FAILED}
    media = (
        {operation.answer_type: answer, BINARY: {}} if operation.binary else {operation.answer_type: answer}
    )
    responses = {"200": _response("The answer.", media), "default": _FAILED}
    if operation.answer in {"Live", "Ready", "Started"} and MODEL not in operation.paths[0]:
        responses["400"] = _response("It is not.", media)
    return responses


def _response(description: str, content: Schema) -> Schema:
    return {"description": description, "content": content}


# ---- models -------------------------------------------------------------------------------


def _tag(spec: ModelSpec) -> Schema:
    return {"name": f"model {spec.name}", "description": f"Version {spec.version}."}


def _paths_of_model(spec: ModelSpec) -> dict[str, Any]:
    """The endpoints that run a model, with its own name in the path. A decoupled one has no ``/infer``."""
    endpoints = [one for one in _RUNS if not (spec.decoupled and one is Endpoint.MODEL_INFER)]
    return {
        OPERATIONS[one].paths[0].replace("{model_name}", quote(spec.name, safe="")): {
            one.method.lower(): _run(one, spec)
        }
        for one in endpoints
    }


def _run(endpoint: Endpoint, spec: ModelSpec) -> Schema:
    operation = OPERATIONS[endpoint]
    body, answer = _contents(endpoint, operation, spec)
    described: Schema = {
        "operationId": f"{endpoint.name.lower()}_of_{spec.name}",
        "tags": [f"model {spec.name}"],
        "summary": operation.summary,
        "requestBody": _body(operation, body),
        "responses": _responses(operation, answer),
    }
    if binary := examples.without_json((*spec.inputs, *spec.outputs)):
        names = ", ".join(f"'{one.name}' ({one.datatype})" for one in binary)
        described["description"] = f"No example: {names} has no JSON form, only binary data."
    elif left_out := examples.left_out(spec):
        counts = ", ".join(f"'{name}' takes {one['elements']}" for name, one in left_out.items())
        described["description"] = f"The example leaves the elements of large inputs out: {counts}."
    if operation.binary:
        described["parameters"] = [_HEADER_LENGTH]
    return described


def _contents(endpoint: Endpoint, operation: Operation, spec: ModelSpec) -> tuple[Schema, Schema]:
    """The JSON media types of the body and of the answer, with examples where there can be any."""
    if endpoint is Endpoint.MODEL_INFER:
        body: Schema = {"schema": reference(operation.body)}
        given, taken = examples.infer_request(spec), examples.infer_response(spec)
    else:
        body = {"schema": examples.generate_schema(spec)}
        given, taken = examples.generate_request(spec), examples.generate_response(spec)
    answer: Schema = {"schema": reference(operation.answer)}
    if not examples.without_json((*spec.inputs, *spec.outputs)):
        body["example"] = given
        if left_out := examples.left_out(spec):
            body[LEFT_OUT] = left_out
        if operation.answer_type != EVENTS:
            answer["example"] = taken
    return body, answer
