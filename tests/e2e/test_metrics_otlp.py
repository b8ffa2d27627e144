"""``metrics_otlp_url``: what a collector of OpenTelemetry receives, and one that says nothing."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from config_file import model, tensor, write_config
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from operated import OperatedServer
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 20.0
REQUESTS = 3


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP; ``wait`` gives the first export that is as expected."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.exports: list[Any] = []
        self.news = threading.Condition()

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], Any]:
        """The metrics by name, and the resource."""
        with self.news:
            assert self.news.wait_for(lambda: any(map(wanted, map(by_name, self.exports))), TIMEOUT_S)
            found = next(one for one in self.exports if wanted(by_name(one)))
        return by_name(found), found.resource_metrics[0].resource


def by_name(export: Any) -> dict[str, Any]:
    (resource,) = export.resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "gpuserve"
    return {one.name: one for one in scope.metrics}


class Export(BaseHTTPRequestHandler):
    """One export."""

    server: Collector

    def do_POST(self) -> None:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        with self.server.news:
            self.server.exports.append(request)
            self.server.news.notify_all()
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(TIMEOUT_S)


def config(folder: Path, port: int, **server: Any) -> Path:
    entry = model("a", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8)
    url = f"http://127.0.0.1:{port}/v1/metrics"
    server = {"metrics_otlp_period_s": 0.2, "lame_duck_s": 0, **server}
    return write_config(folder, [entry], host="127.0.0.1", metrics_otlp_url=url, **server)


def ask(server: OperatedServer) -> None:
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'
    url = f"http://{server.addresses['HTTP']}/v2/models/a/infer"
    with urllib.request.urlopen(url, body, TIMEOUT_S) as got:
        assert got.status == 200


def labels(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


def has_all(found: dict[str, Any]) -> bool:
    points = found["gpuserve_requests_success_total"].sum.data_points
    return any(point.as_double == REQUESTS for point in points)


def test_a_collector_is_sent_the_numbers_of_the_metrics_page(tmp_path: Path, collector: Collector) -> None:
    trace = {"resource": {"service.name": "tested"}}
    began_ns = time.time_ns()
    with OperatedServer(config(tmp_path, collector.server_port, trace=trace)) as server:
        server.wait_ready()
        for _ in range(REQUESTS):
            ask(server)
        found, resource = collector.wait(has_all)
        url = f"http://{server.addresses['metrics']}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
            families = {one.name: one for one in text_string_to_metric_families(page.read().decode())}
        server.end()
    assert {pair.key: pair.value.string_value for pair in resource.attributes}["service.name"] == "tested"

    counter = found["gpuserve_requests_success_total"]
    assert counter.sum.is_monotonic
    assert counter.sum.aggregation_temporality == 2  # cumulative
    (point,) = counter.sum.data_points
    assert labels(point) == {"model": "a", "version": "1"}
    assert began_ns < point.start_time_unix_nano < point.time_unix_nano < time.time_ns()

    histogram = found["gpuserve_request_duration_seconds"].histogram
    assert histogram.aggregation_temporality == 2
    (timed,) = histogram.data_points
    samples = families["gpuserve_request_duration_seconds"].samples
    bounds = [one.labels["le"] for one in samples if one.name.endswith("_bucket")]
    assert [*map(str, timed.explicit_bounds), "+Inf"] == bounds
    assert (timed.count, sum(timed.bucket_counts)) == (REQUESTS, REQUESTS)
    assert timed.sum == next(one.value for one in samples if one.name.endswith("_sum"))
    assert not timed.HasField("min")

    assert labels(found["gpuserve_worker_up"].gauge.data_points[0])["instance"] == "cpu#0"
    assert not [name for name in found if name.startswith("nv_inference_")]


@pytest.mark.thorough
def test_a_collector_that_says_nothing_holds_nobody_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with OperatedServer(config(tmp_path, port, metrics_otlp_period_s=0.1)) as server:
            server.wait_ready()
            silent.settimeout(TIMEOUT_S)
            held, _ = silent.accept()  # it has begun to send, and waits
            with held:
                for _ in range(REQUESTS):
                    began_at = time.monotonic()
                    ask(server)
                    assert time.monotonic() - began_at < 2.0
                began_at = time.monotonic()
                assert server.end() == 0
                assert time.monotonic() - began_at < 6.0


@pytest.mark.thorough
def test_a_collector_that_is_away_is_told_of_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with OperatedServer(config(tmp_path, port)) as server:
        server.wait_ready()
        server.wait_log("failed to send metrics to metrics_otlp_url")
        ask(server)
        assert server.end() == 0
        told = [one["msg"] for one in server.messages() if "failed to send metrics" in one["msg"]]
        said = [one for one in server.messages() if one["level"] in {"warning", "error"}]
    assert len(told) == len(said) == 1
