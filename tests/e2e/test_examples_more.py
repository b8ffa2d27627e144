"""The examples of requests that are grouped by hand, and of whole programs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from client_server import free_port
from exploring import variants
from processes import finished, wait_until
from serving import GPUSERVE, Addresses, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client, serve
from test_examples_calls import printed, program
from tritonclient.grpc import InferenceServerClient

pytestmark = pytest.mark.thorough

ASK_BY_HAND = """
import json, sys
import numpy as np
from colours import nearest

count = np.array([[2]], np.int32)
grey = {"light": np.array([[140]], np.float32), "count": count}
teal = {"name": np.array([[b"teal"]], object), "count": count}
answers = nearest([grey, teal, grey])
print(json.dumps([[name.decode() for name in answer["names"][0]] for answer in answers]))
"""


def test_requests_with_other_inputs_are_grouped_by_hand() -> None:
    command = [sys.executable, "-c", ASK_BY_HAND]
    done = finished(command, cwd=EXAMPLES / "grouping")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["grey", "silver"], ["teal", "grey"], ["grey", "silver"]]


# ---- whole programs ------------------------------------------------------------------------------


def test_a_pipeline_works_on_several_receipts_at_a_time() -> None:
    with serving(*serve("pipeline")) as server:
        sums, same, faster = run_client("pipeline", server)
    assert sums == "2.69 3.79 4.89 5.99 7.09 8.19 9.29 10.39"
    assert same == "the same all at once"
    assert float(faster.split()[0]) > 1.2


@pytest.mark.thorough
def test_throughput_is_measured_for_each_number_in_flight() -> None:
    with serving(*serve("throughput")) as server:
        lines = run_client("throughput", server, "--requests", "300")
    shown = [
        re.fullmatch(r" +(\d+) in flight: +(\d+) requests/s, p50 \S+ ms, p99 \S+ ms", one) for one in lines
    ]
    assert [one and int(one[1]) for one in shown] == [1, 16, 64]
    assert all(one and int(one[2]) > 0 for one in shown)


@contextmanager
def joined(model: str, server: Addresses, end: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """The program that serves a model through another's server, until it is ended by the signal."""
    command = [sys.executable, str(EXAMPLES / "remote" / "join.py"), model, server.http]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == f"{model} is served\n"
        yield
    finally:
        process.send_signal(end)
        process.wait(CLIENT_TIMEOUT_S)
        process.stderr.close()
    assert process.returncode == (0 if end is signal.SIGTERM else -end)


def is_served(model: str, server: Addresses) -> bool:
    with InferenceServerClient(server.grpc) as client:
        return bool(client.is_model_ready(model))


@pytest.mark.parametrize("end", variants(signal.SIGTERM, signal.SIGKILL))
def test_models_of_other_programs_come_and_go(end: signal.Signals) -> None:
    all_three, without_kelvin = printed("remote"), printed("remote", 1)
    with serving(*program("remote")) as server, joined("rankine", server):
        with joined("kelvin", server, end):
            assert run_client("remote", server, "0", "36.6") == all_three
        wait_until(lambda: not is_served("kelvin", server), "the model has gone")
        assert run_client("remote", server, "0", "36.6") == without_kelvin
        with joined("kelvin", server):
            assert run_client("remote", server, "0", "36.6") == all_three


def test_a_program_for_pytriton_runs_as_it_is() -> None:
    ports = [f"--{role}-port={free_port()}" for role in ("http", "grpc", "metrics")]
    folder = EXAMPLES / "pytriton_program"
    address = f"localhost:{ports[1].partition('=')[2]}"
    server = subprocess.Popen([GPUSERVE, "run", str(folder / "add_up.py"), *ports])
    try:
        client = [GPUSERVE, "run", str(folder / "client.py"), "--url", address]
        done = finished(client)
        assert done.stdout.splitlines() == printed("pytriton_program"), done.stderr
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(CLIENT_TIMEOUT_S) == 0
