"""Ensembles whose models come, go and die; and what the front has to do with what passes between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from config_file import served, write_config
from ensembles import ensemble, ensembles, member, members, step, tensor
from leaks import own_name
from operated import InBackground
from processes import command_line, descendants, measured, wait_until
from serving import FREE_PORTS, GPUSERVE, JSON_LOG, Addresses, wait_until_ready
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.thorough

Client = tritonclient.grpc.InferenceServerClient
LARGE = 1 << 18
#: In a message, and in an arena.
WIDTHS = 3, LARGE
TIMEOUT_S = 20.0


class Server(NamedTuple):
    addresses: Addresses
    config: Path
    fifo: Path


def life(fifo: Path) -> list[dict[str, Any]]:
    """Ensembles of which a worker can be caught at work."""
    return [
        *members(str(fifo)),
        *ensembles(),
        ensemble("late", step("who", "a", x="x"), step("Gate", "b", x="x"), step("added", "y", a="a", b="b")),
        ensemble("queued", step("who", "a", x="x"), step("Gate", "b", x="a"), step("doubled", "y", x="b")),
        ensemble("placed", step("doubled", "y", x="x"), step("plus_one", "z", x="y"), outputs=two("y", "z")),
    ]


def two(*names: str) -> list[dict[str, Any]]:
    return [tensor(name) for name in names]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("life")
    resource_tracker.ensure_running()  # which tritonclient's shared memory starts, and nobody ends
    os.mkfifo(folder / "fifo")
    traces = {"file": str(folder / "trace.json")}
    models = life(folder / "fifo")
    with served(folder, models, model_control="explicit", trace=traces) as addresses:
        yield Server(addresses, folder / "config.yaml", folder / "fifo")


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.addresses.grpc) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_block_is_left(server: Server) -> Iterator[None]:
    server.fifo.with_name("fifo.pid").unlink(missing_ok=True)
    yield
    wait_until(lambda: not in_use(server), "every block is free")


def in_use(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.addresses.metrics}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    names = ("gpuserve_arena_blocks{", "gpuserve_running_requests{", "gpuserve_queue_requests{")
    pairs = [line.rpartition(" ") for line in lines if line.startswith(names)]
    return {name: float(value) for name, _, value in pairs if float(value)}


def requests_at(server: Server, model: str) -> float:
    found = in_use(server)
    names = [f'gpuserve_{kind}_requests{{model="{model}",version="1"}}' for kind in ("running", "queue")]
    return sum(found.get(name, 0) for name in names)


def given(x: Any) -> Any:
    made = tritonclient.grpc.InferInput("x", list(x.shape), "FP32")
    made.set_data_from_numpy(x)
    return made


def ask(server: Server, model: str, x: Any, output: str = "y") -> Any:
    with Client(server.addresses.grpc) as client:
        return client.infer(model, [given(x)], client_timeout=TIMEOUT_S).as_numpy(output)


def row(width: int, value: float) -> Any:
    return np.full((1, width), value, np.float32)


def open_gate(server: Server) -> None:
    with open(server.fifo, "wb"):
        pass


def worker_of_who(server: Server) -> int:
    return int(ask(server, "who", row(1, 0), "pid").item())


# ---- deaths ---------------------------------------------------------------------------------


def end_worker_of_who(server: Server, client: Client) -> None:
    """Kill it, and wait for the next."""
    pid = worker_of_who(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: client.is_model_ready("who") and worker_of_who(server) != pid, "a new worker")


def test_what_a_dead_worker_has_answered_is_still_read(server: Server, client: Client) -> None:
    worker_of_who(server)
    before = executions(client, "who")
    calls = {width: InBackground(ask, server, "late", row(width, 3)) for width in WIDTHS}
    wait_until(lambda: requests_at(server, "Gate") == 2, "the other step runs")
    wait_until(lambda: executions(client, "who") == before + 2, "the first step has answered")
    end_worker_of_who(server, client)
    with Gatekeeper(server):
        for width, call in calls.items():
            np.testing.assert_array_equal(call.result(), row(width, 6))


def executions(client: Client, model: str) -> int:
    (found,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(found.get("execution_count", 0))


def test_what_a_dead_worker_has_answered_waits_for_its_reader(server: Server, client: Client) -> None:
    asked = [(width, number) for number in (1, 2, 3) for width in WIDTHS]
    calls = []
    for n_before, (width, number) in enumerate(asked):  # the first has the gate, and the others wait for it
        calls.append(InBackground(ask, server, "queued", row(width, number)))
        wait_until(lambda n=n_before + 1: requests_at(server, "Gate") == n, "it is at the gate")
    end_worker_of_who(server, client)
    with Gatekeeper(server):
        for (width, number), call in zip(asked, calls, strict=True):
            np.testing.assert_array_equal(call.result(), row(width, 2 * number))


class Gatekeeper:
    """Holds the gate open for whoever comes."""

    def __init__(self, server: Server) -> None:
        program = f"while True:\n with open({str(server.fifo)!r}, 'wb'): pass"
        self._process = subprocess.Popen([sys.executable, "-S", "-c", program])

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def kill_at_gate(server: Server) -> None:
    """End the process that waits at the gate, once there is one."""
    file = server.fifo.with_name("fifo.pid")
    wait_until(lambda: file.exists() and file.read_text(), "the step runs")
    os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_step_runs_again_where_its_inputs_were_in_the_message(server: Server) -> None:
    call = InBackground(ask, server, "queued", row(3, 1))
    kill_at_gate(server)
    with Gatekeeper(server):
        np.testing.assert_array_equal(call.result(), row(3, 2))


def test_a_step_is_lost_where_its_worker_could_write_to_its_inputs(server: Server) -> None:
    call = InBackground(ask, server, "queued", row(LARGE, 1))
    kill_at_gate(server)
    with pytest.raises(InferenceServerException, match="in ensemble 'queued', model 'Gate': the worker"):
        call.result()
    with Gatekeeper(server):
        np.testing.assert_array_equal(ask(server, "queued", row(LARGE, 1)), row(LARGE, 2))


# ---- models that come and go ----------------------------------------------------------------


def test_it_is_ready_when_its_models_are(server: Server, client: Client) -> None:
    assert client.is_model_ready("nested")
    client.unload_model("plus_one")
    assert not client.is_model_ready("fan")
    assert not client.is_model_ready("nested")
    assert client.is_server_ready()
    index = {one.name: one for one in client.get_model_repository_index().models}
    assert (index["fan"].state, index["fan"].reason) == ("UNAVAILABLE", "a model of its steps is not ready")
    with pytest.raises(InferenceServerException, match=r"in ensemble 'fan', .*'plus_one'") as raised:
        ask(server, "fan", row(LARGE, 1))
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    client.load_model("plus_one")
    assert client.is_model_ready("nested")
    np.testing.assert_array_equal(ask(server, "fan", row(LARGE, 1)), row(LARGE, 4))


def test_a_model_that_is_loaded_anew_is_found_at_the_next_step(server: Server, client: Client) -> None:
    call = InBackground(ask, server, "queued", row(LARGE, 4))
    wait_until(lambda: requests_at(server, "Gate"), "the step runs")
    client.load_model("doubled")
    client.load_model("who")
    with Gatekeeper(server):
        np.testing.assert_array_equal(call.result(), row(LARGE, 8))
        assert client.is_model_ready("queued")


def test_it_is_loaded_with_its_models_and_unloaded_with_them(server: Server, client: Client) -> None:
    client.unload_model("nested", unload_dependents=True)
    gone = ["nested", "fan", "chain", "doubled", "plus_one", "added"]
    assert not any(client.is_model_ready(name) for name in gone)
    with pytest.raises(InferenceServerException, match="'nested' has no available versions"):
        ask(server, "nested", row(1, 1))
    client.load_model("nested")
    assert all(client.is_model_ready(name) for name in gone)
    np.testing.assert_array_equal(ask(server, "nested", row(LARGE, 1)), row(LARGE, 9))


def test_its_own_config_can_be_sent_back_changed(server: Server, client: Client) -> None:
    config = client.get_model_config("chain", as_json=True)["config"]
    client.load_model("chain", config=json.dumps({**config, "max_batch_size": 2}))
    with pytest.raises(InferenceServerException, match="batch-size must be <= 2 for 'chain'"):
        ask(server, "chain", np.ones((3, 1), np.float32))
    with pytest.raises(InferenceServerException, match="ensemble_scheduling"):
        client.load_model("chain", config=json.dumps({"ensemble_scheduling": {"step": []}}))
    with pytest.raises(InferenceServerException, match="it is an ensemble, which has no instance_group"):
        client.load_model("chain", config=json.dumps({"instance_group": [{"count": 2}]}))
    client.load_model("chain")
    np.testing.assert_array_equal(ask(server, "chain", np.ones((3, 1), np.float32)), np.full((3, 1), 3))


def test_a_callable_may_ask_an_ensemble(server: Server) -> None:
    for width in WIDTHS:
        x = row(width, 2)
        np.testing.assert_array_equal(ask(server, "asks_chain", x), (x * 6 + 1) + x * 2 + (x * 2 + 1))


# ---- clients' memory ------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS, ids=["small", "large"])
def test_tensors_in_a_clients_memory(server: Server, client: Client, width: int) -> None:
    x = row(width, 5)
    key = f"/{own_name()}"
    handle = shm.create_shared_memory_region("e", key, 3 * x.nbytes)
    try:
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory("e", key, 3 * x.nbytes)
        tensor = tritonclient.grpc.InferInput("x", list(x.shape), "FP32")
        tensor.set_shared_memory("e", x.nbytes)
        wanted = [tritonclient.grpc.InferRequestedOutput(name) for name in ("y", "z")]
        for number, one in enumerate(wanted, 1):
            one.set_shared_memory("e", x.nbytes, number * x.nbytes)
        client.infer("placed", [tensor], outputs=wanted)
        found = [
            shm.get_contents_as_numpy(handle, np.float32, x.shape, number * x.nbytes) for number in range(3)
        ]
        for array, expected in zip(found, (x, x * 2, x * 2 + 1), strict=True):
            np.testing.assert_array_equal(array, expected)
        del found, array
        np.testing.assert_array_equal(client.infer("fan", [tensor]).as_numpy("y"), x * 3 + 1)
        client.unregister_system_shared_memory("e")
        assert not client.get_system_shared_memory_status().regions
    finally:
        shm.destroy_shared_memory_region(handle)


def test_texts_that_a_step_reads_are_not_placed(server: Server, client: Client) -> None:
    key = f"/{own_name()}"
    handle = shm.create_shared_memory_region("t", key, 4096)
    try:
        client.register_system_shared_memory("t", key, 4096)
        tensor = tritonclient.grpc.InferInput("text", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"a"]], object))
        wanted = tritonclient.grpc.InferRequestedOutput("once")
        wanted.set_shared_memory("t", 4096)
        both = [wanted, tritonclient.grpc.InferRequestedOutput("loud")]
        with pytest.raises(InferenceServerException, match="output 'once' of ensemble 'texts' is BYTES and"):
            client.infer("texts", [tensor], outputs=both)
        client.infer("texts", [tensor], outputs=[wanted])
        client.unregister_system_shared_memory("t")
    finally:
        shm.destroy_shared_memory_region(handle)


# ---- traces ---------------------------------------------------------------------------------


def test_steps_are_children_in_a_trace(server: Server, client: Client) -> None:
    client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    ask(server, "diamond", row(3, 1))
    client.update_trace_settings(settings={"trace_level": None, "trace_rate": None})
    path = server.config.with_name("trace.json")
    heads = [one for one in told(path, 5) if "model_name" in one]
    (root,) = [one for one in heads if "parent_id" not in one]
    assert root["model_name"] == "diamond"
    children = [one["model_name"] for one in heads if one.get("parent_id") == root["id"]]
    assert sorted(children) == ["added", "doubled", "doubled", "plus_one"]


def told(path: Path, traces: int) -> list[dict[str, Any]]:
    """The events of a file with so many traces."""
    events: list[dict[str, Any]] = []

    def is_there() -> bool:
        try:
            events[:] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return False
        return len({one["id"] for one in events}) >= traces

    wait_until(is_there, "the traces are written")
    return events


# ---- the front ------------------------------------------------------------------------------


def front_pid() -> int:
    (pid,) = [one for one in descendants(os.getpid()) if "gpuserve.front.process " in command_line(one)]
    return pid


def front_cpu_s() -> float:
    fields = Path(f"/proc/{front_pid()}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_front_does_not_touch_what_passes_between_steps(server: Server) -> None:
    """64 MiB go from ``spread`` to ``doubled`` and on to ``summed``. To copy them takes 10 ms, each time."""
    width, requests = 1 << 24, 20
    ask(server, "inside", row(1, width))
    before = front_cpu_s()
    for _ in range(requests):
        assert ask(server, "inside", row(1, width)).item() == 2 * width
    spent_s = (front_cpu_s() - before) / requests
    measured(f"the front spends {spent_s * 1000:.1f} ms of CPU on a request with twice 64 MiB between steps")
    assert spent_s < 0.010


def test_a_front_that_is_started_anew_has_the_ensembles(server: Server, client: Client) -> None:
    os.kill(front_pid(), signal.SIGKILL)

    def answers() -> bool:
        try:
            return bool(np.array_equal(ask(server, "nested", row(LARGE, 1)), row(LARGE, 9)))
        except InferenceServerException:
            return False

    wait_until(answers, "another front answers")
    assert client.is_model_ready("diamond")


# ---- the end --------------------------------------------------------------------------------


def test_a_request_under_way_is_finished_when_the_server_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    held = ensemble("held", step("Gate", "a", x="x"), step("doubled", "y", x="a"))
    models = [member("doubled"), member("Gate", kwargs={"fifo": str(tmp_path / "fifo")}), held]
    config = write_config(tmp_path, models, host="127.0.0.1")
    process = subprocess.Popen(
        [GPUSERVE, "serve", str(config), *FREE_PORTS, *JSON_LOG], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    log: list[str] = []
    alone = Server(wait_until_ready(process.stderr, log), config, tmp_path / "fifo")
    call = InBackground(ask, alone, "held", row(LARGE, 4))
    wait_until(lambda: requests_at(alone, "Gate"), "the first step runs")
    process.send_signal(signal.SIGTERM)
    with Client(alone.addresses.grpc) as client:
        wait_until(lambda: not client.is_server_ready(), "it drains")
        with pytest.raises(InferenceServerException, match="Server is stopping"):
            client.infer("held", [given(row(1, 1))])
    open_gate(alone)
    np.testing.assert_array_equal(call.result(), row(LARGE, 8))
    process.stderr.read()
    assert process.wait(TIMEOUT_S) == 0
    process.stderr.close()
