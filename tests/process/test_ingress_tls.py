"""Ingress processes with TLS: clients' certificates, renewed certificates, and unfinished handshakes."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from commands import status
from config_file import model, tensor, write_config
from operated import TIMEOUT_S, OperatedServer
from processes import wait_until
from tls import Authority, Pair
from tritonclient.grpc import service_pb2 as pb


class Scene:
    """A server with ingress processes that asks clients for certificates of its authority."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder / "authority")
        self.trusted = authority.certificate
        self.own, self.client = Pair(folder / "c.pem", folder / "k.pem"), authority.issue("client")
        self.renewed = authority.issue("renewed")
        self.renewed_again = authority.issue("again")
        self.stranger = Authority(folder / "stranger").issue("stranger")
        authority.issue("server").copy_to(self.own)
        entries = [model("m", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4)]
        tls = {"tls_certfile": "c.pem", "tls_keyfile": "k.pem", "tls_client_ca": str(self.trusted)}
        file = write_config(
            folder,
            entries,
            host="127.0.0.1",
            ingress_processes=2,
            tls_ports=["http", "grpc"],
            lame_duck_s=0,
            **tls,
        )
        self.server = OperatedServer(file)

    def wait_ready(self) -> None:
        """Wait until the server is ready, and strip the schemes from its addresses."""
        self.server.wait_ready()
        for role, where in self.server.addresses.items():
            self.server.addresses[role] = where.rpartition("//")[2]

    def context(self, own: Pair | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.trusted))
        if own is not None:
            context.load_cert_chain(*map(str, own))
        return context

    def get(self, own: Pair | None = None, path: str = "/v2/health/ready") -> int:
        host, _, port = self.server.addresses["HTTP"].rpartition(":")
        connection = http.client.HTTPSConnection(
            host, int(port), timeout=TIMEOUT_S, context=self.context(own)
        )
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status

    def is_ready(self, own: Pair | None) -> bool:
        """Return the outcome of a gRPC call."""
        key, chain = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
        credentials = grpc.ssl_channel_credentials(self.trusted.read_bytes(), key, chain)
        with grpc.secure_channel(self.server.addresses["gRPC"], credentials) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
            return bool(pb.ServerReadyResponse.FromString(call(b"", timeout=TIMEOUT_S)).ready)

    @contextlib.contextmanager
    def held(self) -> Iterator[ssl.SSLSocket]:
        """A client's connection with a certificate, which has had one answer and stays open."""
        host, _, port = self.server.addresses["HTTP"].rpartition(":")
        with (
            socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
            self.context(self.client).wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert secured.recv(64).startswith(b"HTTP/1.1 200")
            yield secured

    def shown(self) -> str:
        """Return the certificate that the server presents to a new connection."""
        with self.held() as secured:
            certificate = secured.getpeercert(binary_form=True)
        assert certificate is not None
        return ssl.DER_cert_to_PEM_cert(certificate).strip()

    def rows(self) -> list[dict[str, Any]]:
        return list(status(self.server.addresses["metrics"])["server"]["doors"])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("tls"))
    with made.server:
        made.wait_ready()
        yield made
        assert made.server.end() == 0


def n_open(scene: Scene) -> int:
    return sum(row["connections"] for row in scene.rows())


def test_clients_with_a_certificate_are_served_by_both_protocols(scene: Scene) -> None:
    with scene.held():  # else the same process may have the fewest connections each time
        assert [scene.get(scene.client) for _ in range(4)] == [200] * 4
        assert [scene.is_ready(scene.client) for _ in range(2)] == [True, True]
    assert scene.get(scene.client) == 200
    wait_until(lambda: all(row["requests"] for row in scene.rows()), "both processes have served")


def test_clients_without_a_certificate_are_refused(scene: Scene) -> None:
    for own in (None, scene.stranger):
        with pytest.raises((ssl.SSLError, OSError)):
            scene.get(own)
        with pytest.raises(grpc.RpcError) as error:
            scene.is_ready(own)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: n_open(scene) == 0, "they have no place any more")


def test_an_unfinished_handshake_is_counted_and_delays_no_other(scene: Scene) -> None:
    host, _, port = scene.server.addresses["HTTP"].rpartition(":")
    with contextlib.ExitStack() as stack:
        for said in (b"", b"\x16\x03\x01\x02\x00\x01"):  # the beginning of a ClientHello
            for _ in range(10):
                one = stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
                one.sendall(said)
        wait_until(lambda: n_open(scene) == 20, "all are counted")
        assert scene.get(scene.client) == 200
    wait_until(lambda: n_open(scene) == 0, "none is counted any more")


def test_renewed_certificates_are_used_by_every_process_and_by_new_ones(scene: Scene) -> None:
    first = scene.shown()
    assert first in scene.own.certificate.read_text()
    scene.renewed.copy_to(scene.own)
    renewed = scene.own.certificate.read_text()
    wait_until(lambda: scene.shown() in renewed, "the new one is used")
    scene.server.wait_log("loaded renewed TLS certificate")
    wait_until(lambda: [scene.shown() in renewed for _ in range(2)] == [True, True], "used by both processes")
    victim = scene.rows()[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: all(one["state"] == "UP" and one["pid"] != victim for one in scene.rows()), "another")
    assert all(scene.shown() in renewed for _ in range(4))


@pytest.mark.thorough
def test_connections_survive_the_front_and_certificates_renewed_without_one_are_used(scene: Scene) -> None:
    host, _, port = scene.server.addresses["HTTP"].rpartition(":")
    context = scene.context(scene.client)
    kept = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_S, context=context)
    with contextlib.closing(kept):
        for _ in range(2):
            kept.request("GET", "/v2")
            answer = kept.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
            kept.auto_open = 0
            if scene.own.certificate.read_text() != scene.renewed_again.certificate.read_text():
                os.kill(scene.server.front, signal.SIGKILL)
                scene.renewed_again.copy_to(scene.own)
        now = scene.own.certificate.read_text()
        wait_until(lambda: [scene.shown() in now for _ in range(2)] == [True, True], "both processes use it")
