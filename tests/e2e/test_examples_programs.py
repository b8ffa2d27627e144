"""The examples of whole programs: pipelines, load, programs that join a server, a program for PyTriton."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from client_server import free_port
from serving import GPUSERVE, Addresses, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client, serve
from test_examples_calls import program


def test_a_pipeline_works_on_several_receipts_at_a_time() -> None:
    with serving(*serve("pipeline")) as server:
        sums, same, faster = run_client("pipeline", server)
    assert sums == "2.69 3.79 4.89 5.99 7.09 8.19 9.29 10.39"
    assert same == "the same all at once"
    assert float(faster.split()[0]) > 1.2


def test_throughput_is_measured_for_each_number_in_flight() -> None:
    with serving(*serve("throughput")) as server:
        lines = run_client("throughput", server, "--in-flight", "1", "8", "--requests", "200")
    shown = [
        re.fullmatch(r" +(\d+) in flight: +(\d+) requests/s, p50 \S+ ms, p99 \S+ ms", one) for one in lines
    ]
    assert [one and int(one[1]) for one in shown] == [1, 8]
    assert all(one and int(one[2]) > 0 for one in shown)


@contextmanager
def joined(server: Addresses) -> Iterator[None]:
    """The program that serves a model through another's server."""
    command = [sys.executable, str(EXAMPLES / "remote" / "join.py"), server.http]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == "kelvin is served\n"
        yield
    finally:
        process.terminate()
        process.wait(CLIENT_TIMEOUT_S)
        process.stderr.close()
    assert process.returncode == 0


def test_a_model_of_another_program_comes_and_goes() -> None:
    own = "fahrenheit: 32.00, 97.88"
    with serving(*program("remote")) as server:
        with joined(server):
            assert run_client("remote", server, "0", "36.6") == [own, "kelvin: 273.15, 309.75"]
        assert run_client("remote", server, "0", "36.6") == [own, "kelvin: nobody serves it"]


def test_a_program_for_pytriton_runs_as_it_is() -> None:
    ports = [f"--{role}-port={free_port()}" for role in ("http", "grpc", "metrics")]
    folder = EXAMPLES / "pytriton_program"
    address = f"localhost:{ports[1].partition('=')[2]}"
    server = subprocess.Popen([GPUSERVE, "run", str(folder / "add_up.py"), *ports])
    try:
        client = [GPUSERVE, "run", str(folder / "client.py"), "--url", address]
        done = subprocess.run(client, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
        assert done.stdout.splitlines() == [
            "119.75 at 0%: 119.75",
            "119.75 at 7%: 128.13",
            "119.75 at 19%: 142.50",
        ], done.stderr
    finally:
        server.terminate()
        assert server.wait(CLIENT_TIMEOUT_S) == 0
