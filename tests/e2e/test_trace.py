"""Trace settings over HTTP and gRPC, and the trace files that they produce."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import MODELS, model, tensor, write_config
from processes import wait_until
from serving import GPUSERVE, Addresses, serving
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 15.0
CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
STREAMS = MODELS.with_name("streams.py")
NETWORK = {
    "http": (["HTTP_RECV_START", "HTTP_RECV_END"], ["HTTP_SEND_START", "HTTP_SEND_END"]),
    "grpc": (["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"], ["GRPC_SEND_START", "GRPC_SEND_END"]),
}
INSIDE = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "INFER_RESPONSE_COMPLETE",
    "REQUEST_END",
]
CLEARED = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
ALL = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}


class Traced(NamedTuple):
    """A server that traces nothing yet, and where it would write."""

    addresses: Addresses
    file: Path


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    entries = [
        model(name, "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8) for name in ("a", "b")
    ]
    counts = {"name": "counts", "callable": f"{STREAMS}:count", "decoupled": True, "max_batch_size": 1}
    counts |= {"inputs": [tensor("x", "INT32", 1)], "outputs": [tensor("y", "INT32", 1)]}
    chat = {"name": "chat", "callable": f"{MODELS.with_name('openai_models.py')}:Talker", "openai": True}
    config = write_config(
        folder,
        [*entries, counts, chat],
        host="127.0.0.1",
        trace={"file": str(folder / "trace.json")},
    )
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield Traced(addresses, folder / "trace.json")


def client(addresses: Addresses, protocol: str) -> Any:
    return CLIENTS[protocol].InferenceServerClient(addresses.grpc if protocol == "grpc" else addresses.http)


@pytest.fixture(params=CLIENTS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def asked(traced: Traced, protocol: str) -> Iterator[Any]:
    """A client; afterwards all settings are those of the start."""
    with client(traced.addresses, protocol) as made:
        yield made
        made.update_trace_settings("a", CLEARED)
        made.update_trace_settings(settings=CLEARED)


def plain(answer: Any) -> dict[str, Any]:
    """An answer of either protocol as HTTP has it."""
    if isinstance(answer, dict):
        return answer
    values = {name: list(one.value) for name, one in answer.settings.items()}
    return {name: texts if name == "trace_level" else texts[0] for name, texts in values.items()}


def infer(asked: Any, protocol: str, name: str = "a", **more: Any) -> None:
    x = CLIENTS[protocol].InferInput("x", [1, 3], "FP32")
    x.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
    asked.infer(name, [x], **more)


def eventually(path: Path, traces: int) -> list[list[dict[str, Any]]]:
    """The events of so many traces, as soon as they are in the file."""
    wait_until(lambda: len(traces_in(path)) >= traces, f"{path.name} has {traces} traces", TIMEOUT_S)
    return list(traces_in(path).values())


def traces_in(path: Path) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # it may be in the middle of a write
        for event in json.loads(path.read_text()):
            found.setdefault(event["id"], []).append(event)
    return found


def next_traces(traced: Traced, number: int) -> Any:
    """What is written into the one file from now on."""
    before = len(eventually(traced.file, 0)) if traced.file.exists() else 0
    return lambda: eventually(traced.file, before + number)[before:]


def moments(trace: list[dict[str, Any]]) -> list[str]:
    """The names of a trace's moments, which are in their order."""
    (timestamps,) = [one["timestamps"] for one in trace if "timestamps" in one]
    at = [one["ns"] for one in timestamps]
    assert at == sorted(at)
    return [one["name"] for one in timestamps]


def test_settings_of_the_server_and_of_a_model(traced: Traced, asked: Any) -> None:
    initial = {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": str(traced.file),
        "trace_mode": "triton",
    }
    assert plain(asked.get_trace_settings()) == plain(asked.get_trace_settings("a")) == initial
    changed = initial | {"trace_rate": "7"}
    assert plain(asked.update_trace_settings(settings={"trace_rate": "7"})) == changed
    of_a = changed | {"trace_level": ["TIMESTAMPS", "TENSORS"]}
    given = {"trace_level": ["TENSORS", "TIMESTAMPS"]}
    assert plain(asked.update_trace_settings("a", given)) == of_a
    assert plain(asked.get_trace_settings("b")) == changed
    assert plain(asked.update_trace_settings("a", {"trace_level": None})) == changed
    assert plain(asked.update_trace_settings(settings={"trace_rate": None})) == initial


@pytest.mark.parametrize(
    ("name", "settings", "statuses", "text"),
    [
        ("nope", {}, {"400", "StatusCode.INVALID_ARGUMENT"}, "Request for unknown model : nope"),
        (
            None,
            {"trace_file": "x"},
            {"501", "StatusCode.UNIMPLEMENTED"},
            "trace file location can not be updated through network protocol",
        ),
        (
            "a",
            {"trace_rate": "x"},
            {"400", "StatusCode.INVALID_ARGUMENT"},
            "Unable to parse 'trace_rate', got: x",
        ),
    ],
)
def test_settings_that_cannot_be(
    asked: Any, name: str | None, settings: dict[str, Any], statuses: set[str], text: str
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        asked.update_trace_settings(name, settings)
    assert raised.value.message() == text
    assert raised.value.status() in statuses


def test_the_moments_of_a_request(traced: Traced, asked: Any, protocol: str) -> None:
    written = next_traces(traced, 1)
    asked.update_trace_settings("a", ALL)
    infer(asked, protocol, request_id="7")
    infer(asked, protocol, "b")  # is not traced
    (trace,) = written()
    number = trace[0]["id"]
    assert trace[0] == {"id": number, "model_name": "a", "model_version": 1, "request_id": "7"}
    received, sent = NETWORK[protocol]
    assert moments(trace) == received + INSIDE + sent


def test_the_tensors_of_a_request(traced: Traced, asked: Any, protocol: str) -> None:
    written = next_traces(traced, 1)
    asked.update_trace_settings(settings=ALL | {"trace_level": ["TENSORS"]})
    infer(asked, protocol)
    (trace,) = written()
    shown = {"data": "1.0,2.0,3.0", "shape": "1,3", "dtype": "FP32"}
    assert [(one["activity"], one["tensor"]) for one in trace[1:]] == [
        ("TENSOR_QUEUE_INPUT", {"name": "x", **shown}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "y", **shown}),
    ]


def test_one_in_so_many_until_the_count_is_used_up(traced: Traced, asked: Any, protocol: str) -> None:
    written = next_traces(traced, 2)
    asked.update_trace_settings(settings=ALL | {"trace_rate": "3", "trace_count": "2"})
    for number in range(1, 13):
        infer(asked, protocol, request_id=str(number))
    assert [trace[0]["request_id"] for trace in written()] == ["3", "6"]
    assert plain(asked.get_trace_settings("b"))["trace_count"] == "0"


def test_so_many_traces_a_file(traced: Traced, asked: Any, protocol: str) -> None:
    taken = len(list(traced.file.parent.glob("trace.json.*")))
    asked.update_trace_settings("a", ALL | {"log_frequency": "2"})
    for number in range(1, 5):
        infer(asked, protocol, request_id=str(number))
    files = [Path(f"{traced.file}.{taken + one}") for one in range(2)]
    ids = [[trace[0]["request_id"] for trace in eventually(one, 2)] for one in files]
    assert ids == [["1", "2"], ["3", "4"]]


def test_every_request_of_a_stream_is_a_trace(traced: Traced) -> None:
    written = next_traces(traced, 3)
    with client(traced.addresses, "grpc") as asked:
        asked.update_trace_settings("a", ALL)
        answers: list[Any] = []
        asked.start_stream(lambda result, error: answers.append(error or result))
        for number in range(3):
            x = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            x.set_data_from_numpy(np.array([[number]], np.float32))
            asked.async_stream_infer("a", [x], request_id=str(number))
        asked.stop_stream()
        asked.update_trace_settings("a", CLEARED)
    traces = written()
    assert [trace[0]["request_id"] for trace in traces] == ["0", "1", "2"]
    received, sent = NETWORK["grpc"]
    assert {tuple(moments(trace)) for trace in traces} == {tuple(received + INSIDE + sent)}
    assert len(answers) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v2/models/a/generate", {"x": [1.0]}),
        ("v2/models/a/generate_stream", {"x": [1.0]}),
        ("v2/models/counts/generate_stream", {"x": [2]}),
        ("v1/chat/completions", CHAT),
        ("v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
def test_a_request_of_other_endpoints_is_a_trace(traced: Traced, path: str, body: dict[str, Any]) -> None:
    written = next_traces(traced, 1)
    with client(traced.addresses, "http") as asked:
        asked.update_trace_settings(settings=ALL)
        url = f"http://{traced.addresses.http}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            assert answer.read()
        asked.update_trace_settings(settings=CLEARED)
    (trace,) = written()
    received, sent = NETWORK["http"]
    assert moments(trace) == received + INSIDE + sent


def test_a_failed_request_is_a_trace_as_well(traced: Traced) -> None:
    written = next_traces(traced, 1)
    with client(traced.addresses, "http") as asked:
        asked.update_trace_settings("a", ALL)
        with pytest.raises(InferenceServerException):
            infer(asked, "http", request_id="late", timeout=1)
        asked.update_trace_settings("a", CLEARED)
    (trace,) = written()
    assert trace[0]["request_id"] == "late"
    assert moments(trace)[-4:] == [*INSIDE[-2:], *NETWORK["http"][1]]


def test_a_refused_request_is_a_trace_as_well(traced: Traced, protocol: str) -> None:
    written = next_traces(traced, 1)
    with client(traced.addresses, protocol) as asked:
        asked.update_trace_settings("a", ALL)
        nine = CLIENTS[protocol].InferInput("x", [9, 1], "FP32")
        nine.set_data_from_numpy(np.zeros((9, 1), np.float32))
        with pytest.raises(InferenceServerException, match="batch-size must be <= 8"):
            asked.infer("a", [nine], request_id="refused")
        asked.update_trace_settings("a", CLEARED)
    (trace,) = written()
    received, sent = NETWORK[protocol]
    assert trace[0]["request_id"] == "refused"
    assert moments(trace) == [*received, *INSIDE[:2], *INSIDE[-2:], *sent]


def test_log_settings(traced: Traced, protocol: str) -> None:
    initial = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    kinds = {"log_info": "bool_param", "log_verbose_level": "uint32_param", "log_format": "string_param"}
    with client(traced.addresses, protocol) as asked:
        given = {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601", "log_error": None}
        answer = asked.update_log_settings(given)
        if protocol == "grpc":
            assert isinstance(answer, service_pb2.LogSettingsResponse)
            assert {name: getattr(answer.settings[name], kind) for name, kind in kinds.items()} == {
                name: given[name] for name in kinds
            }
            asked.update_log_settings({name: initial[name] for name in kinds})
        else:
            assert answer == initial | {name: given[name] for name in kinds}
            assert asked.update_log_settings(initial | {"log_file": None}) == initial
            assert list(asked.get_log_settings()) == list(initial)


@pytest.mark.parametrize(
    ("settings", "statuses", "text"),
    [
        (
            {"log_file": "x"},
            {"501", "StatusCode.UNIMPLEMENTED"},
            "log file location can not be updated through network protocol",
        ),
        (
            {"log_format": "x"},
            {"503", "StatusCode.INVALID_ARGUMENT"},
            "invalid argument for",
        ),
    ],
)
def test_log_settings_that_cannot_be(
    traced: Traced, protocol: str, settings: dict[str, Any], statuses: set[str], text: str
) -> None:
    with (
        client(traced.addresses, protocol) as asked,
        pytest.raises(InferenceServerException, match=text) as raised,
    ):
        asked.update_log_settings(settings)
    assert raised.value.status() in statuses
