"""ModelStreamInfer: decoupled models, and any others, over one stream of a real server."""

from __future__ import annotations

import queue
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from config_file import served
from processes import wait_until
from serving import Addresses
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 15.0
STREAMS = Path(__file__).resolve().parents[1] / "models" / "streams.py"
PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
DECOUPLED = (
    "count",
    "count_async",
    "each_to_its_own",
    "plain",
    "fails_half_way",
    "fails_for_one",
    "endless",
    "waits_for_ever",
    "dies",
)
#: name -> largest batch
UNARY = {"awaited": 4, "LastFirst": 1}


def entry(name: str, **more: Any) -> dict[str, Any]:
    tensor = {"dtype": "int32", "shape": [-1]}
    return {
        "name": name,
        "callable": f"{STREAMS}:{name}",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "max_batch_size": 4,
        **more,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, closed_at: Path) -> Iterator[Addresses]:
    models = [entry(name, decoupled=True) for name in DECOUPLED] + [
        entry(name, max_batch_size=size) for name, size in UNARY.items()
    ]
    with served(tmp_path_factory.mktemp("streams"), models) as addresses:
        yield addresses


class Heard(NamedTuple):
    """A response or an error, as the client's callback gets it."""

    id: str
    value: int | None
    final: bool | None
    error: str
    at_s: float


class Stream:
    """One stream of a tritonclient."""

    def __init__(self, address: str, **options: Any) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(address)
        self._heard: queue.Queue[Heard] = queue.Queue()
        self.client.start_stream(self._on_answer, **options)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, model: str, *values: int, request_id: str = "", **options: Any) -> None:
        tensor = tritonclient.grpc.InferInput("x", [len(values), 1], "INT32")
        tensor.set_data_from_numpy(np.array(values, np.int32)[:, None])
        self.client.async_stream_infer(model, [tensor], request_id=request_id, **options)

    def hear(self) -> Heard:
        return self._heard.get(timeout=TIMEOUT_S)

    def hear_all(self) -> list[Heard]:
        """All up to the one that is the last of its request."""
        heard = [self.hear()]
        while not heard[-1].final and not heard[-1].error:
            heard.append(self.hear())
        return heard

    def _on_answer(self, result: Any, error: Any) -> None:
        now = time.monotonic()
        if error is not None:
            self._heard.put(Heard("", None, None, str(error), now))
            return
        response = result.get_response()
        array = result.as_numpy("y")
        value = None if array is None else int(array.flat[0])
        final = response.parameters["triton_final_response"].bool_param
        self._heard.put(Heard(response.id, value, final, "", now))


@pytest.mark.parametrize("model", ["count", "count_async"])
def test_responses_come_one_after_the_other_and_their_end_is_told_to_who_asks(
    server: Addresses, model: str
) -> None:
    with Stream(server.grpc) as stream:
        stream.ask(model, 3, request_id="a", enable_empty_final_response=True)
        heard = stream.hear_all()
        assert [one.value for one in heard] == [0, 1, 2, None]
        assert [one.final for one in heard] == [False, False, False, True]
        assert {one.id for one in heard} == {"a"}


def test_no_response_at_all(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("count", 0, request_id="none")
        stream.ask("count", 0, request_id="end", enable_empty_final_response=True)
        assert stream.hear()[:3] == ("end", None, True)


def test_a_request_of_several_rows_is_one_request(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("each_to_its_own", 2, 1, enable_empty_final_response=True)
        assert [one.value for one in stream.hear_all()] == [0, 1, None]


def test_a_returned_response_is_the_only_one(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("plain", 1, enable_empty_final_response=True)
        assert [one.value for one in stream.hear_all()] == [7, None]


def test_streams_of_many_requests_interleave(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("endless", 1, request_id="endless")
        for number in range(8):
            stream.ask("count", 20, request_id=str(number), enable_empty_final_response=True)
        heard: list[Heard] = []
        while sum(bool(one.final) for one in heard) < 8:
            heard.append(stream.hear())
        for number in range(8):
            own = [one.value for one in heard if one.id == str(number)]
            assert own == [*range(20), None]


def test_answers_of_other_models_come_in_the_order_of_their_requests(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("LastFirst", 1, request_id="first")
        stream.ask("LastFirst", 2, request_id="second")
        assert [stream.hear()[:3] for _ in range(2)] == [("first", 1, True), ("second", 2, True)]


def test_a_stream_carries_requests_to_any_models(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("awaited", 1)
        assert stream.hear().value == 8
        stream.ask("count", 1)
        assert stream.hear().value == 0


def test_an_error_half_way_comes_after_the_responses_and_the_stream_goes_on(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("fails_half_way", 1)
        heard = stream.hear_all()
        assert [one.value for one in heard] == [0, 1, 2, None]
        assert "no more words" in heard[-1].error
        stream.ask("count", 1)
        assert stream.hear().value == 0


def test_wrong_requests_are_answered_on_the_stream(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("nothing", 1)
        assert "unknown model: 'nothing'" in stream.hear().error
        stream.ask("count", *range(5))
        assert "batch-size must be <= 4" in stream.hear().error
        stream.ask("count", 1)
        assert stream.hear().value == 0


def test_a_client_may_ask_that_the_first_error_ends_the_stream(server: Addresses) -> None:
    request = pb.ModelInferRequest(model_name="nothing")
    with grpc.insecure_channel(server.grpc) as channel:
        call = _open(channel, [request], (("triton_grpc_error", "true"),))
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "unknown model" in (raised.value.details() or "")


def test_what_was_asked_before_the_half_close_is_answered(server: Addresses) -> None:
    request = pb.ModelInferRequest(model_name="count", id="half")
    request.inputs.add(name="x", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.append(np.array([100], np.int32).tobytes())
    with grpc.insecure_channel(server.grpc) as channel:
        answers = list(_open(channel, [request, request]))
    assert len(answers) == 200
    assert {one.infer_response.id for one in answers} == {"half"}
    assert not any(one.error_message for one in answers)


def test_a_body_that_is_no_request_is_an_error_on_the_stream(server: Addresses) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stream = channel.stream_stream(PATH, lambda body: body, pb.ModelStreamInferResponse.FromString)
        answers = list(stream(iter([b"\xff\xff"]), timeout=TIMEOUT_S))
    assert ["malformed" in one.error_message for one in answers] == [True]


def test_an_error_says_which_request_it_is_about(server: Addresses) -> None:
    wrong = pb.ModelInferRequest(model_name="count", id="a")
    wrong.parameters["triton_other"].bool_param = True  # no request comes of it
    unknown = pb.ModelInferRequest(model_name="unknown", id="b")
    refused = pb.ModelInferRequest(model_name="count", model_version="1", id="c")
    with grpc.insecure_channel(server.grpc) as channel:
        answers = list(_open(channel, [wrong, unknown, refused]))
    assert [bool(one.error_message) for one in answers] == [True] * 3
    assert [one.infer_response.id for one in answers] == ["a", "b", "c"]


@pytest.mark.parametrize("model", ["endless", "waits_for_ever"])
def test_a_client_that_cancels_stops_the_generator(server: Addresses, closed_at: Path, model: str) -> None:
    closed_at.unlink(missing_ok=True)
    with Stream(server.grpc) as stream:
        stream.ask(model, 1)
        stream.hear()
    wait_until(closed_at.exists, "the generator is closed")


def test_a_stream_may_have_a_deadline(server: Addresses, closed_at: Path) -> None:
    closed_at.unlink(missing_ok=True)
    with Stream(server.grpc, stream_timeout=0.3) as stream:
        stream.ask("waits_for_ever", 1)
        assert stream.hear().value == 0
        assert "DEADLINE_EXCEEDED" in stream.hear().error
    started = time.monotonic()
    while not closed_at.exists():
        assert time.monotonic() - started < TIMEOUT_S


def test_one_request_of_a_stream_may_have_a_timeout(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        stream.ask("waits_for_ever", 1, timeout=200_000)
        assert stream.hear().value == 0
        assert "Deadline Exceeded" in stream.hear().error
        stream.ask("count", 1)
        assert stream.hear().value == 0


def test_a_worker_that_dies_half_way_is_told_and_replaced(server: Addresses) -> None:
    with Stream(server.grpc) as stream:
        for _ in range(2):
            stream.ask("dies", 1)
            assert stream.hear().value == 0
            assert "the worker process died" in stream.hear().error


def test_unary_calls_to_a_decoupled_model_are_refused(server: Addresses) -> None:
    tensor = tritonclient.grpc.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.int32))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
        with pytest.raises(InferenceServerException, match=text) as raised:
            client.infer("count", [tensor])
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    body = b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}'
    request = urllib.request.Request(f"http://{server.http}/v2/models/count/infer", body)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=TIMEOUT_S)
    assert refused.value.code == 501
    assert b"HTTP end point doesn't support models with decoupled transaction policy" in refused.value.read()
    refused.value.close()


def _open(channel: grpc.Channel, requests: list[Any], metadata: Any = ()) -> Any:
    stream = channel.stream_stream(
        PATH, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    return stream(iter(requests), metadata=metadata, timeout=TIMEOUT_S)
