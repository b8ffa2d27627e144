"""``gpuserve.Response``: what a callable tells its clients beside the tensors, over both protocols."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server

from gpuserve import DynamicBatcher, ModelConfig, Response, Server

LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)
SAID = {"flag": True, "count": LARGEST, "least": SMALLEST, "share": 0.25, "text": "é"}
WRONG: list[Any] = [1 << 63, np.float32(1), None, b"x", [1], "\udce9"]


def told(requests: Any) -> Any:
    return [Response({"OUTPUT_1": one["INPUT_1"]}, parameters=SAID) for one in requests]


def its_own(requests: Any) -> Any:
    """A parameter for each request of a batch, but none for those with a negative value."""
    return [
        {"OUTPUT_1": one["INPUT_1"]}
        if one["INPUT_1"].flat[0] < 0
        else Response({"OUTPUT_1": one["INPUT_1"]}, {"value": float(one["INPUT_1"].flat[0])})
        for one in requests
    ]


def wrong(requests: Any) -> Any:
    value = WRONG[int(requests[0]["INPUT_1"].flat[0])]
    return [Response({"OUTPUT_1": one["INPUT_1"]}, parameters={"p": value}) for one in requests]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    waits = ModelConfig(batcher=DynamicBatcher(max_queue_delay_microseconds=20_000))
    with free_server() as made:
        made.bind("told", told, **FLOATS_IN_AND_OUT, isolation="thread")
        made.bind("its_own", its_own, **FLOATS_IN_AND_OUT, config=waits, isolation="thread")
        made.bind("wrong", wrong, **FLOATS_IN_AND_OUT, isolation="thread")
        made.run()
        yield made


def over_http(server: Server, model: str, value: float) -> Any:
    tensor = {"name": "INPUT_1", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    url = f"{server.addresses['http']}/v2/models/{model}/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer).get("parameters", {})


def over_grpc(server: Server, model: str, value: float) -> Any:
    address = server.addresses["grpc"].rpartition("/")[2]
    with tritonclient.grpc.InferenceServerClient(address) as client:
        tensor = tritonclient.grpc.InferInput("INPUT_1", (1, 1), "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        parameters = client.infer(model, [tensor]).get_response().parameters
        return {key: getattr(one, one.WhichOneof("parameter_choice")) for key, one in parameters.items()}


@pytest.mark.parametrize("ask_for", [over_http, over_grpc])
def test_parameters_of_every_kind_are_told(server: Server, ask_for: Any) -> None:
    assert ask_for(server, "told", 1) == SAID


@pytest.mark.parametrize("ask_for", [over_http, over_grpc])
def test_each_request_of_a_batch_is_told_its_own(server: Server, ask_for: Any) -> None:
    values = [float(n) if n % 3 else -1.0 for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda value: ask_for(server, "its_own", value), values))
    assert found == [{} if value < 0 else {"value": value} for value in values]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_no_protocol_can_carry_is_an_error_that_names_it(server: Server, number: int) -> None:
    with pytest.raises(Refused, match="Response parameter 'p' of model 'wrong' is the ") as refused:
        ask(server, "wrong", number)
    assert refused.value.status == 500
    assert (
        "expected a bool, an int of 64 bits, a float or a str, by a name that is a str" in refused.value.text
    )
