"""What clients see that come while a server stops: an answer, or nobody there; never a lost connection."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import threading
from pathlib import Path

import pytest
from operated import TIMEOUT_S, InBackground, OperatedServer, Orders, config, model
from tls import make_certificate

N_VALUES = 4 << 20
SMALL_BUFFER_NBYTES = 4096


def stalled(port: int) -> socket.socket:
    """A client that has begun to read a large answer, and stops."""
    head = {
        "inputs": [
            {
                "name": "x",
                "shape": [1, N_VALUES],
                "datatype": "FP32",
                "parameters": {"binary_data_size": 4 * N_VALUES},
            }
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_NBYTES)
    client.settimeout(TIMEOUT_S)
    client.connect(("127.0.0.1", port))
    client.sendall(
        b"POST /v2/models/m/infer HTTP/1.1\r\nhost: a\r\ninference-header-content-length: %d\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(text), len(text) + 4 * N_VALUES, text)
    )
    client.sendall(bytes(4 * N_VALUES))
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def comes_by(port: int) -> int | None:
    """The status that a new client gets; None: nobody listens any more."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        client.request("GET", "/v2/health/live")
        return client.getresponse().status
    except ConnectionRefusedError:
        return None
    finally:
        client.close()


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["HTTP", "gRPC", "metrics"])
def test_a_port_refuses_as_soon_as_nobody_would_answer(tmp_path: Path, role: str) -> None:
    orders = Orders(tmp_path / "orders")
    with OperatedServer(config(tmp_path, model("m", orders, max_batch_size=1))).until_killed() as server:
        ports = {name: int(address.rpartition(":")[2]) for name, address in server.addresses.items()}
        with stalled(ports["HTTP"]):
            server.process.send_signal(signal.SIGTERM)
            statuses = []
            while (status := comes_by(ports[role])) is not None:
                statuses.append(status)
            # The stalled client holds the server up: nobody listens, and it is not gone.
            assert server.process.poll() is None
            assert set(statuses) <= {200}
        assert server.process.wait(TIMEOUT_S) == 0


def is_served(port: int) -> bool:
    """Whether somebody listens, as far as the kernel says, or has just listened."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionResetError:  # the listener was closed while the kernel connected
        return True
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("ingress_processes", [1, 2])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_client_that_has_connected_and_not_sent_yet_is_answered(
    tmp_path: Path, scheme: str, ingress_processes: int
) -> None:
    both = str(make_certificate(tmp_path))
    tls = {"tls_certfile": both, "tls_keyfile": both} if scheme == "https" else {}
    settings = {"host": "127.0.0.1", "ingress_processes": ingress_processes, **tls}
    with OperatedServer(
        config(tmp_path, model("m", Orders(tmp_path / "orders")), **settings)
    ).until_killed() as server:
        port = int(server.addresses["HTTP"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain:
            server.process.send_signal(signal.SIGTERM)
            while is_served(port):
                pass
            client = http.client.HTTPConnection("localhost")
            client.sock = plain
            if tls:
                context = ssl.create_default_context(cafile=both)
                client.sock = context.wrap_socket(plain, server_hostname="localhost")
            client.request("GET", "/v2/health/live")
            assert client.getresponse().status == 200
            client.close()
        assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.thorough
def test_tls_clients_that_leave_while_the_server_stops_are_no_defect(tmp_path: Path) -> None:
    both = str(make_certificate(tmp_path))
    context = ssl.create_default_context(cafile=both)
    settings = {"host": "127.0.0.1", "ingress_processes": 2, "lame_duck_s": 0.2}
    settings |= {"tls_certfile": both, "tls_keyfile": both}
    with OperatedServer(
        config(tmp_path, model("m", Orders(tmp_path / "orders")), **settings)
    ).until_killed() as server:
        port = int(server.addresses["HTTP"].rpartition(":")[2])

        def come_and_leave() -> None:
            with contextlib.suppress(OSError):  # at the latest when nobody listens any more
                while True:
                    with (
                        socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain,
                        context.wrap_socket(plain, server_hostname="localhost") as secured,
                    ):
                        secured.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                        if secured.recv(4096):
                            served.release()

        served = threading.Semaphore(0)
        clients = [InBackground(come_and_leave) for _ in range(48)]
        assert all(served.acquire(timeout=TIMEOUT_S) for _ in range(200))
        assert server.end() == 0
        for one in clients:
            one.result()
        assert not [line for line in server.log if "Traceback" in line]
