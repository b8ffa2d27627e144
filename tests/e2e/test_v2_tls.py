"""TLS and client certificates on every port; certificates renewed while it runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import model, served, tensor
from processes import finished, wait_until
from serving import Addresses
from tls import Authority, Pair
from tritonclient.grpc import service_pb2 as pb

TIMEOUT_S = 15.0
PORTS = ("http", "grpc", "metrics")
EXPIRY = "gpuserve_certificate_expiry_seconds"


class Files:
    """An authority, the server's pair, and a client's; and those of somebody else."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "authority")
        self.server, self.client = self.authority.issue("server"), self.authority.issue("client")
        self.renewed = self.authority.issue("renewed")
        self.stranger = Authority(folder / "stranger").issue("stranger")
        self.trusted = self.authority.certificate

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"tls_certfile": str(self.server.certificate), "tls_keyfile": str(self.server.key), **more}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def serve(folder: Path, **settings: Any) -> contextlib.AbstractContextManager[Addresses]:
    entries = [model("m", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4)]
    return served(folder, entries, **settings)


@pytest.fixture(scope="module")
def server(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    with serve(tmp_path_factory.mktemp("tls"), **files.settings()) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def mutual(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """A server that asks clients for a certificate."""
    settings = files.settings(tls_client_ca=str(files.trusted))
    with serve(tmp_path_factory.mktemp("mutual"), **settings) as addresses:
        yield addresses


def client_context(trusted: Path, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(*map(str, own))
    return context


def get(address: str, path: str, context: ssl.SSLContext) -> int:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def channel(address: str, trusted: Path, own: Pair | None = None) -> Any:
    key, certificate = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted.read_bytes(), key, certificate))


def is_ready(address: str, trusted: Path, own: Pair | None = None) -> bool:
    with channel(address, trusted, own) as connected:
        call = connected.unary_unary("/inference.GRPCInferenceService/ServerReady")
        return bool(pb.ServerReadyResponse.FromString(call(b"", timeout=TIMEOUT_S)).ready)


def shown_certificate(address: str) -> str:
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S)


# ---- TLS ----------------------------------------------------------------------------------------


def test_every_port_speaks_tls(server: Addresses, files: Files) -> None:
    context = client_context(files.trusted)
    assert get(server.http, "/v2/health/ready", context) == 200
    assert get(server.metrics, "/metrics", context) == 200
    assert is_ready(server.grpc, files.trusted)
    assert is_ready(server.http, files.trusted)  # which speaks both protocols
    for port in PORTS:
        assert shown_certificate(getattr(server, port)).strip() in files.server.certificate.read_text()


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_a_client_that_trusts_somebody_else_does_not_connect(
    server: Addresses, files: Files, port: str
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        get(getattr(server, port), "/v2/health/ready", client_context(files.stranger.certificate))


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    "first", [b"GET /v2/health/live HTTP/1.1\r\nhost: h\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"]
)
def test_what_is_no_tls_is_refused_and_the_port_goes_on(
    server: Addresses, files: Files, port: str, first: bytes
) -> None:
    host, _, number = getattr(server, port).rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(number)), TIMEOUT_S) as plain:
            plain.sendall(first)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while block := plain.recv(4096):
                    answer += block
        assert not answer.startswith(b"HTTP/1.1 2")
        assert b"live" not in answer
    assert shown_certificate(getattr(server, port))


def test_grpc_without_tls_is_refused(server: Addresses) -> None:
    with grpc.insecure_channel(server.grpc) as plain:
        call = plain.unary_unary("/inference.GRPCInferenceService/ServerLive")
        with pytest.raises(grpc.RpcError) as error:
            call(b"", timeout=TIMEOUT_S)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(server: Addresses, files: Files, protocol: str) -> None:
    kind: Any = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    options: dict[str, Any] = {"ssl": True}
    if protocol == "grpc":
        options["root_certificates"] = str(files.trusted)
    else:
        options["ssl_context_factory"] = lambda: client_context(files.trusted)
    tensor_in = kind.InferInput("x", [1, 3], "FP32")
    row = np.array([[1, 2, 3]], np.float32)
    tensor_in.set_data_from_numpy(row)
    with kind.InferenceServerClient(getattr(server, protocol), **options) as client:
        np.testing.assert_array_equal(client.infer("m", [tensor_in]).as_numpy("y"), row)


CLIENTS = """
import asyncio, sys
import numpy as np
from gpuserve.client import AsyncioModelClient, ClientTimeoutError, ModelClient

url, trusted = sys.argv[1:]
row = np.ones(3, np.float32)
options = {} if trusted == "trusted" else {"init_timeout_s": 0.5}

async def ask():
    async with AsyncioModelClient(url, "m", **options) as client:
        return await client.infer_sample(row)

def ask_blocking():
    with ModelClient(url, "m", **options) as client:
        return client.infer_sample(row)

for one in (ask_blocking, lambda: asyncio.run(ask())):
    try:
        print(one()["y"].tolist())
    except ClientTimeoutError:
        print("refused")
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("trusted", "expected"),
    [(True, "[1.0, 1.0, 1.0]"), pytest.param(False, "refused", marks=pytest.mark.thorough)],
)
def test_our_own_clients_trust_whom_the_system_trusts(
    server: Addresses, files: Files, protocol: str, trusted: bool, expected: str
) -> None:
    roots = {"SSL_CERT_FILE": str(files.trusted), "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(files.trusted)}
    url = f"{protocol}s://{getattr(server, protocol).replace('127.0.0.1', 'localhost')}"
    command = [sys.executable, "-c", CLIENTS, url, "trusted" if trusted else ""]
    done = finished(command, env=roots if trusted else {})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [expected] * 2


# ---- certificates of clients --------------------------------------------------------------------


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_http_takes_clients_with_a_certificate(mutual: Addresses, files: Files, port: str) -> None:
    address = getattr(mutual, port)
    assert get(address, "/v2/health/ready", client_context(files.trusted, files.client)) == 200
    for own in (None, files.stranger):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.BadStatusLine)):
            get(address, "/v2/health/ready", client_context(files.trusted, own))


def test_grpc_takes_clients_with_a_certificate(mutual: Addresses, files: Files) -> None:
    assert is_ready(mutual.grpc, files.trusted, files.client)
    for own in (None, files.stranger):
        with pytest.raises(grpc.RpcError) as error:
            is_ready(mutual.grpc, files.trusted, own)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_metrics_page_says_how_long_the_certificate_is_valid(server: Addresses, files: Files) -> None:
    url, context = f"https://{server.metrics}/metrics", client_context(files.trusted)
    with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as got:
        (line,) = [one for one in got.read().decode().splitlines() if one.startswith(EXPIRY + " ")]
    until = ssl.cert_time_to_seconds("Jan  1 00:00:00 2099 GMT")  # as ``Authority`` issues them
    assert float(line.split()[1]) == pytest.approx(until - time.time(), abs=TIMEOUT_S)


# ---- handshakes -----------------------------------------------------------------------------------


def test_connections_without_a_handshake_are_counted_and_hold_nobody_up(
    server: Addresses, files: Files
) -> None:
    host, _, port = server.http.rpartition(":")
    url, context = f"https://{server.metrics}/metrics", client_context(files.trusted)

    def n_open() -> float:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as got:
            lines = got.read().decode().splitlines()
        return float(next(one for one in lines if one.startswith("gpuserve_connections ")).split()[1])

    before = n_open()
    with contextlib.ExitStack() as stack:
        for said in (b"", b"\x16\x03\x01\x02\x00\x01"):  # the beginning of a ClientHello
            for _ in range(50):
                one = stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
                one.sendall(said)
        wait_until(lambda: n_open() >= before + 100, "all are counted")
        assert get(server.http, "/v2/health/ready", context) == 200
        assert is_ready(server.grpc, files.trusted)
    wait_until(lambda: n_open() <= before, "none is counted any more")


# ---- some ports, renewal, mistakes --------------------------------------------------------------


@pytest.mark.thorough
def test_tls_on_one_port_alone(files: Files, tmp_path: Path) -> None:
    with serve(tmp_path, **files.settings(tls_ports=["grpc"])) as addresses:
        assert is_ready(addresses.grpc, files.trusted)
        for address, path in ((addresses.http, "/v2/health/ready"), (addresses.metrics, "/metrics")):
            connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
            with contextlib.closing(connection):
                connection.request("GET", path)
                assert connection.getresponse().status == 200


@pytest.mark.thorough
def test_a_renewed_certificate_is_for_new_connections(files: Files, tmp_path: Path) -> None:
    mine = Pair(tmp_path / "c.pem", tmp_path / "k.pem")
    files.server.copy_to(mine)
    settings = {"tls_certfile": "c.pem", "tls_keyfile": "k.pem"}
    with serve(tmp_path, **settings) as addresses, channel(addresses.grpc, files.trusted) as connected:
        watch = connected.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        assert next(watch) == b"\x08\x01"
        files.renewed.copy_to(mine)
        deadline = time.monotonic() + 30
        expected = [ssl.PEM_cert_to_DER_cert(files.renewed.certificate.read_text())] * len(PORTS)
        shown: list[bytes] = []
        while shown != expected:
            assert time.monotonic() < deadline, "the certificate was not renewed"
            shown = [ssl.PEM_cert_to_DER_cert(shown_certificate(getattr(addresses, port))) for port in PORTS]
        assert watch.is_active()  # a connection with the old certificate goes on
        watch.cancel()
        assert is_ready(addresses.grpc, files.trusted)


@pytest.mark.parametrize("keeps", [True, False])
def test_large_responses_are_encrypted_part_by_part(server: Addresses, files: Files, keeps: bool) -> None:
    """The turns of the event loop stay short, and later responses and the end come after the last part."""
    n = 6 << 20
    described = {"name": "x", "datatype": "FP32", "shape": [1, n], "parameters": {"binary_data_size": 4 * n}}
    asked = {"inputs": [described], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    head, values = json.dumps(asked).encode(), np.arange(n, dtype=np.int32).tobytes()
    lines = [
        "POST /v2/models/m/infer HTTP/1.1",
        "Host: localhost",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(values)}",
        "Connection: keep-alive" if keeps else "Connection: close",
    ]
    request = "\r\n".join([*lines, "", ""]).encode() + head + values
    host, port = server.http.split(":")
    with (
        socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
        client_context(files.trusted).wrap_socket(plain, server_hostname="localhost") as sock,
    ):
        sock.sendall(request + b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * keeps)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.read().endswith(values)
        if keeps:
            later = http.client.HTTPResponse(sock)
            later.begin()
            assert later.status == 200
        else:
            assert sock.recv(1) == b""
