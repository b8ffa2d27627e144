"""Which sequence a request names, over each protocol, and whether its model takes it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

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


START, END = {"sequence_start": {"bool_param": True}}, {"sequence_end": {"bool_param": True}}


@pytest.mark.parametrize(
    ("parameters", "sequence"),
    [
        ({"sequence_id": {"int64_param": 7}}, (7, False, False)),
        ({"sequence_id": {"string_param": "a"}, **START, **END}, ("a", True, True)),
        # Clients without unsigned integers reach all of them.
        ({"sequence_id": {"int64_param": -1}}, ((1 << 64) - 1, False, False)),
        ({"sequence_id": {"int64_param": 0}, **START}, None),
        ({"sequence_id": {"string_param": ""}, **START}, None),
        (END, None),
    ],
)
def test_grpc_names_a_sequence_by_a_number_or_a_text(parameters: dict[str, Any], sequence: Any) -> None:
    assert grpc_sequence(**parameters) == sequence


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
    with pytest.raises(
        InvalidArgument, match=f"invalid value type for '{key}' parameter, expected {expected}"
    ):
        grpc_sequence(**{key: choice})


def test_http_names_a_sequence_by_a_number_or_a_text_and_generate_anywhere() -> None:
    assert http_sequence(sequence_id=(1 << 64) - 1, sequence_start=True) == ((1 << 64) - 1, True, False)
    assert http_sequence(sequence_id="a", sequence_end=True) == ("a", False, True)
    assert http_sequence(sequence_id=0) is http_sequence(sequence_id="") is http_sequence() is None
    body = {"x": 1.0, "sequence_id": "a", "parameters": {"sequence_start": True}, "mine": 1}
    request = parse_generate_request(json.dumps(body).encode(), spec(), "")
    assert (request.sequence, request.parameters) == (("a", True, False), {"mine": 1})


NO_NUMBER = "'sequence_id': expected an integer of 64 bits, or a string"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        *(({"sequence_id": wrong}, NO_NUMBER) for wrong in (-1, 1 << 64, 1.5, True)),
        ({"sequence_start": 1}, "'sequence_start': expected true or false"),
        ({"sequence_end": "e"}, "'sequence_end': expected true or false"),
        ({"sequence_id": "a" * 129}, "longer than the 128 characters"),
    ],
)
def test_http_refuses_other_types(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        http_sequence(**parameters)


BATCH_SIZE = (
    "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher"
)
NO_ID = "inference request to model 'm' must specify a non-zero or non-empty correlation ID"


@pytest.mark.parametrize(
    ("correlation_id", "rows", "datatype", "text"),
    [
        (None, 1, None, NO_ID),
        (1, 2, None, BATCH_SIZE),
        ("a", 1, "UINT64", "control 'ID' .*data-type is 'BYTES', but model 'm' expects 'UINT64'"),
        (1, 1, "BYTES", "control 'ID' .*data-type is 'UINT64', but model 'm' expects 'BYTES'"),
        (1 << 31, 1, "INT32", "control 'ID' .*which cannot hold the correlation ID 2147483648"),
        (1, 1, "INT32", ""),
        ("a", 1, "BYTES", ""),
        (1, 1, None, ""),
        ("a", 1, None, ""),
    ],
)
def test_a_sequence_model_takes_one_row_of_a_sequence_whose_id_fits_the_control(
    correlation_id: Any, rows: int, datatype: str | None, text: str
) -> None:
    sequence = None if correlation_id is None else Sequence(correlation_id, True, False)
    inputs = [InputTensor("x", "FP32", (rows, 1), bytes(4 * rows))]
    request = InferRequest("m", "", "r1", {}, inputs, (), None, sequence=sequence)
    controls = (SequenceControl("ID", "corrid", datatype),) if datatype else ()
    check = SequenceCheck(spec(sequence=SequenceBatching("direct", controls=controls)))
    with pytest.raises(InvalidArgument, match=text) if text else contextlib.nullcontext():
        check.check(request)
