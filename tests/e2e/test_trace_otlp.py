"""Mode "opentelemetry": the spans that a collector receives."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import MODELS, model, tensor, write_config
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from serving import GPUSERVE, Addresses, serving
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 20.0
#: Far more than ten small requests take, and half of what an exporter waits for its collector.
PATIENCE_S = 5.0
CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP; every span it was sent is in ``spans``, with its resource's attributes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.spans: queue.Queue[tuple[Any, dict[str, str]]] = queue.Queue()


class Export(BaseHTTPRequestHandler):
    """One export."""

    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for one in request.resource_spans:
            resource = {pair.key: pair.value.string_value for pair in one.resource.attributes}
            for scope in one.scope_spans:
                for span in scope.spans:
                    self.server.spans.put((span, resource))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Addresses]:
    folder = tmp_path_factory.mktemp("traced")
    entry = model("a", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8)
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    seeing = model("sees", "", [tensor("x", "FP32", 1)], [tensor("seen", "BYTES", 1)], 2)
    seeing |= {"callable": f"{MODELS.parent / 'traced.py'}:traced", "kwargs": {"url": url}}
    seeing["batching"] = {"max_queue_delay_us": 60_000_000, "preferred_batch_sizes": [2]}
    trace = {
        "level": ["TIMESTAMPS"],
        "rate": 1,
        "mode": "opentelemetry",
        "url": url,
        "resource": {"service.name": "tested"},
    }
    config = write_config(folder, [entry, seeing], host="127.0.0.1", trace=trace)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
        with serving(GPUSERVE, "serve", str(config)) as addresses:
            yield addresses


def infer(addresses: Addresses, protocol: str, name: str = "a", **headers: str) -> None:
    library = CLIENTS[protocol]
    address = addresses.grpc if protocol == "grpc" else addresses.http
    with library.InferenceServerClient(address) as client:
        x = library.InferInput("x", [1, 1], "FP32")
        x.set_data_from_numpy(np.zeros((1, 1), np.float32))
        client.infer(name, [x], headers=headers, request_id="7")


def spans(collector: Collector, number: int) -> dict[str, tuple[Any, dict[str, str]]]:
    """The next spans, by name."""
    found = [collector.spans.get(timeout=TIMEOUT_S) for _ in range(number)]
    return {span.name: (span, resource) for span, resource in found}


@pytest.mark.parametrize("protocol", CLIENTS)
def test_a_request_is_a_tree_of_spans(traced: Addresses, collector: Collector, protocol: str) -> None:
    infer(traced, protocol)
    found = spans(collector, 5)
    tree = {name: span for name, (span, _) in found.items()}
    assert set(tree) == {"InferRequest", "a", "queue", "compute", "cpu#0"}
    assert tree["InferRequest"].parent_span_id == b""
    parents = {"a": "InferRequest", "queue": "a", "compute": "a", "cpu#0": "compute"}
    for child, parent in parents.items():
        assert tree[child].parent_span_id == tree[parent].span_id
        assert tree[child].trace_id == tree[parent].trace_id
        assert tree[child].start_time_unix_nano >= tree[parent].start_time_unix_nano
        assert tree[child].end_time_unix_nano <= tree[parent].end_time_unix_nano
    attributes = {one.key: one.value for one in tree["InferRequest"].attributes}
    assert attributes["triton.model_name"].string_value == "a"
    assert attributes["triton.request_id"].string_value == "7"
    assert found["a"][1]["service.name"] == "tested"


@pytest.mark.parametrize("protocol", CLIENTS)
def test_the_callers_span_is_the_parent(traced: Addresses, collector: Collector, protocol: str) -> None:
    infer(traced, protocol, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")  # its caller does not trace this one
    infer(traced, protocol, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01", tracestate="vendor=value")
    found = spans(collector, 5)
    request = found["InferRequest"][0]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert request.trace_state == "vendor=value"
    assert {span.trace_id.hex() for span, _ in found.values()} == {TRACE_ID}
    assert collector.spans.empty()


@pytest.mark.parametrize("protocol", [*CLIENTS, "stream"])
def test_requests_that_no_model_receives_are_spans(
    traced: Addresses, collector: Collector, protocol: str
) -> None:
    if protocol == "stream":
        message = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="none", id="7")
        with grpc.insecure_channel(traced.grpc) as channel:
            stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            (answer,) = stub.ModelStreamInfer(iter([message]))
            assert "unknown model" in answer.error_message
    else:
        with pytest.raises(InferenceServerException, match="unknown model"):
            infer(traced, protocol, "none", traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
    found = spans(collector, 3)
    assert set(found) == {"InferRequest", "none", "queue"}
    request = found["InferRequest"][0]
    assert (request.status.code, request.status.message) == (2, "NOT_FOUND")
    if protocol != "stream":
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize("path", ["a/infer", "a/generate", "none/generate"])
def test_malformed_requests_are_spans(traced: Addresses, collector: Collector, path: str) -> None:
    with pytest.raises(HTTPError):
        urlopen(Request(f"http://{traced.http}/v2/models/{path}", b"{"), timeout=TIMEOUT_S)
    found = spans(collector, 3)
    assert set(found) == {"InferRequest", path.partition("/")[0], "queue"}
    assert found["InferRequest"][0].status.code == 2


def test_a_malformed_message_is_a_span(traced: Addresses, collector: Collector) -> None:
    with grpc.insecure_channel(traced.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError):
            call(b"\xff")
    assert set(spans(collector, 3)) == {"InferRequest", "?", "queue"}


def test_the_settings_are_those_of_the_mode(traced: Addresses, collector: Collector) -> None:
    with tritonclient.http.InferenceServerClient(traced.http) as client:
        assert client.get_trace_settings("a") == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "1",
            "trace_count": "-1",
            "trace_mode": "opentelemetry",
            "url": f"http://127.0.0.1:{collector.server_port}/v1/traces",
            "resource": "service.name=tested",
        }


def see(addresses: Addresses, rows: int, traceparent: str) -> Any:
    """What the callable of one request saw."""
    with tritonclient.http.InferenceServerClient(addresses.http) as client:
        x = tritonclient.http.InferInput("x", [rows, 1], "FP32")
        x.set_data_from_numpy(np.zeros((rows, 1), np.float32))
        result = client.infer("sees", [x], headers={"traceparent": traceparent}, request_id="7")
        return json.loads(result.as_numpy("seen")[0, 0])


def own_spans(collector: Collector, number: int) -> list[Any]:
    """The next spans of requests for the model that sees, without those of the queue."""
    return [collector.spans.get(timeout=TIMEOUT_S)[0] for _ in range(number)]


def test_a_callable_continues_the_trace_of_its_request(traced: Addresses, collector: Collector) -> None:
    seen, ids, carrier = see(traced, 2, f"00-{TRACE_ID}-{SPAN_ID}-01")
    tree = {name: span for name, (span, _) in spans(collector, 6).items()}
    assert tree["work"].trace_id.hex() == TRACE_ID
    assert tree["work"].parent_span_id == tree["compute"].span_id
    assert seen == [{"traceparent": f"00-{TRACE_ID}-{tree['compute'].span_id.hex()}-01"}]
    assert ids == ["7"]
    assert carrier["traceparent"] == f"00-{TRACE_ID}-{tree['work'].span_id.hex()}-01"
    seen, ids, _ = see(traced, 2, f"00-{TRACE_ID}-{SPAN_ID}-00")  # its caller does not trace this one
    assert (seen, ids) == ([], [])
    (work,) = own_spans(collector, 1)
    assert (work.name, work.parent_span_id) == ("work", b"")


def test_the_work_of_a_batch_links_the_traces_of_its_requests(
    traced: Addresses, collector: Collector
) -> None:
    callers = [f"00-{TRACE_ID[:-1]}{one}-{SPAN_ID}-01" for one in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(see, [traced] * 2, [1, 1], callers))
    assert found[0] == found[1], "they ran in one batch"
    first, second = (one["traceparent"].split("-") for one in found[0][0])
    assert {first[1], second[1]} == {one.split("-")[1] for one in callers}
    received = own_spans(collector, 12)
    batch, work = (next(one for one in received if one.name == name) for name in ("batch", "work"))
    assert (batch.trace_id.hex(), batch.parent_span_id.hex()) == (first[1], first[2])
    assert [(one.trace_id.hex(), one.span_id.hex()) for one in batch.links] == [(second[1], second[2])]
    assert work.parent_span_id == batch.span_id
    computes = {one.span_id.hex(): one.trace_id.hex() for one in received if one.name == "compute"}
    assert computes == {first[2]: first[1], second[2]: second[1]}


def test_open_metrics_have_traces_as_exemplars(traced: Addresses, collector: Collector) -> None:
    infer(traced, "http", traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
    spans(collector, 5)
    asked = {"accept": "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5"}
    with urlopen(Request(f"http://{traced.http}/metrics", headers=asked), timeout=TIMEOUT_S) as page:
        assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        families = {one.name: one for one in text_string_to_metric_families(page.read().decode())}
    assert families["gpuserve_requests_success"].type == "counter"
    for name in ("gpuserve_request_duration_seconds", "gpuserve_queue_duration_seconds"):
        samples = [one for one in families[name].samples if one.labels["model"] == "a"]
        buckets = [one for one in samples if one.exemplar is not None]
        assert {"trace_id": TRACE_ID} in [one.exemplar.labels for one in buckets]
        assert all(one.value > 0 for one in buckets), "an exemplar is counted in its bucket"
    with urlopen(f"http://{traced.http}/metrics", timeout=TIMEOUT_S) as page:
        assert page.headers["content-type"].startswith("text/plain")
        assert "trace_id" not in page.read().decode()


@pytest.mark.thorough
def test_requests_do_not_wait_for_a_collector_that_is_gone(tmp_path: Path) -> None:
    entry = model("a", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8)
    trace = {
        "level": ["TIMESTAMPS"],
        "rate": 1,
        "mode": "opentelemetry",
        "url": "http://127.0.0.1:1/v1/traces",
    }
    with serving(GPUSERVE, "serve", str(write_config(tmp_path, [entry], trace=trace))) as addresses:
        started = time.monotonic()
        for _ in range(10):
            infer(addresses, "http")
        assert time.monotonic() - started < PATIENCE_S, "they waited"
