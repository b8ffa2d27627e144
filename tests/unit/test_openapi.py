"""The OpenAPI document: complete, valid, and with examples that the server would take."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import re
import uuid
from collections.abc import Generator
from typing import Annotated, Any, Literal

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openapi import check_openapi
from present import present
from pydantic import BaseModel, Field

from gpuserve.config.settings.values import ADMIN, DASHBOARD, TOKEN_HEADER
from gpuserve.front.protocols.access import endpoints as routes
from gpuserve.front.protocols.access.endpoints import ADMIN_PREFIX, DASHBOARD_PREFIX, Endpoint, Route
from gpuserve.front.protocols.http.generate_endpoints import parse_generate_request
from gpuserve.front.protocols.http.infer_codec import parse_infer_request
from gpuserve.front.protocols.openapi.openapi_document import (
    ADMIN_PART,
    DASHBOARD_PART,
    OpenApiDocument,
    render_document,
)
from gpuserve.model.declaration import tensor_specs
from gpuserve.model.signature import signature_of
from gpuserve.model.spec import ModelSpec
from gpuserve.typed import Float32, Image, batch
from gpuserve_worker.protocol.tensor import ITEMSIZE, TensorSpec, element_count


def read(making: Generator[None, None, bytes]) -> Any:
    """The document as a client reads it, once all steps are made."""
    made = b""
    while not made:
        try:
            next(making)
        except StopIteration as end:
            made = end.value
    assert made.isascii()
    return json.loads(made)


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u2028"
NO_JSON = {"FP16", "BF16"}
DOCUMENT = read(render_document("s", "1", [], [ADMIN_PART, DASHBOARD_PART]))
OPERATIONS = [
    (method.upper(), path, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]


def route(method: str, path: str) -> Any:
    """Where a described path leads, with names in the places of its variables."""
    sent = path.format(model_name="m", model_version="3", repository_name="r", region_name="r")
    return routes.match_route(method, sent.encode(), {ADMIN, DASHBOARD})


def spec(
    name: str = "m",
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (-1, 2)),),
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "BYTES", ()),),
    size: int = 4,
    **more: Any,
) -> ModelSpec:
    return ModelSpec(name, inputs, outputs, size, (), **more)


def described(*specs: ModelSpec) -> Any:
    return read(render_document("triton", "1.0", specs))


def body_of(document: Any, tail: str, kind: str = "application/json") -> Any:
    """The description of the body of a request for the model ``m``."""
    return document["paths"][f"/v2/models/m/{tail}"]["post"]["requestBody"]["content"][kind]


def tensors(prefix: str) -> st.SearchStrategy[tuple[TensorSpec, ...]]:
    shapes = st.lists(st.sampled_from([-1, 1, 2, 3, 70]), max_size=3).map(tuple)
    shapes = shapes.filter(lambda shape: math.prod(shape) < 70**3)  # JSON takes 131,072 texts
    one = st.tuples(st.sampled_from(list(ITEMSIZE)), shapes, st.booleans())
    return st.lists(one, max_size=3).map(
        lambda made: tuple(TensorSpec(f"{prefix}{place}", *each) for place, each in enumerate(made))
    )


SPECS = st.builds(spec, inputs=tensors("x"), outputs=tensors("y"), size=st.sampled_from([0, 4]))


def test_every_endpoint_and_every_fixed_path_are_described() -> None:
    described = {route(method, path).endpoint for method, path, _ in OPERATIONS}
    missing = sorted(endpoint.name for endpoint in set(Endpoint) - described)
    assert not missing, f"add to openapi/document.json: {', '.join(missing)}"
    paths = {path for endpoint in Endpoint for path in endpoint.path.split("|") if not {*"()"} & {*path}}
    missing = {path.removesuffix("/?").replace("\\", "") for path in paths} - set(DOCUMENT["paths"])
    assert len(paths) > 10
    assert not missing, f"served, but not in openapi/document.json: {sorted(missing)}"


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=lambda one: str(one)[:60])
def test_a_described_path_leads_to_its_endpoint(method: str, path: str, operation: Any) -> None:
    found = route(method, path)
    assert isinstance(found, Route), f"{path} is not served"
    assert operation["operationId"].startswith(found.endpoint.name.lower())
    variables = [reference["$ref"].rpartition("/")[2] for reference in operation.get("parameters", [])]
    assert [f"{{{name}}}" for name in variables if name != "header_length"] == re.findall(r"{\w+}", path)


def test_every_reference_leads_somewhere_and_every_part_is_used() -> None:
    named = set(re.findall(r'"#/components/(\w+/\w+)"', json.dumps(DOCUMENT)))
    kinds = ("parameters", "responses", "schemas")
    assert named == {f"{kind}/{name}" for kind in kinds for name in DOCUMENT["components"][kind]}


def test_the_admin_api_and_the_live_page_are_described_where_there_are_any() -> None:
    without = read(render_document("s", "1", []))
    assert "admin" not in json.dumps(without)
    optional = {path for path in DOCUMENT["paths"] if path.startswith((ADMIN_PREFIX, DASHBOARD_PREFIX))}
    assert optional == set(DOCUMENT["paths"]) - set(without["paths"])


def test_every_datatype_and_the_header_of_tokens_are_those_of_the_server() -> None:
    components = DOCUMENT["components"]
    for tensor in ("TensorMetadata", "InputTensor", "OutputTensor"):
        datatypes = components["schemas"][tensor]["properties"]["datatype"]["enum"]
        assert set(datatypes) == set(ITEMSIZE)
    assert components["securitySchemes"]["accessToken"]["name"] == TOKEN_HEADER


@pytest.mark.parametrize("specs", [(), (spec(),), (spec("a"), spec("b.c-d", decoupled=True, size=0))])
@pytest.mark.parametrize("parts", [(), (ADMIN_PART,), (ADMIN_PART, DASHBOARD_PART)])
def test_the_document_is_openapi(specs: tuple[ModelSpec, ...], parts: tuple[str, ...]) -> None:
    check_openapi(read(render_document("triton", "1.0", specs, parts)))


async def test_the_document_follows_the_models() -> None:
    first = spec("first")
    specs = [first]
    description = OpenApiDocument("triton", "1.0", lambda: list(specs))

    async def body(*given: ModelSpec) -> bytes:
        specs[:] = given
        one, other = await asyncio.gather(description.body(), description.body())
        assert one is other
        return one

    before = await body(first)
    assert await body(first) is before
    changed = spec("first", inputs=(TensorSpec("other", "INT8", ()),))
    after = [await body(changed), await body(), await body(first, spec("second"))]
    assert [body.count(b"/v2/models/first/infer") for body in after] == [1, 0, 1]
    assert b'"other"' in after[0]
    assert b"/v2/models/second/infer" in after[2]


def test_a_decoupled_model_has_no_infer_and_operation_ids_are_different() -> None:
    paths = described(spec("a"), spec("version"), spec("a_version"))["paths"]
    ids = [one["operationId"] for item in paths.values() for one in item.values()]
    assert len(ids) == len(set(ids))
    made = described(spec(decoupled=True))["paths"]
    assert "/v2/models/m/infer" not in made
    assert "/v2/models/m/generate_stream" in made


def test_a_model_has_its_own_paths_and_examples() -> None:
    document = described(spec())
    tensor = {"name": "x", "shape": [1, 1, 2], "datatype": "FP32", "data": [1.0, 1.0]}
    assert body_of(document, "infer")["example"] == {"id": "1", "inputs": [tensor]}
    assert body_of(document, "generate")["example"] == {"x": [1.0, 1.0]}
    paths = document["paths"]
    answer = paths["/v2/models/m/generate"]["post"]["responses"]["200"]["content"]["application/json"]
    assert answer["example"] == {"model_name": "m", "model_version": "1", "y": "hello"}
    stream = paths["/v2/models/m/generate_stream"]["post"]["responses"]["200"]["content"]
    assert list(stream) == ["text/event-stream"]


class Item(BaseModel):
    name: Annotated[str, Field(min_length=8, max_length=12)]
    kind: Literal["a", "b"]
    day: datetime.date
    at: datetime.datetime
    key: uuid.UUID
    children: list[Item]
    size: Annotated[int, Field(gt=3)]
    pair: tuple[bool, float]
    some: Annotated[list[str], Field(min_length=2)]
    none: int | None
    left_out: Item | None = None


@batch
def judge(item: list[Item], photo: list[Image], scale: Float32) -> list[Item]: ...


def test_json_and_media_have_their_schemas() -> None:
    types = present(signature_of(judge, "judge"))
    model = spec(inputs=tensor_specs(types.inputs, "INPUT"), outputs=tensor_specs(types.outputs, "OUTPUT"))
    document = described(model)
    check_openapi(document)

    def resolved(node: Any) -> Any:
        while "$ref" in node:
            found = document
            for key in node["$ref"].split("/")[1:]:
                found = found[key]
            node = found
        return node

    form = body_of(document, "infer", "multipart/form-data")["schema"]
    assert form["required"] == ["item", "photo", "scale"]
    item = resolved(form["properties"]["item"])
    children = resolved(item)["properties"]["children"]["items"]
    assert resolved(children)["required"] == resolved(item)["required"]
    assert resolved(form["properties"]["photo"]) == {"type": "string", "contentMediaType": "image/*"}
    assert form["properties"]["scale"]["anyOf"][1] == {"type": "array", "items": {"type": "number"}}
    example = body_of(document, "infer")["example"]
    assert Item.model_validate_json(example["inputs"][0]["data"][0]).size == 4
    element, content, _ = body_of(document, "generate")["schema"]["properties"]["item"]["anyOf"]
    assert resolved(element)["contentMediaType"] == "application/json"
    assert resolved(content) == item
    answers = document["paths"]["/v2/models/m/generate"]["post"]["responses"]["200"]["content"]
    output = answers["application/json"]["schema"]["properties"]["OUTPUT_1"]
    assert "contentSchema" in resolved(output)


def test_a_schema_may_be_any_object() -> None:
    odd = '{"contentSchema": {"type": "object", "properties": 3, "required": [1]}}'
    for text in (odd, "{}", '{"$ref": 7}'):
        document = described(spec(inputs=(TensorSpec("x", "BYTES", (1,), schema=text),)))
        assert body_of(document, "generate")["example"] == {"x": "hello"}


def test_large_inputs_are_left_out_of_the_example_and_counted() -> None:
    document = described(spec(inputs=(TensorSpec("image", "UINT8", (3, 224, 224)),), size=0))
    content = body_of(document, "infer")
    image = {"name": "image", "shape": [3, 224, 224], "datatype": "UINT8", "data": []}
    assert content["example"]["inputs"][0] == image
    assert content["x-left-out"] == {"image": {"elements": 150528, "value": 1}}
    said = document["paths"]["/v2/models/m/infer"]["post"]["description"]
    assert said == "The example leaves the elements of large inputs out: 'image' takes 150528."


def test_a_model_that_json_cannot_carry_has_no_example() -> None:
    document = described(spec(outputs=(TensorSpec("y", "BF16", ()),)))
    assert "example" not in body_of(document, "infer")
    said = document["paths"]["/v2/models/m/infer"]["post"]["description"]
    assert said == "No example: 'y' (BF16) has no JSON form, only binary data."


@given(SPECS)
def test_examples_are_taken_by_the_codecs(model: ModelSpec) -> None:
    document = described(model)
    bodies = {tail: body_of(document, tail) for tail in ("infer", "generate")}
    if any(one.datatype in NO_JSON for one in (*model.inputs, *model.outputs)):
        assert all("example" not in content for content in bodies.values())
        return
    infer, plain = ({**content["example"]} for content in bodies.values())
    for name, missing in bodies["infer"].get("x-left-out", {}).items():  # as the page fills it in
        plain[name] = data = [missing["value"]] * missing["elements"]
        next(one for one in infer["inputs"] if one["name"] == name)["data"] = data
    request, _ = parse_infer_request("m", "", json.dumps(infer).encode(), None, model)
    generated = parse_generate_request(json.dumps(plain).encode(), model, "")
    found, expected = (
        [(one.name, one.shape, bytes(one.data)) for one in each.inputs] for each in (generated, request)
    )
    assert found == expected
    for tensor, one in zip(model.inputs, request.inputs, strict=True):
        assert element_count(one.shape) * ITEMSIZE[tensor.datatype] in {0, len(one.data)}


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(30))  # the validator takes a while
@given(SPECS)
def test_any_model_makes_a_valid_document(model: ModelSpec) -> None:
    check_openapi(described(model))


def test_names_are_data_and_stay_what_they_are() -> None:
    hostile = spec("m", inputs=(TensorSpec(HOSTILE, "INT8", (2,)),), outputs=())
    made = read(render_document(HOSTILE, "1", [hostile]))
    assert made["info"]["title"] == HOSTILE
    assert body_of(made, "generate")["example"] == {HOSTILE: [1, 1]}
    check_openapi(made)


@pytest.mark.parametrize("name", ["a/b", "a b", "{model_name}", "..", "?x#y"])
def test_a_path_is_built_of_one_segment_for_the_name(name: str) -> None:
    paths = [path for path in described(spec(name))["paths"] if path.endswith("/generate")]
    found = [routes.match_route("POST", path.encode()) for path in paths]
    assert Route(Endpoint.MODEL_GENERATE, name) in found
