"""Inference requests as JSON: refused in words, or read as Python's own parser reads them, in any pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import expensive
import numpy as np
from hypothesis import strategies as st

from fuzzing import costs
from fuzzing.cuts import cuts_of
from gpuserve.core.errors import RequestError
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.protocols.http.body_scanner import BodyHead, HttpBodyScanner
from gpuserve.front.protocols.http.infer_codec import parse_infer_request, refuse_binary_inputs
from gpuserve.front.protocols.http.infer_json import NO_ARRAYS, read_header
from gpuserve.front.requests.inference import InputTensor
from gpuserve.front.requests.json_values import MAX_VALUES, TOO_FEW, TOO_MANY
from gpuserve.front.requests.server_status import STATUS

_DTYPES = {
    "BOOL": np.bool_, "INT8": np.int8, "INT64": np.int64, "UINT8": np.uint8, "UINT64": np.uint64,
    "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
_LIMIT_NBYTES = 1 << 20
_TEXTS = st.sampled_from(["", "a", "1", "é", "\ud800", '"['])
_LEAVES = (
    st.integers(-(1 << 65), 1 << 65) | st.integers(-200, 300) | st.floats(width=32) | st.booleans()
    | _TEXTS | st.none()
)  # fmt: skip
_TREES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4), max_leaves=10)
_MEMBERS = {
    "name": st.sampled_from(["x", "y", "", "é"]) | _LEAVES,
    "datatype": st.sampled_from([*_DTYPES, "BYTES", "FP16", "fp32"]),
    "shape": st.lists(st.integers(-1, 4), max_size=3) | _TREES,
    "data": _TREES,
    "parameters": st.dictionaries(
        st.sampled_from(["binary_data_size", "shared_memory_region", "k"]), _LEAVES, max_size=2
    ),
}


@st.composite
def _inputs(draw: st.DrawFn) -> dict[str, Any]:
    """One that is right, or nearly."""
    datatype = draw(st.sampled_from(list(_DTYPES)))
    values = st.booleans() if datatype == "BOOL" else st.integers(0, 100)
    data = draw(st.lists(values, max_size=6))
    shape = [len(data)]
    if len(data) == 6 and draw(st.booleans()):
        data, shape = [data[:3], data[3:]], [2, 3]
    entry: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": shape, "data": data}
    for key in draw(st.lists(st.sampled_from(list(_MEMBERS)), max_size=1)):
        entry[key] = draw(_MEMBERS[key])
    return entry


_DOCUMENTS = st.fixed_dictionaries(
    {"inputs": st.lists(_inputs(), max_size=2)},
    optional={
        "id": _LEAVES,
        "outputs": _TREES,
        "parameters": st.dictionaries(_TEXTS, _LEAVES, max_size=2),
    },
)


@st.composite
def _spoilt(draw: st.DrawFn) -> bytes:
    text = bytearray(
        json.dumps(draw(_DOCUMENTS), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    )
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text)


@st.composite
def _expensive(draw: st.DrawFn) -> bytes:
    """Many values, keys or texts, as deep as JSON nests."""
    if draw(st.booleans()):
        return draw(costs.expensive(expensive.JSON))
    tree = draw(_TREES)
    n = (40 << 10) // (len(json.dumps(tree)) + 10)
    many = {f"{i:x}": tree for i in range(n)} if draw(st.booleans()) else [tree] * n
    document = draw(_DOCUMENTS)
    document[draw(st.sampled_from(["inputs", "outputs", "parameters", "id", "x"]))] = many
    return json.dumps(document).encode("utf-8", "surrogatepass")


INPUTS = st.one_of(
    _spoilt(), _TREES.map(lambda one: json.dumps(one).encode()), st.binary(max_size=40), _expensive()
)


def _told(read: Any) -> Any:
    """Everything of a request, or the status of the error and its words."""
    try:
        request, form = read()
    except RequestError as error:
        status, told = STATUS[error.code][0], str(error)
    else:
        inputs = [(one.name, one.datatype, one.shape, bytes(one.data)) for one in request.inputs]
        return request.id, request.outputs, request.parameters, inputs, form
    assert status < 500, f"whatever a client sends is the client's mistake: {told}"
    return status, told


def _read_whole(body: bytes) -> Any:
    """By the parser that makes something of every number."""
    try:
        header = read_header(body)
    except RequestError as error:
        told = (
            str(error)
            if str(error).startswith((TOO_FEW, TOO_MANY))
            else f"{error} (in a request for model 'm')"
        )
        raise type(error)(told) from None
    refuse_binary_inputs(header)
    inputs = [
        InputTensor(one.name, one.datatype, one.shape, one.own_data(NO_ARRAYS)) for one in header.inputs
    ]
    return header.request("m", "", inputs), header.form


def read(body: bytes) -> Any:
    """As the body of a post is read that came whole."""
    return parse_infer_request("m", "", body, None)


def check(body: bytes) -> None:
    """At once, in pieces, and by the parsers of Python and NumPy."""
    told = _told(lambda: parse_infer_request("m", "", body, None))

    def in_pieces() -> Any:
        share = Share(Intake(_LIMIT_NBYTES, lambda: None))
        scanner = HttpBodyScanner(BodyHead("m", "", None, None), lambda _: None, _LIMIT_NBYTES, share)
        edges = [0, *sorted(cuts_of(body)), len(body)]
        for start, end in itertools.pairwise(edges):
            scanner.feed(body[start:end])
        return scanner.finish()

    assert _told(in_pieces) == told
    if 0 < len(body) <= MAX_VALUES:  # in a longer one there may be more than that parser reads
        assert _told(lambda: _read_whole(body)) == told
    if isinstance(told[0], int):
        return
    entries = json.loads(body)["inputs"]
    for entry, (_, datatype, shape, data) in zip(entries, told[3], strict=True):
        if datatype in _DTYPES:
            with np.errstate(over="ignore"):
                assert np.array(entry["data"], _DTYPES[datatype]).reshape(shape).tobytes() == data
