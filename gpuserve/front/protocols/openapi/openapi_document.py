"""The OpenAPI document of a server: templates filled in, with paths and examples for each loaded model.

Names in the document are client data: a page that shows them has to escape them. Examples are made of a
model's declaration; large tensors are left empty (``left_out``). FP16 and BF16 have no JSON form, and so no
example.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote

from gpuserve.front.observability.time_slices import SlicedPage
from gpuserve.front.requests.json_values import compact
from gpuserve.model.example_values import example_element, media_type_of
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, element_count

JSON: Final = "application/json"
_FORM: Final = "multipart/form-data"
#: The member with the inputs that an example leaves empty; our own extension, which other readers ignore.
LEFT_OUT: Final = "x-left-out"
#: Optional parts of the document.
ADMIN_PART: Final = "admin.json"
DASHBOARD_PART: Final = "dashboard.json"
_MODEL: Final = "/v2/models/{model_name}"
_INFER: Final = "/infer"
#: The endpoints that are described again for each model.
_INFERENCE_PATHS: Final = (_INFER, "/generate", "/generate_stream")

Node = dict[str, Any]


class OpenApiDocument:
    """The document of one server as JSON, rendered again when its models have changed."""

    def __init__(
        self, name: str, version: str, specs: Callable[[], list[ModelSpec]], parts: Sequence[str] = ()
    ) -> None:
        self._server = name, version
        self._parts = parts
        self._specs = specs
        #: The models of the last rendered document.
        self._rendered_specs: list[ModelSpec] | None = None
        self._body = b""
        self._sliced = SlicedPage(self._render)

    async def body(self) -> bytes:
        return self._body if self._is_current else await self._sliced.page()

    @property
    def _is_current(self) -> bool:
        known = self._rendered_specs
        return known is not None and list(map(id, known)) == list(map(id, self._specs()))

    def _render(self) -> Generator[None, None, bytes]:
        if not self._is_current:  # another request may have rendered it meanwhile
            specs = self._specs()
            self._body = yield from render_document(*self._server, specs, self._parts)
            self._rendered_specs = specs
        return self._body


def render_document(
    server_name: str, server_version: str, specs: Iterable[ModelSpec], parts: Sequence[str] = ()
) -> Generator[None, None, bytes]:
    """Render the OpenAPI document of a server as JSON. Yields after each model, so that others can run."""
    models = sorted(specs, key=lambda spec: spec.name)
    document = copy.deepcopy(template("document.json"))
    components = document["components"]
    for part in ("openai.json", *parts):
        added = template(part)
        document["tags"] += added["tags"]
        document["paths"] |= added["paths"]
        for kind, named in added["components"].items():
            components[kind] |= named
    document["info"] |= {"title": server_name, "version": server_version}
    if models:
        components["parameters"]["model_name"]["schema"]["examples"] = [spec.name for spec in models]
    tags = [{"name": _tag(spec), "description": f"Version {spec.version}."} for spec in models]
    document["tags"][:0] = tags
    paths = [_members(document["paths"])]
    for spec in models:
        yield
        path = _MODEL.replace("{model_name}", quote(spec.name, safe=""))
        # A decoupled model has no ``/infer``.
        tails = [tail for tail in _INFERENCE_PATHS if not (spec.decoupled and tail == _INFER)]
        paths.append(_members({path + tail: {"post": _operation(document, tail, spec)} for tail in tails}))
    yield
    del document["paths"]
    return f'{{{_members(document)},"paths":{{{",".join(paths)}}}}}'.encode()


def _members(node: Node) -> str:
    return compact(node)[1:-1]


@functools.cache
def template(name: str) -> Node:
    """Return one of the JSON files of this package, which nobody may change."""
    from importlib import resources  # slow to import, and most servers never need it

    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    found: Node = json.loads(text)
    return found


def _tag(spec: ModelSpec) -> str:
    return f"model {spec.name}"


def _operation(document: Node, tail: str, spec: ModelSpec) -> Node:
    """Return the operation of one model: that of any model, with the bodies of this model."""
    operation: Node = copy.deepcopy(document["paths"][_MODEL + tail]["post"])
    answer = operation["responses"]["200"]
    if reference := answer.get("$ref"):
        answer = document
        for key in reference.split("/")[1:]:
            answer = answer[key]
        answer = copy.deepcopy(answer)
    operation["responses"]["200"] = answer
    operation["operationId"] += f"_of_{spec.name}"
    operation["tags"] = [_tag(spec)]
    del operation["parameters"][0]  # the model's name
    operation.pop("description", None)
    if note := _example_note(spec):
        operation["description"] = note
    contents = operation["requestBody"]["content"]
    body = contents[JSON]
    schemas = document["components"]["schemas"]
    request: Node
    response: Node = {"model_name": spec.name, "model_version": str(spec.version)}
    if tail == _INFER:
        contents[_FORM]["schema"] = form_schema(spec, schemas)
        request = {"id": "1", "inputs": [_tensor(one, spec) for one in spec.inputs]}
        response |= {"id": "1", "outputs": [_tensor(one, spec) for one in spec.outputs]}
    else:
        body["schema"] = generate_schema(spec, schemas)
        request = {one.name: _member(one, spec) for one in spec.inputs}
        response |= {one.name: _member(one, spec) for one in spec.outputs}
        outputs = {one.name: _element_schema(one, spec, schemas) for one in spec.outputs if one.schema}
        if outputs and JSON in answer["content"]:
            answer["content"][JSON]["schema"]["properties"] = outputs
    if not without_json((*spec.inputs, *spec.outputs)):
        body["example"] = request
        if omitted := left_out(spec):
            body[LEFT_OUT] = omitted
        if JSON in answer["content"]:
            answer["content"][JSON]["example"] = response
    return operation


def _example_note(spec: ModelSpec) -> str:
    """Return why there is no example, or what the example leaves out."""
    if binary := without_json((*spec.inputs, *spec.outputs)):
        names = ", ".join(f"'{one.name}' ({one.datatype})" for one in binary)
        return f"No example: {names} has no JSON form, only binary data."
    if omitted := left_out(spec):
        counts = ", ".join(f"'{name}' takes {one['elements']}" for name, one in omitted.items())
        return f"The example leaves the elements of large inputs out: {counts}."
    return ""


#: The maximum number of elements in an example; larger tensors are left empty.
MAX_SHOWN_ELEMENTS: Final = 64
_NO_JSON: Final = frozenset({"FP16", "BF16"})
_TYPES: Final = {"BOOL": "boolean", "FP32": "number", "FP64": "number", "BYTES": "string"}


def without_json(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors that only binary data can carry."""
    return [one for one in tensors if one.datatype in _NO_JSON]


def generate_schema(spec: ModelSpec, schemas: Node) -> Node:
    """Return the schema of a body for ``/generate``: a value or an array for each input. Schemas of elements
    are added to ``schemas``.
    """
    properties = {}
    for one in spec.inputs:
        element = _element_schema(one, spec, schemas)
        anything = [element, *_content_schema(one, element), {"type": "array"}]
        properties[one.name] = {"description": f"{one.datatype} {list(one.shape)}", "anyOf": anything}
    return _object_schema(properties, spec)


def form_schema(spec: ModelSpec, schemas: Node) -> Node:
    """Return the schema of a multipart form for ``/infer``: a file, an object or numbers for each input."""
    properties: Node = {}
    for one in spec.inputs:
        element = _element_schema(one, spec, schemas)
        if one.datatype == BYTES or one.datatype in _NO_JSON:
            properties[one.name] = (_content_schema(one, element) or [element])[0]
        else:
            properties[one.name] = {"anyOf": [element, {"type": "array", "items": element}]}
    return _object_schema(properties, spec)


def _content_schema(tensor: TensorSpec, element: Node) -> list[Node]:
    """Return the schema of the object whose JSON is an element, if there is one."""
    is_json = media_type_of(tensor) == JSON and "contentSchema" in json.loads(tensor.schema)
    return [{"$ref": element["$ref"] + "/contentSchema"}] if is_json else []


def _object_schema(properties: Node, spec: ModelSpec) -> Node:
    members: Node = {"type": "object", "properties": properties}
    required = [one.name for one in spec.inputs if not one.optional]
    return {**members, "required": required} if required else members


def _element_schema(tensor: TensorSpec, spec: ModelSpec, schemas: Node) -> Node:
    """Return the schema of an element; a declared schema is a reference to a new member of ``schemas``."""
    if not tensor.schema:
        return {"type": _TYPES.get(tensor.datatype, "integer")}
    kind, tensors = ("input", spec.inputs) if tensor in spec.inputs else ("output", spec.outputs)
    name = f"{spec.name}.{kind}.{tensors.index(tensor)}"
    place = f"#/components/schemas/{name}"
    text = tensor.schema.replace('"#/$defs/', f'"{place}/contentSchema/$defs/')
    schemas[name] = json.loads(text)
    return {"$ref": place}


def left_out(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the inputs that the examples leave empty: their number of elements and one element."""
    counts = {one.name: (element_count(_shape(one, spec)), example_element(one)) for one in spec.inputs}
    return {
        name: {"elements": count, "value": value}
        for name, (count, value) in counts.items()
        if count > MAX_SHOWN_ELEMENTS
    }


def _tensor(tensor: TensorSpec, spec: ModelSpec) -> dict[str, Any]:
    shape = _shape(tensor, spec)
    data = _data(tensor, shape)
    return {"name": tensor.name, "shape": list(shape), "datatype": tensor.datatype, "data": data}


def _member(tensor: TensorSpec, spec: ModelSpec) -> Any:
    data = _data(tensor, _shape(tensor, spec))
    return data[0] if len(data) == 1 else data


def _data(tensor: TensorSpec, shape: tuple[int, ...]) -> list[Any]:
    count = element_count(shape)
    return [example_element(tensor)] * count if count <= MAX_SHOWN_ELEMENTS else []


def _shape(tensor: TensorSpec, spec: ModelSpec) -> tuple[int, ...]:
    """Return a complete shape that the declaration allows, with a batch of one."""
    batch = (1,) if spec.max_batch_size else ()
    return batch + tuple(1 if dim == -1 else dim for dim in tensor.shape)
