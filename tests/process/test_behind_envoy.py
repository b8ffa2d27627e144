"""Servers behind the real Envoy, as ``gpuserve export envoy`` configures it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from envoys import EnvoyInFront, fetched, in_front_of
from http2_peer import data
from http2_wire import Wire
from operated import TIMEOUT_S, Client, InBackground, OperatedServer, Orders, config, model
from processes import wait_until
from steady_load import message
from tls import Authority
from tritonclient.grpc import service_pb2

CALL = "/inference.GRPCInferenceService/"
POST = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]
GRPC = [("content-type", "application/grpc"), ("te", "trailers")]
#: Rows of floats. Shapes are free here, so 16 MiB of a request are kept.
REPEATED_WIDTH, TOO_WIDE = 1 << 20, 6 << 20


class Scene:
    """Two servers, each with orders of its own, and Envoy before them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Scene:
        with contextlib.ExitStack() as stack:
            self.orders = [Orders(self._folder / f"orders{number}") for number in range(2)]
            files = [self._config(number) for number in range(2)]
            self.servers = [stack.enter_context(OperatedServer(file)) for file in files]
            for server in self.servers:
                server.wait_ready()
            self.envoy = stack.enter_context(in_front_of(self._folder / "envoy", files[0], self.servers))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _config(self, number: int) -> Path:
        folder = self._folder / f"server{number}"
        folder.mkdir()
        # Envoy takes what is on the address of every pod; here each has ports of its own.
        return config(folder, model("m", self.orders[number]), host="0.0.0.0", http_port=8000, grpc_port=8001)

    def kill(self, number: int) -> None:
        """All processes of a server at once."""
        for pid in self.servers[number].family():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Scene(tmp_path_factory.mktemp("scene")) as made:
        yield made


@pytest.fixture
def envoy(scene: Scene) -> EnvoyInFront:
    return scene.envoy


def infer(address: str, value: float, width: int = 1) -> list[Any]:
    with Client(address) as client:
        answer = client.infer("m", value, width=width)
    assert answer.status == 200, answer.body[:300]
    return [value * 2] if width > 1 else answer.output("y")


def infer_grpc(address: str, value: float) -> list[Any]:
    x = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.full((1, 1), value, np.float32))
    with tritonclient.grpc.InferenceServerClient(address) as client:
        found: list[Any] = client.infer("m", [x], client_timeout=TIMEOUT_S).as_numpy("y").ravel().tolist()
    return found


def stream(address: str) -> list[Any]:
    """The answers of a stream that the client closes at once."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(CALL + "ModelStreamInfer")
        parts = [
            service_pb2.ModelStreamInferResponse.FromString(part)
            for part in call(iter([message(), message()]), timeout=TIMEOUT_S)
        ]
    assert not any(one.error_message for one in parts)
    return [np.frombuffer(one.infer_response.raw_output_contents[0], np.float32)[0] for one in parts]


def test_both_servers_get_requests(scene: Scene) -> None:
    before = [len(one.calls()) for one in scene.orders]
    for value in range(40):
        assert infer(scene.envoy.http, float(value)) == [2.0 * value]
        assert infer_grpc(scene.envoy.grpc, float(value)) == [2.0 * value]
    after = [len(one.calls()) for one in scene.orders]
    assert all(late - early >= 10 for early, late in zip(before, after, strict=True))


def test_a_large_request_passes(envoy: EnvoyInFront) -> None:
    assert infer(envoy.http, 3.0, width=TOO_WIDE) == [6.0]


def test_the_deadline_of_a_client_reaches_the_server(scene: Scene) -> None:
    for one in scene.orders:
        one.shut()
    try:
        with Wire(scene.envoy.grpc) as wire:
            fields = [*POST, (":path", CALL + "ModelInfer"), *GRPC, ("grpc-timeout", "300m")]
            body = b"\0" + len(message()).to_bytes(4) + message()
            wire.send(wire.peer.headers(1, fields) + data(1, body, end=True))
            wire.read_until(lambda: wire.peer.response(1).ended)
            (refusal,) = map(dict, wire.peer.response(1).heads)
            assert refusal["grpc-status"] == "4"
            assert "0.3 s" in refusal["grpc-message"]
    finally:
        for one in scene.orders:
            one.open()


def test_what_is_about_one_server_is_not_repeated_and_admin_is_not_passed_on(envoy: EnvoyInFront) -> None:
    status, body = fetched(envoy.http, "/v2/admin/status")[:2]
    assert (status, json.loads(body)) == (404, {"error": "Not Found"})
    assert fetched(envoy.http, "/v2/models/m")[0] == 200
    assert json.loads(fetched(envoy.http, "/v2/models/other")[1])["error"]


def test_its_status_is_told_on_a_port_of_its_own(envoy: EnvoyInFront) -> None:
    assert fetched(envoy.status, "/ready")[0] == 200
    assert (
        'envoy_cluster_upstream_rq_total{envoy_cluster_name="grpc"}' in fetched(envoy.status, "/metrics")[1]
    )
    envoy.ask_admin("/healthcheck/fail", "POST")
    try:
        assert fetched(envoy.status, "/ready")[0] == 503
        client = http.client.HTTPConnection(envoy.http, timeout=TIMEOUT_S)
        client.request("GET", "/v2/health/ready")
        answer = client.getresponse()  # served, and told to go elsewhere
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        client.close()
    finally:
        envoy.ask_admin("/healthcheck/ok", "POST")
    assert fetched(envoy.status, "/quitquitquit")[0] == 404


@pytest.mark.thorough
def test_what_a_server_dies_with_is_answered_by_the_other(tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        at = scene.envoy
        scene.orders[0].shut()
        asked = [InBackground(infer, at.http, float(value)) for value in range(8)]
        asked += [InBackground(infer_grpc, at.grpc, float(value)) for value in range(8)]
        asked += [InBackground(infer, at.http, 3.0, width=REPEATED_WIDTH) for _ in range(4)]
        streams = [InBackground(stream, at.grpc) for _ in range(8)]
        scene.orders[0].wait_calls(1)
        scene.orders[1].wait_calls(1)
        scene.kill(0)
        assert [one.result() for one in asked[:16]] == [[2.0 * value] for value in [*range(8), *range(8)]]
        assert [one.result() for one in asked[16:]] == [[6.0]] * 4
        assert [one.result() for one in streams] == [[6.0, 6.0]] * 8
        assert at.counter("upstream_rq_retry") > 0
        scene.kill(1)
        wait_until(lambda: at.counter("membership_healthy") == 0, "both are known to be gone")
        status, body = fetched(at.http, "/v2/models/m")
        assert (status, list(json.loads(body))) == (503, ["error"])
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="UNAVAILABLE"):
            infer_grpc(at.grpc, 1.0)


@pytest.mark.thorough
def test_tls_on_both_sides_and_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    folder = tmp_path / "certificate"
    folder.mkdir()
    first, renewed = authority.issue("first"), authority.issue("renewed")
    (folder / "ca.crt").write_bytes(authority.certificate.read_bytes())
    put(folder, first)
    keys = {
        "tls_certfile": folder / "tls.crt",
        "tls_keyfile": folder / "tls.key",
        "tls_client_ca": folder / "ca.crt",
    }
    settings = {key: str(path) for key, path in keys.items()} | {"host": "0.0.0.0", "health_port": 8003}
    file = config(tmp_path, model("m", Orders(tmp_path / "orders")), **settings)
    with (
        OperatedServer(file, "--health-port", "0").until_killed() as server,
        in_front_of(tmp_path / "envoy", file, [server], tls_folder=str(folder)) as envoy,
    ):
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with pytest.raises(OSError, match=r"certificate required|reset|EOF"):
            asked_over_tls(envoy.http, context)
        context.load_cert_chain(*map(str, first))
        assert asked_over_tls(envoy.http, context) == [6.0]
        shown = ssl.get_server_certificate(("localhost", int(envoy.http.rpartition(":")[2])))
        assert shown.strip() in first.certificate.read_text()
        put(folder, renewed)
        wait_until(lambda: shown_certificate(envoy.http) in renewed.certificate.read_text(), "the new one")
        assert asked_over_tls(envoy.http, context) == [6.0]


def put(folder: Path, pair: Any) -> None:
    """Renew the files, as those of a mounted Secret are: all at once."""
    for name, source in (("tls.crt", pair.certificate), ("tls.key", pair.key)):
        fresh = folder / f".{name}"
        fresh.write_bytes(source.read_bytes())
        fresh.rename(folder / name)


def shown_certificate(address: str) -> str:
    return ssl.get_server_certificate(("localhost", int(address.rpartition(":")[2]))).strip()


def asked_over_tls(address: str, context: ssl.SSLContext) -> list[Any]:
    client = http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=context)
    with contextlib.closing(client):
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]}
        client.request("POST", "/v2/models/m/infer", json.dumps(body))
        answer = client.getresponse()
        outputs = json.loads(answer.read())["outputs"]
    return next(list(one["data"]) for one in outputs if one["name"] == "y")
