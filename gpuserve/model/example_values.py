"""Example elements of tensors, for the OpenAPI document and for commands that are printed at the start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gpuserve_worker.protocol.tensor import BYTES, TensorSpec

#: Lists and objects inside each other in an example; a schema may refer to itself.
_DEEPEST: Final = 8
_LISTS_FILLED: Final = 3
_TEXTS: Final = {
    "date": "2026-01-31", "date-time": "2026-01-31T12:00:00Z", "time": "12:00:00Z", "email": "a@b.example",
    "uri": "https://b.example/", "uuid": "00000000-0000-4000-8000-000000000000",
}  # fmt: skip


def example_element(tensor: TensorSpec) -> Any:
    """Return an element of a tensor as a JSON value; of a tensor with a schema, one that fits the schema."""
    if tensor.datatype == BYTES:
        schema: Mapping[str, Any] = json.loads(tensor.schema or "{}")
        content = schema.get("contentSchema")
        try:
            return str(_instance(schema, {})) if content is None else json.dumps(_instance(content, content))
        except Exception:  # the text of a config file may be any JSON object
            return "hello"
    if tensor.datatype == "BOOL":
        return True
    return 1.0 if tensor.datatype.startswith("FP") else 1


def media_type_of(tensor: TensorSpec) -> str:
    """Return the media type of the elements of a tensor, "" if its schema names none."""
    return str(json.loads(tensor.schema or "{}").get("contentMediaType", ""))


def _instance(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value of a JSON Schema, as pydantic writes them; ``root`` has the definitions."""
    if depth > _DEEPEST:
        return None
    for key in ("default", "const", "examples", "enum"):
        if key in schema:
            return schema[key][0] if key in {"examples", "enum"} else schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _instance(schema[key][0], root, depth + 1)
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth + 1)
    kind = schema.get("type", "string")
    if kind == "object":
        members = schema.get("properties", {})
        return {name: _instance(members[name], root, depth + 1) for name in schema.get("required", ())}
    if kind == "array":
        if "prefixItems" in schema:
            return [_instance(one, root, depth + 1) for one in schema["prefixItems"]]
        count = schema.get("minItems", 1 if depth < _LISTS_FILLED else 0)
        return [_instance(schema.get("items", {}), root, depth + 1)] * count
    if kind in {"integer", "number"}:
        return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    if kind == "string":
        text = _TEXTS.get(schema.get("format", ""), "hello")
        return text[: schema.get("maxLength")].ljust(schema.get("minLength", 0), "o")
    return {"boolean": True}.get(kind)
