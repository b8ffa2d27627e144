"""Requests of pages and of scripts: files as bodies and answers, and pages of other origins (CORS)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from exploring import variants
from serving import GPUSERVE, JSON_LOG, serving

CONFIG = """
server: {{cors_origins: ["https://app.example"], ingress_processes: {ingress}, access_log: all}}
models:
  - {{name: reverse, callable: "model.py:reverse", max_batch_size: 4,
     inputs: [{{name: file, dtype: bytes, shape: [1]}}], outputs: [{{name: file, dtype: bytes, shape: [1]}}]}}
  - {{name: total, callable: "model.py:total",
     inputs: [{{name: octets, dtype: uint8, shape: [-1]}}],
     outputs: [{{name: sum, dtype: int64, shape: [1]}}, {{name: n, dtype: int64, shape: [1]}}]}}
  - {{name: scaled, callable: "model.py:scaled", max_batch_size: 4}}
"""
MODEL = """
import numpy as np
from typing import Annotated, NamedTuple
from gpuserve.typed import Bytes, Float32, Parameter, Shape, batch

class Scaled(NamedTuple):
    scaled: Float32
    word: Annotated[Bytes, Shape(1)]

@batch(max_batch_size=4)
def scaled(values: Float32, scale: Annotated[Float32, Shape(1)], word: Annotated[Bytes, Shape(1)],
           add: Parameter[float] = 0.0, twice: Parameter[bool] = False,
           suffix: Parameter[str] = "") -> Scaled:
    return Scaled((values * scale + add) * (2 if twice else 1), word + suffix.encode())

def reverse(requests):
    return [{"file": np.array([[r["file"].item()[::-1]]], np.object_)} for r in requests]

def total(requests):
    return [{"sum": r["octets"].sum(dtype=np.int64, keepdims=True), "n": np.array([r["octets"].size])}
            for r in requests]
"""
JPEG = b"\xff\xd8 not really\x00"
ORIGIN = "https://app.example"


@pytest.fixture(scope="module", params=variants(1, 2), ids=["one process", "two ingress processes"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("files")
    (folder / "config.yaml").write_text(CONFIG.format(ingress=request.param))
    (folder / "model.py").write_text(MODEL)
    with serving(GPUSERVE, "serve", str(folder / "config.yaml"), *JSON_LOG) as addresses:
        yield addresses.http


def ask(
    address: str, path: str, body: bytes = b"", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    client = http.client.HTTPConnection(address, timeout=30)
    try:
        client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = client.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        client.close()


@pytest.mark.parametrize("size", variants(300_000, 1, 9000))
@pytest.mark.parametrize("kind", ["image/jpeg", "application/octet-stream"])
def test_a_file_is_a_body_and_an_answer(address: str, size: int, kind: str) -> None:
    file = JPEG * (size // len(JPEG) + 1)
    path = "/v2/models/reverse/infer"
    status, headers, body = ask(address, path, file, content_type=kind, accept="image/png")
    assert (status, headers["content-type"], body) == (200, "image/png", file[::-1])
    status, headers, body = ask(address, path, file, content_type=kind)
    json_nbytes = int(headers["inference-header-content-length"])
    assert json.loads(body[:json_nbytes])["outputs"][0]["name"] == "file"
    assert body[json_nbytes + 4 :] == file[::-1]


def test_json_may_come_as_octets_and_ask_for_a_file(address: str) -> None:
    text = json.dumps({"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": ["abc"]}]})
    path, octets = "/v2/models/reverse/infer", "application/octet-stream"
    assert ask(address, path, text.encode(), content_type=octets)[2].endswith(b'"data":["cba"]}]}')
    assert ask(address, path, text.encode(), accept="audio/wav")[2] == b"cba"


def test_bytes_of_a_tensor_are_its_elements(address: str) -> None:
    path = "/v2/models/total/infer"
    status, _, body = ask(address, path, bytes([1, 2, 250]), content_type="image/x-raw")
    assert (status, body[-16:]) == (200, (253).to_bytes(8, "little") + (3).to_bytes(8, "little"))
    status, _, body = ask(address, path, b"\x01", content_type="image/x-raw", accept="image/png")
    assert status == 400
    assert b"needs an answer with one output" in body
    assert b"sum INT64 [1], n INT64 [1]" in body


def test_pages_of_listed_origins_may_read_answers(address: str) -> None:
    path = "/v2/models/reverse/infer"
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    status, headers, body = ask(address, path, method="OPTIONS", origin=ORIGIN, **asked)
    assert (status, body) == (204, b"")
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-allow-headers"] == "content-type"
    assert "POST" in headers["access-control-allow-methods"]
    for one, method in ((path, "POST"), ("/v2", "GET"), ("/v2/models/none/infer", "POST")):
        _, headers, _ = ask(address, one, JPEG, method, origin=ORIGIN, content_type="image/jpeg")
        assert (headers["access-control-allow-origin"], headers["vary"]) == (ORIGIN, "origin")
        assert "x-request-id" in headers


def test_pages_of_other_origins_may_not(address: str) -> None:
    path, other = "/v2/models/reverse/infer", "https://other.example"
    status, headers, _ = ask(
        address, path, method="OPTIONS", origin=other, access_control_request_method="POST"
    )
    assert (status, "access-control-allow-origin" in headers) == (405, False)
    _, headers, _ = ask(address, path, JPEG, origin=other, content_type="image/jpeg")
    assert "access-control-allow-origin" not in headers


def form(*parts: tuple[str, bytes], boundary: str = "x-27") -> tuple[bytes, str]:
    """A multipart form, with the further fields of each part's head, and its content type."""
    start = f"--{boundary}\r\nContent-Disposition: form-data; ".encode()
    each = [start + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts]
    return b"".join([*each, f"--{boundary}--\r\n".encode()]), f'multipart/form-data; boundary="{boundary}"'


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_the_parts_of_a_form_are_tensors(address: str, size: int) -> None:
    file = b"\r\n--x-2\xff" * size
    body, kind = form(('name="file"; filename="a.jpg"\r\nContent-Type: image/jpeg', file))
    path = "/v2/models/reverse/infer"
    status, _, answer = ask(address, path, body, content_type=kind, accept="image/png")
    assert (status, answer == file[::-1]) == (200, True)
    values = ('name="values"', b"[1.5, 2]"), ('name="scale"', b"3"), ('name="word"', "schön".encode())
    raw = 'name="values"; filename="values.raw"', b"\0\0\xc0\x3f\0\0\0\x40"
    for first in (values[0], raw):
        body, kind = form(values[2], first, values[1])
        status, _, answer = ask(address, "/v2/models/scaled/infer", body, content_type=kind)
        assert status == 200, answer
        assert {one["name"]: one["data"] for one in json.loads(answer)["outputs"]} == {
            "scaled": [4.5, 6.0], "word": ["schön"],
        }  # fmt: skip


def test_other_parts_of_a_form_are_parameters(address: str) -> None:
    inputs = ('name="values"', b"[1.5, 2]"), ('name="scale"', b"3"), ('name="word"', b"a")
    for sent, expected in (
        ({"add": "0.5", "twice": "true", "suffix": "schön"}, ([10.0, 13.0], "aschön")),
        ({"add": "1", "suffix": '"42"', "other": "[1]"}, ([5.5, 7.0], "a42")),
    ):
        parts = [(f'name="{name}"', value.encode()) for name, value in sent.items()]
        body, kind = form(*parts, *inputs)
        status, _, answer = ask(address, "/v2/models/scaled/infer", body, content_type=kind)
        assert status == 200, answer
        found = {one["name"]: one["data"] for one in json.loads(answer)["outputs"]}
        assert (found["scaled"], found["word"]) == (expected[0], [expected[1]])
    body, kind = form(('name="suffix"', b"42"), *inputs)
    status, _, answer = ask(address, "/v2/models/scaled/infer", body, content_type=kind)
    assert (status, "'suffix' of the request must be a str" in json.loads(answer)["error"]) == (400, True), (
        answer
    )


def test_a_wrong_form_is_told_what_is_wrong(address: str) -> None:
    whole, kind = form(('name="scale"', b"3"))
    for body, given, text in (
        (whole[:-6], kind, "the last boundary followed by '--'"),
        (whole, "multipart/form-data", "must be a form of at most 259 parts"),
        (form(*[('name="scale"', b"3")] * 260)[0], kind, "must be a form of at most 259 parts"),
        (
            form(('name="scala"', b"3"))[0],
            kind,
            "lacks a part for the input ['values','scale','word']; given",
        ),
        (form(('name="scala"; filename="f"', b"3"))[0], kind, "has the name 'scala'; expected once the name"),
        (form(*[('name="scala"', b"3")] * 2)[0], kind, "has the name 'scala'; expected once the name"),
        (form(('filename="a"', b"3"))[0], kind, "has the name 'None'"),
        (form((f'name="scale"; x="{"y" * 5000}"', b"3"))[0], kind, "has the name 'None'"),
        (form(('name="scale"', b"three"))[0], kind, "'scale' of the form must be a JSON number"),
        (form(('name="scale"', b"[1, 2]"))[0], kind, "'scale'"),
        (whole, kind, "values"),
    ):
        status, _, answer = ask(address, "/v2/models/scaled/infer", body, content_type=given)
        assert (status, text in json.loads(answer)["error"]) == (400, True), answer
