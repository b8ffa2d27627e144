"""Which sequence a request names, over each protocol, and whether its model takes it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.protocols.grpc.infer_decoder import request_parameters
from gpuserve.front.protocols.http.generate_endpoints import parse_generate_request
from gpuserve.front.protocols.http.infer_json import read_header
from gpuserve.front.requests.inference import InferRequest, InputTensor, Sequence
from gpuserve.front.requests.validation import SequenceCheck
from gpuserve.model.spec import InstanceSpec, ModelSpec, SequenceBatching, SequenceControl
from gpuserve_worker.protocol.tensor import TensorSpec

X = TensorSpec("x", "FP32", (1,), False)


def grpc_sequence(**parameters: dict[str, Any]) -> Sequence | None:
    message = pb.ModelInferRequest()
    for key, choice in parameters.items():
        for field, value in choice.items():
            setattr(message.parameters[key], field, value)
    given = request_parameters(message.parameters, "m")
    assert given.custom == {}
    return given.sequence


def http_sequence(**parameters: Any) -> Sequence | None:
    header = read_header(json.dumps({"inputs": [], "parameters": parameters}).encode())
    assert header.parameters == {}
    return header.sequence


def spec(**more: Any) -> ModelSpec:
    return ModelSpec("m", (X,), (X,), 4, (InstanceSpec("0", "cpu", {}),), **more)


def test_grpc_names_a_sequence_by_a_number_or_a_text() -> None:
    assert grpc_sequence(sequence_id={"int64_param": 7}) == (7, False, False)
    named = grpc_sequence(
        sequence_id={"string_param": "a"},
        sequence_start={"bool_param": True},
        sequence_end={"bool_param": True},
    )
    assert named == ("a", True, True)


def test_a_client_without_unsigned_integers_reaches_all_of_them() -> None:
    assert grpc_sequence(sequence_id={"int64_param": -1}) == ((1 << 64) - 1, False, False)


@pytest.mark.parametrize("nothing", [{"int64_param": 0}, {"string_param": ""}])
def test_no_id_is_no_sequence(nothing: dict[str, Any]) -> None:
    assert grpc_sequence(sequence_id=nothing, sequence_start={"bool_param": True}) is None
    assert grpc_sequence(sequence_end={"bool_param": True}) is None


@pytest.mark.parametrize(
    ("key", "choice", "expected"),
    [
        ("sequence_id", {"uint64_param": 1}, "int64_param or string_param."),
        ("sequence_id", {"bool_param": True}, "int64_param or string_param."),
        ("sequence_start", {"int64_param": 1}, "bool_param."),
        ("sequence_end", {"string_param": "true"}, "bool_param."),
    ],
)
def test_grpc_refuses_other_types(key: str, choice: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        grpc_sequence(**{key: choice})
    assert f"invalid value type for '{key}' parameter, expected {expected}" in str(refused.value)


def test_http_names_a_sequence_by_a_number_or_a_text() -> None:
    assert http_sequence(sequence_id=(1 << 64) - 1, sequence_start=True) == ((1 << 64) - 1, True, False)
    assert http_sequence(sequence_id="a", sequence_end=True) == ("a", False, True)
    assert http_sequence(sequence_id=0) is http_sequence(sequence_id="") is http_sequence() is None


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"sequence_id": -1}, "'sequence_id': expected an integer of 64 bits, or a string"),
        ({"sequence_id": 1 << 64}, "'sequence_id': expected an integer of 64 bits, or a string"),
        ({"sequence_id": 1.5}, "'sequence_id': expected an integer of 64 bits, or a string"),
        ({"sequence_id": True}, "'sequence_id': expected an integer of 64 bits, or a string"),
        (
            {"sequence_start": 1},
            "'sequence_start': expected true or false",
        ),
        (
            {"sequence_end": "e"},
            "'sequence_end': expected true or false",
        ),
        ({"sequence_id": "a" * 129}, "longer than the 128 characters"),
    ],
)
def test_http_refuses_other_types(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        http_sequence(**parameters)
    assert text in str(refused.value)


def test_generate_names_a_sequence_anywhere() -> None:
    body = {"x": 1.0, "sequence_id": "a", "parameters": {"sequence_start": True}, "mine": 1}
    request = parse_generate_request(json.dumps(body).encode(), spec(), "")
    assert (request.sequence, request.parameters) == (("a", True, False), {"mine": 1})


def request(sequence: Sequence | None, rows: int = 1) -> InferRequest:
    data = np.zeros((rows, 1), np.float32).tobytes()
    return InferRequest(
        "m", "", "r1", {}, [InputTensor("x", "FP32", (rows, 1), data)], (), None, sequence=sequence
    )


def check(sequence: Sequence | None, rows: int = 1, corrid: str | None = None) -> None:
    controls = (SequenceControl("ID", "corrid", corrid),) if corrid else ()
    SequenceCheck(spec(sequence=SequenceBatching("direct", controls=controls))).check(request(sequence, rows))


def test_a_sequence_model_needs_a_sequence() -> None:
    text = "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    with pytest.raises(InvalidArgument) as refused:
        check(None)
    assert str(refused.value) == text


def test_a_request_of_a_sequence_has_one_row() -> None:
    text = "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher"
    with pytest.raises(InvalidArgument) as refused:
        check(Sequence(1, True, False), rows=2)
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("correlation_id", "datatype", "text"),
    [
        ("a", "UINT64", "data-type is 'BYTES', but model 'm' expects 'UINT64'"),
        (1, "BYTES", "data-type is 'UINT64', but model 'm' expects 'BYTES'"),
        (1 << 31, "INT32", "which cannot hold the correlation ID 2147483648"),
    ],
)
def test_the_id_is_of_the_type_that_the_callable_is_told(
    correlation_id: int | str, datatype: str, text: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(Sequence(correlation_id, True, False), corrid=datatype)
    assert str(refused.value).startswith("sequence batching control 'ID'")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("correlation_id", "datatype"), [(1, "INT32"), ("a", "BYTES"), (1, None), ("a", None)]
)
def test_an_id_that_fits_is_taken(correlation_id: int | str, datatype: str | None) -> None:
    check(Sequence(correlation_id, True, False), corrid=datatype)
