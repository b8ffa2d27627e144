"""A ``model.py`` that answers wrongly: what its clients are told, and that the others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from operated import OperatedServer
from python_backend import entry, said, stream, tensor
from tritonclient.utils import InferenceServerException

HOW = [said("HOW", "STRING", 1)]
WRONG = {"input": HOW, "output": [said("Y", "FP32", 2)]}
WRONG_STREAM = {
    "input": HOW,
    "output": [said("Y", "STRING", 1)],
    "model_transaction_policy": {"decoupled": True},
}
_FAILED = "Failed to process the request(s) for model 'wrong_0', message: "
_STREAM_FAILED = "Failed to process the request(s) for model 'wrong_stream_0', message: "
_RESPONSE = "gpuserve.backends.python_backend.responses.InferenceResponse"
_RAISED = f"{_FAILED}TritonModelException: "
_UNDECLARED = "the response has the output 'Z', which the configuration of the model does not declare"
_DTYPE = "Output 'Y' of model 'wrong' must be FP32 (float32), but the callable returned an array of object"
#: How the model answers, the status, and what its client is told.
TOLD = [
    (
        "too_few",
        "INTERNAL",
        f"{_RAISED}Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
    ),
    (
        "no_list",
        "INTERNAL",
        f"{_RAISED}Expected a list in the execute return, found type '<class '{_RESPONSE}'>'.",
    ),
    (
        "no_response",
        "INTERNAL",
        f"{_RAISED}Expected an 'InferenceResponse' object in the execute function return list, found type "
        "'<class 'dict'>'.",
    ),
    ("nothing", "INTERNAL", "execute returned no response for a request, and none was sent"),
    ("raises", "INTERNAL", f"{_FAILED}ValueError: the weights in secret.bin are odd"),
    ("raises_a_key", "INTERNAL", f"{_FAILED}KeyError: 'seven'"),
    ("another_output", "INTERNAL", f"{_UNDECLARED}: expected 'Y'"),
    ("text_for_numbers", "INTERNAL", _DTYPE),
    ("refused", "NOT_FOUND", "no such page:\n/a/b"),
    ("unknown", "UNKNOWN", "no such page:\n/a/b"),
    (
        "not_carried",
        "INTERNAL",
        f"{_RAISED}Expect parameters keys to have type str, found type <class 'int'>",
    ),
    (
        "no_parameter",
        "INTERNAL",
        f"{_RAISED}Expect parameters values to have type bool/int/float/str, found type <class 'list'>",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    config = tmp_path_factory.mktemp("python_backend") / "config.yaml"
    models = [entry("wrong", config=WRONG), entry("wrong_stream", config=WRONG_STREAM)]
    config.write_text(json.dumps({"models": models}))
    with OperatedServer(config) as running:
        yield running.wait_ready()


def ask(server: OperatedServer, how: str) -> Any:
    with grpcclient.InferenceServerClient(server.addresses["gRPC"]) as client:
        return client.infer("wrong", [tensor("HOW", "BYTES", [how.encode()])])


def streamed(server: OperatedServer, how: str) -> list[Any]:
    """The text of each response, or of the error that came."""
    came = stream(server.addresses["gRPC"], "wrong_stream", tensor("HOW", "BYTES", [how.encode()]))
    outputs = [error if error is not None else result.as_numpy("Y") for result, error in came]
    return [str(one) if isinstance(one, Exception) else one[0].decode() for one in outputs if one is not None]


@pytest.mark.parametrize(("how", "status", "text"), TOLD)
def test_one_request_fails_with_a_sentence(server: OperatedServer, how: str, status: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as failed:
        ask(server, how)
    assert (failed.value.status(), failed.value.message()) == (f"StatusCode.{status}", text)
    assert ask(server, "right").as_numpy("Y").tolist() == [1, 1]


def test_an_output_that_is_not_declared_is_left_out_beside_one_that_is(server: OperatedServer) -> None:
    result = ask(server, "one_output_more").get_response()
    assert [one.name for one in result.outputs] == ["Y"]


def test_what_was_sent_counts_where_a_response_is_returned_as_well(server: OperatedServer) -> None:
    assert ask(server, "sent_and_returned").as_numpy("Y").tolist() == [1, 1]
    server.wait_log("Non-decoupled model cannot send more than one response")


@pytest.mark.parametrize(
    ("how", "came"),
    [
        ("right", ["y"]),
        ("raises_between", ["y", f"{_STREAM_FAILED}ValueError: in the middle"]),
        (
            "returns_a_list",
            [
                f"{_STREAM_FAILED}TritonModelException: Python model 'wrong_stream_0' is using the decoupled "
                "mode and the execute function must return None."
            ],
        ),
        ("lets_go", ["y", "the model deleted the response sender of a request before its final response"]),
        ("refuses", ["y", "that is all"]),
        (
            "sends_no_response",
            [
                "TritonModelException: Inference Response object must be provided when the response flags is "
                "set to zero.",
                "TypeError: send() takes a pb_utils.InferenceResponse, but dict was given",
                "TritonModelException: Unable to send response. Unsupported flag provided: 7, expected 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
            ],
        ),
    ],
)
def test_a_stream_ends_with_a_sentence(server: OperatedServer, how: str, came: list[str]) -> None:
    assert streamed(server, how) == came
    assert streamed(server, "right") == ["y"]


def test_a_sender_is_closed_after_its_final_response(server: OperatedServer) -> None:
    assert streamed(server, "goes_on_after_its_end") == ["y"]
    server.wait_log(
        "afterwards: TritonModelException: Unable to send response. Response sender has been closed."
    )
