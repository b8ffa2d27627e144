"""Headers that a server forwards to its models, over both protocols."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import models, served
from serving import Addresses
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 15.0
LONG = "triton-grpc-protocol-triton-access-token"
SHORT = "triton-access-token"


@pytest.fixture(scope="module")
def forwards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server that forwards headers, by another pattern for each protocol."""
    patterns = {"http_header_forward_pattern": "my_header|^x-|^TIMEOUT$", "grpc_header_forward_pattern": ".*"}
    folder = tmp_path_factory.mktemp("forwards")
    with served(folder, models("parameters"), **patterns) as addresses:
        yield addresses


def seen(server: Addresses, protocol: str, headers: dict[str, str], **parameters: Any) -> str:
    """The parameters that the model was given, sorted."""
    kind: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    tensor_in = kind.InferInput("x", [1, 1], "FP32")
    tensor_in.set_data_from_numpy(np.ones((1, 1), np.float32))
    with kind.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        given = {"n": 1, **parameters}
        answer = client.infer("parameters", [tensor_in], headers=headers, parameters=given)
        return str(answer.as_numpy("seen")[0, 0].decode())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_headers_reach_the_model_beside_parameters(forwards: Addresses, protocol: str) -> None:
    headers = {"my_header_1": "a b", "x-user": "ann"}
    text = seen(forwards, protocol, headers, my_parameter="p")
    assert "('my_header_1', 'a b'), ('my_parameter', 'p'), ('n', 1)" in text
    assert "('x-user', 'ann')" in text


def test_only_headers_that_match_are_forwarded(forwards: Addresses) -> None:
    text = seen(forwards, "http", {"X-User": "ann", "other": "1"})
    assert text == "[('X-User', 'ann'), ('n', 1), ('x-user', 'ann')]"  # and as the client wrote the name


def test_grpc_forwards_no_header_of_the_transport_and_no_token(forwards: Addresses) -> None:
    text = seen(forwards, "grpc", {LONG: "secret", SHORT: "secret", "tag": "1"})
    forwarded = {name for name in dict(eval(text)) if name not in {"user-agent", "accept-encoding"}}
    assert forwarded == {"n", "tag"}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_header_stands_over_a_parameter(forwards: Addresses, protocol: str) -> None:
    assert "('x-user', 'ann')" in seen(forwards, protocol, {"x-user": "ann"}, **{"x-user": "forged"})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_reserved_header_is_refused(forwards: Addresses, protocol: str) -> None:
    with pytest.raises(
        InferenceServerException,
        match=r"header 'timeout' has the name of a parameter",
    ):
        seen(forwards, protocol, {"timeout": "5"})
    assert "('n', 1)" in seen(forwards, protocol, {})


def test_the_headers_of_a_stream_are_those_of_each_request(forwards: Addresses) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensor_in = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    tensor_in.set_data_from_numpy(np.ones((1, 1), np.float32))
    with tritonclient.grpc.InferenceServerClient(forwards.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers={"x-user": "ann"})
        for _ in range(2):
            client.async_stream_infer("parameters", [tensor_in])
            result = answers.get(timeout=TIMEOUT_S)
            assert b"('x-user', 'ann')" in result.as_numpy("seen")[0, 0]
        client.stop_stream()
