"""The front is killed behind its ingress processes: their connections are kept, what it had is answered, and
what comes meanwhile waits for the next front.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import pytest
from commands import ask, ingress_metric, ingress_pids, ingress_rows
from operated import LARGE, TIMEOUT_S, Client, InBackground, OperatedServer, Orders, config, model
from processes import children, cpu_s, descendants, measured, n_files, wait_ended, wait_until
from steady_load import message
from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.ingress.ipc_channel import OUTAGE_TIMEOUT_S

CALL = "/inference.GRPCInferenceService/"
N_INGRESS = 2


@pytest.fixture
def server(tmp_path: Path, orders: Orders) -> Iterator[OperatedServer]:
    with operated(tmp_path, orders).until_ended() as found:
        yield found
        (orders.directory / "shut").unlink(missing_ok=True)


def operated(tmp_path: Path, orders: Orders, target: str = "Mortal", **settings: Any) -> OperatedServer:
    settings = {"ingress_processes": N_INGRESS, "host": "127.0.0.1", **settings}
    return OperatedServer(config(tmp_path, model("m", orders, target), **settings))


def kill_front(server: OperatedServer) -> int:
    """Kill the front with SIGKILL; the pid that it had."""
    front = server.front
    os.kill(front, signal.SIGKILL)
    return front


def wait_back(server: OperatedServer, killed: int) -> float:
    """Wait until another front is ready; the seconds."""
    began = time.monotonic()
    wait_until(lambda: server.front not in {0, killed}, "another front is started")
    wait_until(lambda: server.status("/v2/health/ready") == 200, "it is ready")
    return time.monotonic() - began


def wait_back_soon(server: OperatedServer, killed: int) -> None:
    """As ``wait_back``; the test is skipped where the machine is so busy that requests do not wait for it."""
    if wait_back(server, killed) > OUTAGE_TIMEOUT_S - 1.0:
        pytest.skip("the machine is too busy to start a front in time")


def infer_again(client: Client, value: float, width: int = 1) -> Any:
    """Ask until a front is there, over one connection; a busy machine may take longer than requests wait."""
    while (answer := client.infer("m", value, width=width)).status == 503:
        assert "no other has come in time" in answer.error
    return answer


@contextlib.contextmanager
def no_front(server: OperatedServer) -> Iterator[None]:
    """While the block lasts no front comes up: each that is started is killed."""
    over = threading.Event()

    def keep_killing() -> None:
        while not over.is_set():
            if front := server.front:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(front, signal.SIGKILL)
            over.wait(0.01)

    killer = InBackground(keep_killing)
    try:
        yield
    finally:
        over.set()
        killer.result()


@contextlib.contextmanager
def kept_clients(server: OperatedServer, n: int) -> Iterator[list[Client]]:
    """Clients whose connections are made already, and are not made anew."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(n)]
        for one in clients:
            assert one.infer("m", 1.0).output("y") == [2.0]
            one.connection.auto_open = 0
        yield clients


def test_connections_and_ingress_processes_survive_the_front(server: OperatedServer) -> None:
    ingress, workers = ingress_pids(server), server.workers
    n_processes = 1 + len(workers) + N_INGRESS + 1  # the front, and the spare
    wait_until(lambda: len(children(server.pid)) == n_processes, "all are there")
    family = set(children(server.pid))
    with kept_clients(server, 4) as clients:
        for _ in range(2):
            killed = kill_front(server)
            assert [infer_again(one, 3.0).output("y") for one in clients] == [[6.0]] * 4
            wait_back(server, killed)
            assert set(children(server.pid)) - family == {server.front}, "nothing else is started"
        assert ingress_pids(server) == ingress
        assert server.workers == workers
        # The front and both of those that take its place account for the same connections.
        wait_until(lambda: ingress_metric(server, "connections") == [2, 2], "they are counted")
        assert ingress_metric(server, "restarts_total") == [0, 0]
        wait_until(lambda: sum(ingress_metric(server, "requests_total")) >= 12, "those before count")
    wait_until(lambda: ingress_metric(server, "connections") == [0, 0], "they have left")


def test_a_small_request_that_the_front_had_is_run_again_once(server: OperatedServer, orders: Orders) -> None:
    orders.shut()
    asked = [InBackground(server.infer, "m", float(n)) for n in range(1, 4)]
    orders.wait_calls(1)
    wait_back_soon(server, kill_front(server))
    orders.open()
    assert [one.result().output("y") for one in asked] == [[2.0], [4.0], [6.0]]
    orders.shut()
    (n_calls, again) = (len(orders.calls()), InBackground(server.infer, "m", 5.0))
    orders.wait_calls(n_calls + 1)
    wait_back_soon(server, kill_front(server))
    # The worker is at the first call still. This one is given to the second front, and dies with that too.
    wait_until(lambda: waiting(server) == 1, "it came")
    kill_front(server)
    answer = again.result()
    assert (answer.status, "died while it had this request" in answer.error) == (503, True)
    orders.open()


def waiting(server: OperatedServer) -> float:
    """The requests that the front has."""
    queued = server.metric("gpuserve_queue_requests", model="m")
    return queued + server.metric("gpuserve_running_requests", model="m")


@pytest.mark.thorough
def test_a_large_request_that_the_front_had_is_unavailable(server: OperatedServer, orders: Orders) -> None:
    orders.shut()
    with server.client() as client:
        assert client.get("/v2/health/ready").status == 200
        client.connection.auto_open = 0
        asked = InBackground(client.infer, "m", 1.0, width=LARGE)
        orders.wait_calls(1)
        killed = kill_front(server)
        answer = asked.result()
        assert (answer.status, "died while it had this request" in answer.error) == (503, True)
        orders.open()
        assert infer_again(client, 1.0, LARGE).status == 200  # on the same connection
        wait_back(server, killed)
    wait_until(lambda: server.metric("gpuserve_arena_blocks", model="m") == 0, "its memory is free")


@pytest.mark.thorough
def test_grpc_connections_survive_and_what_the_front_had_is_answered(
    server: OperatedServer, orders: Orders
) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(server.addresses["gRPC"], options) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        infer = channel.unary_unary(CALL + "ModelInfer")
        assert infer(message(), timeout=TIMEOUT_S)
        orders.shut()
        small = infer.future(message(), timeout=TIMEOUT_S)
        large = infer.future(large_message(), timeout=TIMEOUT_S)
        wait_until(lambda: waiting(server) == 2, "the front has both")
        killed = kill_front(server)
        wait_until(large.done, "it is answered")
        assert large.code() is grpc.StatusCode.UNAVAILABLE
        orders.open()
        wait_back_soon(server, killed)
        assert small.result()
        assert infer(large_message(), timeout=TIMEOUT_S)
        lost = {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN}
        assert not lost & set(states), states


def large_message() -> bytes:
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1, LARGE // 16])
    request.raw_input_contents.append(np.ones(LARGE // 16, np.float32).tobytes())
    encoded: bytes = request.SerializeToString()
    return encoded


@pytest.mark.thorough
def test_without_a_front_nothing_is_ready_and_requests_wait_for_no_longer_than_they_may(
    server: OperatedServer,
) -> None:
    with kept_clients(server, 3) as clients, no_front(server):
        wait_until(lambda: clients[0].get("/v2/health/ready").status == 400, "it is not ready")
        assert clients[0].get("/v2/models/m/ready").status == 400
        began = time.monotonic()
        waiting = InBackground(clients[1].infer, "m", 1.0)
        index = InBackground(clients[2].get, "/v2")
        timed = clients[0]._call("POST", "/v2/models/m/infer", TIMED, {})
        assert timed.status in {408, 504}, timed.body
        assert time.monotonic() - began < 2.0
        for one in (waiting, index):
            answer = one.result()
            assert (answer.status, "no other has come in time" in answer.error) == (503, True)
        assert time.monotonic() - began < OUTAGE_TIMEOUT_S + 2.0
        began = time.monotonic()
        assert clients[1].infer("m", 1.0).status == 503
        assert time.monotonic() - began < 1.0
    wait_until(lambda: server.status("/v2/health/ready") == 200, "it is ready")
    assert server.infer("m", 2.0).output("y") == [4.0]


TIMED = (
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}],"parameters":{"timeout":300000}}'
)


@pytest.mark.thorough
def test_an_ingress_process_that_dies_without_a_front_is_replaced_when_one_is_there(
    server: OperatedServer,
) -> None:
    first, second = ingress_pids(server)
    with no_front(server):
        wait_until(lambda: server.front == 0, "there is none")
        os.kill(first, signal.SIGKILL)
        assert wait_ended([first], TIMEOUT_S) == []
    wait_until(lambda: server.status("/v2/health/ready") == 200, "it is ready")
    wait_until(lambda: all(row["state"] == "UP" for row in ingress_rows(server)), "both are up")
    now = ingress_pids(server)
    assert first not in now
    assert second in now
    assert ingress_metric(server, "restarts_total") == [1, 0]


@pytest.mark.thorough
def test_models_settings_and_limits_are_those_of_the_new_front(tmp_path: Path, orders: Orders) -> None:
    limits = {"max_connections": 6, "max_connections_per_address": 4}
    with (
        operated(tmp_path, orders, **limits, model_control="explicit").until_ended() as server,
        kept_clients(server, 4) as clients,
    ):
        wait_back_by(clients[0], server, kill_front(server))
        wait_until(lambda: server.status("/v2/health/ready") == 0, "the four that were kept count")
        clients.pop().connection.close()
        wait_until(lambda: server.status("/v2/health/ready") == 200, "there is a place again")
        path = "/v2/repository/models/m/unload"
        assert clients[0]._call("POST", path, b"{}", {}).status == 200
        assert clients[1].infer("m", 1.0).status != 200
        wait_back_by(clients[0], server, kill_front(server), ready=False)
        assert clients[1].infer("m", 1.0).status in {400, 404}
        assert clients[0]._call("POST", path.replace("unload", "load"), b"{}", {}).status == 200
        assert clients[1].infer("m", 4.0).output("y") == [8.0]


def wait_back_by(client: Client, server: OperatedServer, killed: int, *, ready: bool = True) -> None:
    """As ``wait_back``, over a connection that is there."""
    wait_until(lambda: server.front not in {0, killed}, "another front is started")
    path = "/v2/health/ready" if ready else "/v2"
    wait_until(lambda: client.get(path).status == 200, "it is there")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_of_a_server_without_a_front_is_the_end_of_all(
    tmp_path: Path, orders: Orders, number: signal.Signals
) -> None:
    with operated(tmp_path, orders).until_killed() as server:
        family = descendants(server.pid)
        with no_front(server):
            wait_until(lambda: server.front == 0, "there is none")
            server.process.send_signal(number)
            assert server.process.wait(TIMEOUT_S) == 0
        assert wait_ended(family, TIMEOUT_S) == []


@pytest.mark.thorough
def test_an_ingress_process_that_hangs_does_not_hold_up_the_next_front(server: OperatedServer) -> None:
    hanging, _ = ingress_pids(server)
    os.kill(hanging, signal.SIGSTOP)
    try:
        back_s = wait_back(server, kill_front(server))
        measured(f"ready again beside one that hangs after {back_s:.3f} s")
        assert server.infer("m", 1.0).output("y") == [2.0]
    finally:
        os.kill(hanging, signal.SIGCONT)
    wait_until(lambda: all(row["state"] == "UP" for row in ingress_rows(server)), "both are up")
    assert hanging in ingress_pids(server)


def outage(server: OperatedServer) -> tuple[float, float]:
    """Kill the front; the seconds until a new connection is answered, and of processors that all used."""
    before = {pid: cpu_s(pid) for pid in [server.pid, *descendants(server.pid)]}
    began, killed = time.monotonic(), kill_front(server)
    wait_until(lambda: server.status("/v2/models/m") == 200, "a client is answered")
    took_s = time.monotonic() - began
    wait_back(server, killed)
    wait_until(lambda: len(children(server.pid)) == len(before) - 1, "all are there")
    used = {pid: cpu_s(pid) for pid in [server.pid, *descendants(server.pid)]}
    return took_s, sum(now - before.get(pid, 0.0) for pid, now in used.items())


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_outage_costs_as_much_with_ingress_processes_as_with_none(tmp_path: Path, orders: Orders) -> None:
    took: dict[int, list[tuple[float, float]]] = {n: [] for n in (1, 2, 4)}
    with contextlib.ExitStack() as stack:
        servers = {}
        for n in took:
            folder = tmp_path / str(n)
            folder.mkdir()
            servers[n] = stack.enter_context(operated(folder, orders, ingress_processes=n)).wait_ready()
            n_all = 2 + (n + 1 if n > 1 else 0)  # the front, a worker, the ingress processes and the spare
            wait_until(lambda n=n, n_all=n_all: len(children(servers[n].pid)) == n_all, "all are there")
        for _ in range(5):
            for n, one in servers.items():
                took[n].append(outage(one))
        for one in servers.values():
            assert one.end() == 0
    waited = {n: median(one[0] for one in each) for n, each in took.items()}
    used = {n: median(one[1] for one in each) for n, each in took.items()}
    for n in took:
        measured(f"{n} ingress processes: {waited[n]:.3f} s until an answer, {used[n]:.2f} CPU s")
    assert used[4] < 1.5 * used[1]


# ---- under load -----------------------------------------------------------------------------------


class Load:
    """Threads that ask over one HTTP connection each, small and large requests in turn, every answer checked.
    A connection that breaks is an error; a refusal is counted.
    """

    def __init__(self, server: OperatedServer, n: int) -> None:
        self.outcomes: collections.Counter[int] = collections.Counter()
        self._server = server
        self._over = threading.Event()
        self._clients = [InBackground(self._keep_on, n) for n in range(n)]

    def stop(self) -> None:
        self._over.set()
        for one in self._clients:
            one.result()

    def wait_more(self, n: int) -> None:
        seen = self.outcomes[200]
        wait_until(lambda: self.outcomes[200] > seen + n, "traffic goes on")

    def _keep_on(self, number: int) -> None:
        value = float(number)
        with self._server.client() as client:
            while not self._over.is_set():
                value += 100.0
                small = client.infer("m", value)
                assert small.status == 503 or small.output("y") == [2 * value], small
                large = both_ways(client, value)
                assert large is None or (large == 2 * value).all(), large
                client.connection.auto_open = 0
                self.outcomes[small.status] += 1
                self.outcomes[503 if large is None else 200] += 1


def both_ways(client: Client, value: float) -> np.ndarray[Any, Any] | None:
    """A request whose tensors are too large for a message both ways; the output, None where it is refused."""
    array = np.full((1, LARGE // 16), value, np.float32)
    head = (
        f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,{array.size}],"parameters":'
        f'{{"binary_data_size":{array.nbytes}}}}}],"outputs":[{{"name":"y","parameters":{{"binary_data":true}}}}]}}'
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    client.connection.request("POST", "/v2/models/m/infer", head + array.tobytes(), headers)
    response = client.connection.getresponse()
    body = response.read()
    if response.status == 503:
        return None
    assert response.status == 200, body
    return np.frombuffer(body[int(response.getheader("Inference-Header-Content-Length", "0")) :], np.float32)


def rss_nbytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kill_under_load(server: OperatedServer, times: int, n_clients: int) -> None:
    """Kill the front so often while clients ask; nothing is wrong, nothing breaks, and nothing is left."""
    ingress, n_children = ingress_pids(server), len(children(server.pid))
    load, back_s = Load(server, n_clients), []
    load.wait_more(10)
    wait_back(server, kill_front(server))
    load.wait_more(10)
    ask(server.addresses["HTTP"], "events")  # which opens sockets that would count as left open
    files = {pid: n_files(pid) for pid in [server.pid, *ingress]}
    memory = {pid: rss_nbytes(pid) for pid in ingress}
    for _ in range(times - 1):
        back_s.append(wait_back(server, kill_front(server)))
        load.wait_more(20)
    load.stop()
    measured(f"{times} fronts killed: {dict(load.outcomes)}, ready after {median(back_s):.3f} s")
    assert ingress_pids(server) == ingress
    # Each client has one request in the front at a time.
    assert load.outcomes[503] <= 2 * times * n_clients
    wait_until(lambda: ingress_metric(server, "connections") == [0] * len(ingress), "all have left")
    for pid, n in files.items():
        wait_until(lambda pid=pid, n=n: n_files(pid) <= n + 2, "nothing is left open")
    wait_until(lambda: len(children(server.pid)) <= n_children + 1, "no process is left")
    grown = {pid: rss_nbytes(pid) - before for pid, before in memory.items()}
    measured(f"ingress processes have grown by {[n >> 20 for n in grown.values()]} MiB")
    assert all(n < 48 << 20 for n in grown.values())
    assert waiting(server) == 0
    wait_until(lambda: server.metric("gpuserve_arena_blocks", model="m") == 0, "no memory is in use")


@pytest.mark.thorough
def test_the_front_is_killed_under_load(server: OperatedServer) -> None:
    kill_under_load(server, 3, 4)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n_ingress", [2, 4])
def test_the_front_is_killed_again_and_again_under_load(
    tmp_path: Path, orders: Orders, n_ingress: int
) -> None:
    with operated(tmp_path, orders, ingress_processes=n_ingress).until_ended() as server:
        kill_under_load(server, 25, 6)
