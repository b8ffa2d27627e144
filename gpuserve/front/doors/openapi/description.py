"""The OpenAPI document of a server: its templates, filled in, with paths for each loaded model. A test holds
the templates against ``routes.py``. Names in it are data: whoever shows them has to escape them.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote

from gpuserve.front.doors.openapi import examples
from gpuserve.front.observability.time_slices import SlicedPage
from gpuserve.front.requests.json_values import compact
from gpuserve.model.spec import ModelSpec

JSON: Final = "application/json"
#: What an example leaves empty, by input; a member of ours, which other readers pass over.
LEFT_OUT: Final = "x-left-out"
#: The parts of the document that not every server has.
ADMIN_PART: Final = "admin.json"
PAGE_PART: Final = "dashboard.json"
_MODEL: Final = "/v2/models/{model_name}"
_INFER: Final = "/infer"
#: The endpoints that are described once more for each model.
_RUNS: Final = (_INFER, "/generate", "/generate_stream")

Node = dict[str, Any]


class Description:
    """The document of one server as JSON, made anew where its models are not those of the last time."""

    def __init__(
        self, name: str, version: str, specs: Callable[[], list[ModelSpec]], parts: Sequence[str] = ()
    ) -> None:
        self._server = name, version
        self._parts = parts
        self._specs = specs
        #: Of which models what was made last is.
        self._of: list[ModelSpec] | None = None
        self._body = b""
        self._sliced = SlicedPage(self._rendering)

    async def body(self) -> bytes:
        return self._body if self._is_current else await self._sliced.page()

    @property
    def _is_current(self) -> bool:
        return self._of is not None and list(map(id, self._of)) == list(map(id, self._specs()))

    def _rendering(self) -> Generator[None, None, bytes]:
        if not self._is_current:  # it may have been made for somebody else meanwhile
            specs = self._specs()
            self._body = yield from document(*self._server, specs, self._parts)
            self._of = specs
        return self._body


def document(
    server_name: str, server_version: str, specs: Iterable[ModelSpec], parts: Sequence[str] = ()
) -> Generator[None, None, bytes]:
    """The OpenAPI document of a server with these models, and with those ``parts`` that not every one has, as
    JSON. A model is a step.
    """
    models = sorted(specs, key=lambda spec: spec.name)
    made = copy.deepcopy(template("document.json"))
    components = made["components"]
    for part in ("openai.json", *parts):
        added = template(part)
        made["tags"] += added["tags"]
        made["paths"] |= added["paths"]
        for kind, named in added["components"].items():
            components[kind] |= named
    made["info"] |= {"title": server_name, "version": server_version}
    if models:
        components["parameters"]["model_name"]["schema"]["examples"] = [spec.name for spec in models]
    made["tags"][:0] = [
        {"name": _tag(spec), "description": f"Version {spec.version}."} for spec in models
    ]  # fmt: skip
    paths = [_members(made["paths"])]
    for spec in models:
        yield
        paths.append(_members(_paths_of_model(made, spec)))
    yield
    del made["paths"]
    return f'{{{_members(made)},"paths":{{{",".join(paths)}}}}}'.encode()


def _members(node: Node) -> str:
    """What stands between the braces of a JSON object."""
    return compact(node)[1:-1]


@functools.cache
def template(name: str) -> Node:
    """One of the JSON files of this package, which nobody may change."""
    from importlib import resources  # which is slow to import, and most servers are never asked

    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    found: Node = json.loads(text)
    return found


def _tag(spec: ModelSpec) -> str:
    return f"model {spec.name}"


def _paths_of_model(made: Node, spec: ModelSpec) -> Node:
    """The endpoints that run a model, with its own name in the path. A decoupled one has no ``/infer``."""
    path = _MODEL.replace("{model_name}", quote(spec.name, safe=""))
    tails = [tail for tail in _RUNS if not (spec.decoupled and tail == _INFER)]
    return {path + tail: {"post": _run(made, tail, spec)} for tail in tails}


def _run(made: Node, tail: str, spec: ModelSpec) -> Node:
    """How one model is run: the operation of any model, with the bodies of this one."""
    operation: Node = copy.deepcopy(made["paths"][_MODEL + tail]["post"])
    answer = copy.deepcopy(_referred(made, operation["responses"]["200"]))
    operation["responses"]["200"] = answer
    operation["operationId"] += f"_of_{spec.name}"
    operation["tags"] = [_tag(spec)]
    del operation["parameters"][0]  # the model's name
    operation.pop("description", None)
    if said := _about_examples(spec):
        operation["description"] = said
    body = operation["requestBody"]["content"][JSON]
    given, taken = examples.infer_request(spec), examples.infer_response(spec)
    if tail != _INFER:
        body["schema"] = examples.generate_schema(spec)
        given, taken = examples.generate_request(spec), examples.generate_response(spec)
    if not examples.without_json((*spec.inputs, *spec.outputs)):
        body["example"] = given
        if left_out := examples.left_out(spec):
            body[LEFT_OUT] = left_out
        if JSON in answer["content"]:
            answer["content"][JSON]["example"] = taken
    return operation


def _about_examples(spec: ModelSpec) -> str:
    """Why there is no example, or what the example leaves out."""
    if binary := examples.without_json((*spec.inputs, *spec.outputs)):
        names = ", ".join(f"'{one.name}' ({one.datatype})" for one in binary)
        return f"No example: {names} has no JSON form, only binary data."
    if left_out := examples.left_out(spec):
        counts = ", ".join(f"'{name}' takes {one['elements']}" for name, one in left_out.items())
        return f"The example leaves the elements of large inputs out: {counts}."
    return ""


def _referred(made: Node, node: Node) -> Node:
    """What a node stands for: itself, or the part of the document that it refers to."""
    for key in node.get("$ref", "").split("/")[1:]:
        made = made[key]
    return made if "$ref" in node else node
