"""The admin API, for whoever reads ``/openapi.json`` of a server that has one: its rows beside those of
``openapi_operations``, and its bodies beside those of ``openapi_schemas``. Data only.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.front.endpoint.openapi_operations import Operation
from gpuserve.front.endpoint.openapi_schemas import Schema
from gpuserve.front.endpoint.routes import Endpoint

_TAG: Final = "admin"
_MODEL: Final = "/v2/admin/models/{model_name}"
_STRING: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_TEXTS: Final[Schema] = {"type": "array", "items": _STRING}
_PROBLEMS: Final[Schema] = {"type": "array", "items": {"type": "object"}}


def _of_server(verb: str, summary: str, answer: str, description: str, body: str = "") -> Operation:
    path = f"/v2/admin/{verb}"
    return Operation(_TAG, summary, (path,), answer, body, description, body_required=False)


def _of_model(verb: str, summary: str, description: str, body: str = "") -> Operation:
    paths = (f"{_MODEL}/{verb}",)
    return Operation(_TAG, summary, paths, "Operated", body, description, body_required=bool(body))


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties}


ADMIN_OPERATIONS: Final[dict[Endpoint, Operation]] = {
    Endpoint.ADMIN_STATUS: _of_server(
        "status",
        "The server, its models and their instances",
        "ServerStatus",
        "While the server starts and stops as well.",
    ),
    Endpoint.ADMIN_DRAIN: _of_server(
        "drain",
        "Be not ready, and let clients leave",
        "Drained",
        "Answered once no request is left. What comes meanwhile is served.",
        "DrainRequest",
    ),
    Endpoint.ADMIN_RELOAD: _of_server(
        "reload",
        "Apply the config file as it is now",
        "Reloaded",
        "Where something could not be applied, the answer is an error with the same members beside it.",
    ),
    Endpoint.ADMIN_MODEL_LOAD: _of_model(
        "load", "Load a model that is not served", "One that is served stays as it is."
    ),
    Endpoint.ADMIN_MODEL_UNLOAD: _of_model("unload", "Unload a model", "What it has is finished first."),
    Endpoint.ADMIN_MODEL_RELOAD: _of_model(
        "reload",
        "Load a model anew, beside the one that serves",
        "Where loading fails, the version that was loaded goes on serving.",
    ),
    Endpoint.ADMIN_MODEL_SCALE: _of_model(
        "scale", "Change how many instances a model has on each of its devices", "", "ScaleRequest"
    ),
}

ADMIN_SCHEMAS: Final[dict[str, Schema]] = {
    "ServerStatus": _object(
        server={
            "type": "object",
            "description": "Its name, version, process, state, addresses, and the process of its endpoint.",
        },
        models={
            "type": "array",
            "items": {
                "type": "object",
                "description": "Its name, version and state, its instances, what waits and what runs.",
            },
        },
    ),
    "DrainRequest": _object(
        timeout_s={
            "type": "number",
            "minimum": 0,
            "description": "How long to wait for what is unfinished; by default as long as a stop would.",
        },
        undo={"type": "boolean", "description": "Be ready again."},
    ),
    "Drained": _object(unfinished={**_INTEGER, "description": "Requests that were not finished in time."}),
    "Reloaded": _object(
        loaded=_TEXTS,
        reloaded=_TEXTS,
        scaled=_TEXTS,
        unloaded=_TEXTS,
        settings=_TEXTS,
        refused=_PROBLEMS,
        failed=_PROBLEMS,
    ),
    "ScaleRequest": {
        **_object(instances={**_INTEGER, "minimum": 1, "description": "On each device that it has."}),
        "required": ["instances"],
    },
    "Operated": {
        **_object(text={**_STRING, "description": "What there is to be said."}),
        "description": "Done; members depend on the operation.",
    },
}
