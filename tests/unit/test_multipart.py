"""Multipart forms: the parts of a form arrive, and no bytes raise anything but a refusal."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.protocols.http.multipart import binary_body
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

SPEC = ModelSpec("m", (TensorSpec("a", "BYTES", (1,)), TensorSpec("n", "FP32", (-1,))), (), 4, ())
HEADS = [
    b'Content-Disposition: form-data; name="a"', b'Content-Disposition: form-data; name="a"; filename="f"',
    b"Content-Disposition: form-data; name*=utf-9''a", b'Content-Disposition: form-data; name="n"',
    b'Content-Disposition: form-data; name="n"; filename*0*=x', b"Content-Type: a/b", b":", b"\xff",
]  # fmt: skip
PIECES = st.sampled_from([*HEADS, b"\r\n", b"--B", b"\r\n--B", b"--", b"\r\n\r\n", b"3"]) | st.binary()


@given(st.binary(), st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_the_parts_of_a_form_arrive(data: bytes, numbers: list[float]) -> None:
    assume(b"\r\n--B" not in b"\r\n" + data)
    text = json.dumps(numbers).encode()
    first_part, second_part = [HEADS[1], b"\r\n\r\n", data], [HEADS[3], b"\r\n\r\n", text]
    form = [b"--B\r\n", *first_part, b"\r\n--B\r\n", *second_part, b"\r\n--B--"]
    body, json_nbytes = binary_body(form, "B", SPEC)
    first, second = json.loads(body[:json_nbytes])["inputs"]
    assert (first["name"], first["shape"]) == ("a", [1, 1])
    assert first["parameters"]["binary_data_size"] == len(body) - json_nbytes == 4 + len(data)
    assert body[json_nbytes:] == len(data).to_bytes(4, "little") + data
    assert (second["name"], second["shape"], second["data"]) == ("n", [1, len(numbers)], numbers)


@given(st.lists(PIECES))
def test_a_form_of_any_bytes_is_read_or_refused(pieces: list[bytes]) -> None:
    for form in (pieces, [b"--B\r\n", HEADS[0], b"\r\n\r\n", *pieces, b"\r\n--B--"]):
        try:
            body, json_nbytes = binary_body(form, "B", SPEC)
        except InvalidArgument:
            continue
        sizes = [one.get("parameters", {}) for one in json.loads(body[:json_nbytes])["inputs"]]
        assert sum(one.get("binary_data_size", 0) for one in sizes) == len(body) - json_nbytes


def test_a_form_needs_a_boundary() -> None:
    with pytest.raises(InvalidArgument, match="each after its boundary"):
        binary_body([b"--", HEADS[0], b"\r\n\r\n\r\n----"], "", SPEC)
