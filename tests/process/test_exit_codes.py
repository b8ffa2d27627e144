"""How ``gpuserve serve`` ends when it cannot start: the status, the sentence, and no port that says ready."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exploring import variants
from operated import TIMEOUT_S, OperatedServer, Orders, config, model
from processes import wait_until
from repositories import Client, clients_are_closed, entry, write
from serving import FREE_PORTS, GPUSERVE, unlikely_port
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        yield int(listener.getsockname()[1])


def text_log(config_file: Path) -> tuple[int, str]:
    run = subprocess.run(
        [GPUSERVE, "serve", str(config_file), *FREE_PORTS],
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return run.returncode, run.stderr


def test_a_model_that_does_not_load_ends_with_3_and_its_traceback_is_in_the_log(
    tmp_path: Path, orders: Orders
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "load_fails"))) as server:
        assert server.process.wait(TIMEOUT_S) == 3
    (failure,) = [one for one in server.messages() if "could not be loaded" in one["msg"]]
    assert (failure["level"], failure["model"], failure["instance"]) == ("error", "m", "cpu#0")
    assert failure["exc"].startswith("Traceback (most recent call last):")
    assert failure["exc"].endswith("RuntimeError: there are no weights")
    assert 'raise RuntimeError("there are no weights")' in failure["exc"]
    assert "instance cpu#0 could not be started" in server.messages()[-1]["msg"]
    assert not any(one["msg"].startswith("ready: ") for one in server.messages())


@pytest.mark.thorough
def test_the_traceback_is_in_a_text_log_too(tmp_path: Path, orders: Orders) -> None:
    code, log = text_log(config(tmp_path, model("m", orders, "load_fails")))
    assert code == 3
    assert 'raise RuntimeError("there are no weights")\nRuntimeError: there are no weights\n' in log
    assert log.splitlines()[-1].startswith("model 'm': instance cpu#0 could not be started: ")


@pytest.mark.thorough
def test_no_port_says_ready_before_every_model_is_loaded(tmp_path: Path, orders: Orders) -> None:
    well = Orders(tmp_path / "well")
    orders.shut()
    port = unlikely_port()
    flags = ("--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")
    file = config(tmp_path, model("slow", orders, "load_slowly"), model("well", well))
    with OperatedServer(file, *flags) as server:
        server.addresses["HTTP"] = f"localhost:{port}"
        seen: set[int] = set()
        ready = threading.Event()

        def look() -> None:
            while not ready.is_set():
                seen.add(server.status("/v2/health/ready"))

        looking = threading.Thread(target=look)
        looking.start()
        server.wait_model_ready("well")
        ready.set()
        looking.join()
        assert 200 not in seen
        orders.open()
        server.wait_ready()
        assert server.status("/v2/health/ready") == 200
        assert server.end() == 0


@pytest.mark.thorough
def test_a_model_that_takes_too_long_to_load(tmp_path: Path, orders: Orders) -> None:
    orders.shut()
    with OperatedServer(config(tmp_path, model("m", orders, "load_slowly"), load_timeout_s=0.5)) as server:
        assert server.process.wait(TIMEOUT_S) == 3
    assert server.messages()[-1]["msg"].endswith("could not be started: not loaded within 0.5 s")


@pytest.mark.parametrize("role", variants("http", "grpc", "metrics"))
def test_a_port_that_is_taken(tmp_path: Path, orders: Orders, taken: int, role: str) -> None:
    ports = {"http": "0", "grpc": "0", "metrics": "0", role: str(taken)}
    flags = [part for name, port in ports.items() for part in (f"--{name}-port", port)]
    with OperatedServer(config(tmp_path, model("m", orders)), *flags) as server:
        assert server.process.wait(TIMEOUT_S) == 3
    (line,) = server.messages()
    said = f"cannot listen on 0.0.0.0:{taken} for {role}: Address already in use, by "
    assert line["msg"].startswith(said)
    assert line["msg"].endswith(f", process {os.getpid()}")


@pytest.mark.thorough
def test_a_host_that_is_not_there(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders)), "--host", "192.0.2.1") as server:
        assert server.process.wait(TIMEOUT_S) == 3
    (line,) = server.messages()
    assert line["msg"].startswith("cannot listen on 192.0.2.1:0 for http: Cannot assign requested address")


@pytest.mark.thorough
def test_a_device_that_is_not_there(tmp_path: Path, orders: Orders) -> None:
    entry = model("m", orders, instances=[{"device": "cuda:99"}])
    with OperatedServer(config(tmp_path, entry)) as server:
        assert server.process.wait(TIMEOUT_S) == 5
    assert "cuda:99" in server.messages()[-1]["msg"]


@pytest.mark.thorough
def test_whoever_read_the_log_may_go_away(tmp_path: Path, orders: Orders) -> None:
    file = config(tmp_path, model("m", orders, "Rude"))
    with subprocess.Popen(
        [GPUSERVE, "serve", str(file), *FREE_PORTS, "--log-format", "json"],
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            server = OperatedServer(file)
            server.process = process
            for line in process.stderr:
                server.log.append(line)
                if '"ready: ' in line:
                    break
            server.wait_ready()
            process.stderr.close()
            assert server.infer("m", 1.0).output("y") == [2.0]  # it prints
            assert server.infer("m", 2.0).output("y") == [4.0]
            assert server.end() == 0
        finally:
            process.kill()


# ---- models that cannot be loaded, in a server that is to serve the others -----------------------


def lenient(folder: Path, *models: dict[str, Any], **settings: Any) -> OperatedServer:
    """A server whose model "bad" cannot be loaded while a file is there."""
    (folder / "broken").touch()
    bad = entry("bad", broken=str(folder / "broken"))
    path = write(folder / "config.yaml", *models, bad, host="127.0.0.1", exit_on_error=False, **settings)
    return OperatedServer(path)


@pytest.mark.thorough
def test_the_others_are_served_until_it_is_loaded(tmp_path: Path) -> None:
    second = entry("good", 2.0, version=2, broken=str(tmp_path / "broken"))
    with lenient(tmp_path, entry("good"), second).until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        assert client.infer("good").tag == 1.0
        assert (server.status("/v2/health/live"), server.status("/v2/health/ready")) == (200, 400)
        (state,) = [one for one in client.index() if one[0] == "bad"]
        assert state[:3] == ("bad", "1", "UNAVAILABLE")
        assert state[3].endswith("Tagged raised RuntimeError: there are no weights")
        assert "could not be started" not in state[3]
        with pytest.raises(InferenceServerException, match="'bad' has no available versions"):
            client.infer("bad")
        front = server.front
        (tmp_path / "broken").unlink()
        assert client.states("good") == {"1": "READY", "2": "UNAVAILABLE"}
        client.asked.load_model("bad")
        assert server.status("/v2/health/ready") == 400
        client.asked.load_model("good")
        assert client.infer("good").tag == 2.0
        wait_until(lambda: server.status("/v2/health/ready") == 200, "the server is ready")
        assert client.infer("bad").tag == 1.0
        assert server.front == front
        server.replace_front()


def test_it_is_not_missed_where_readiness_asks_for_nothing_or_somebody_took_it_out(tmp_path: Path) -> None:
    with lenient(tmp_path, min_ready_instances=0).until_ended() as server:
        assert server.status("/v2/health/ready") == 200
