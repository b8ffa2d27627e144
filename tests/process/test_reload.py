"""Models that are loaded and unloaded under traffic, by several clients at once, and while things break."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from config_operator import fifo
from exploring import variants
from operated import InBackground, OperatedServer
from processes import wait_ended, wait_until
from repositories import Client, Traffic, clients_are_closed, entry, write
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here


@contextmanager
def operated(folder: Path, *models: dict[str, Any], **settings: Any) -> Iterator[OperatedServer]:
    path = write(folder / "config.yaml", *models, host="127.0.0.1", **settings)
    with OperatedServer(path).until_ended() as server:
        yield server


def client(server: OperatedServer, protocol: str = "grpc") -> Client:
    return Client(protocol, server.addresses["gRPC" if protocol == "grpc" else "HTTP"])


def test_no_request_is_lost_by_reloads(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m", 0.0)) as server:
        control, path = client(server), tmp_path / "config.yaml"
        with Traffic(client(server), "m") as one, Traffic(client(server, "http"), "m") as other:
            for tag in range(1, 7):
                write(path, entry("m", float(tag)))
                control.asked.load_model("m")
                for traffic in (one, other):
                    traffic.wait_for(tag)
        assert (one.errors, other.errors) == ([], [])
        for traffic in (one, other):
            tags = [told.tag for told in traffic.told]
            assert tags == sorted(tags)  # what was loaded later answers later
            assert set(tags) == set(range(7))
        wait_until(lambda: len(server.workers) == 1, "the earlier workers are ended")
        answered = server.metric("gpuserve_requests_success_total", model="m", version="1")
        assert answered == len(one.told) + len(other.told)
        assert server.metric("gpuserve_worker_up", model="m") == 1


@pytest.mark.thorough
def test_the_metrics_show_no_instance_of_old_as_one_that_is_down(tmp_path: Path) -> None:
    three, one = [{"device": "cpu", "count": 3}], [{"device": "cpu", "count": 1}]
    with operated(tmp_path, entry("m", 1.0, instances=three)) as server:
        control = client(server)
        assert server.metric("gpuserve_worker_up", model="m") == 3
        write(tmp_path / "config.yaml", entry("m", 2.0, instances=one))
        control.asked.load_model("m")
        wait_until(lambda: len(server.workers) == 1, "the earlier workers are ended")
        with server.client() as asked:
            page = asked.get("/metrics").body.decode()
        shown = [line for line in page.splitlines() if line.startswith("gpuserve_worker_up{")]
        assert shown == ['gpuserve_worker_up{instance="cpu#0",model="m",version="1"} 1.0']
        assert 'gpuserve_worker_restarts_total{instance="cpu#2"' in page  # what it did is still counted


def test_a_load_that_fails_leaves_what_serves(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with operated(tmp_path, entry("m", 1.0, broken=str(broken))) as server:
        control = client(server)
        pid = control.infer("m").pid
        broken.touch()
        with Traffic(client(server), "m") as traffic:
            for _ in range(3):
                with pytest.raises(
                    InferenceServerException, match=r"load failed for model 'm': version 1 is at"
                ):
                    control.asked.load_model("m")
        assert traffic.errors == []
        assert {told.pid for told in traffic.told} == {pid}
        assert control.states("m") == {"1": "READY"}
        broken.unlink()
        control.asked.load_model("m")
        assert control.infer("m").pid != pid


@pytest.mark.thorough
def test_of_several_versions_one_that_fails_lets_none_in(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    with operated(tmp_path, entry("m", 1.0)) as server:
        control = client(server)
        write(tmp_path / "config.yaml", entry("m", 2.0), entry("m", 3.0, version=2, broken=str(broken)))
        with pytest.raises(InferenceServerException, match="version 2 is at UNAVAILABLE state"):
            control.asked.load_model("m")
        assert (control.infer("m").tag, control.states("m")) == (1.0, {"1": "READY", "2": "UNAVAILABLE"})
        wait_until(lambda: len(server.workers) == 1, "nothing of the load is left")


@pytest.mark.thorough
def test_what_runs_is_finished_before_an_unload_is_answered(tmp_path: Path) -> None:
    run = fifo(tmp_path, "run")
    with operated(tmp_path, entry("m", 1.0, run_fifo=str(run)), entry("other")) as server:
        control = client(server)
        running = InBackground(client(server).infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it runs")
        unloading = InBackground(client(server).asked.unload_model, "m")
        wait_until(lambda: control.states("m") == {"1": "UNLOADING"}, "it is unloaded")
        with pytest.raises(InferenceServerException, match="'m' has no available versions"):
            control.infer("m")
        assert not control.asked.is_model_ready("m")
        assert control.infer("other").tag == 1.0
        run.write_bytes(b"")
        assert running.result().tag == 1.0
        unloading.result()
        assert control.states("m") == {"1": "UNAVAILABLE"}
        assert len(server.workers) == 1


@pytest.mark.thorough
def test_what_does_not_end_is_refused_at_last(tmp_path: Path) -> None:
    run = fifo(tmp_path, "run")
    with operated(tmp_path, entry("m", 1.0, run_fifo=str(run)), drain_timeout_s=0.2) as server:
        running = InBackground(client(server).infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it runs")
        unloading = InBackground(client(server).asked.unload_model, "m")
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            running.result()
        run.write_bytes(b"")
        unloading.result()


@pytest.mark.thorough
def test_a_body_that_arrives_during_a_reload_is_answered_by_the_new_workers(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m", 1.0)) as server:
        head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,262144],'
        head += b'"parameters":{"binary_data_size":1048576}}]}'
        with server.client() as uploading:
            connection = uploading.connection
            connection.putrequest("POST", "/v2/models/m/infer")
            connection.putheader("Inference-Header-Content-Length", str(len(head)))
            connection.putheader("Content-Length", str(len(head) + (1 << 20)))
            connection.endheaders(head + bytes(1 << 19))
            wait_until(lambda: server.metric("gpuserve_arena_blocks", model="m") == 1, "half of it is there")
            write(tmp_path / "config.yaml", entry("m", 2.0))
            client(server).asked.load_model("m")
            wait_until(lambda: len(server.workers) == 1, "the old worker is gone")
            connection.send(bytes(1 << 19))
            answer = connection.getresponse()
            body = answer.read()
        assert answer.status == 200
        assert b'"name":"tag","datatype":"FP32","shape":[1,1],"data":[2.0]' in body


@pytest.mark.thorough
def test_many_clients_load_and_unload_one_model(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m", 1.0), entry("other", 2.0)) as server:
        errors: list[str] = []

        def work(number: int) -> None:
            control = client(server, ("grpc", "http")[number % 2])
            for turn in range(3):
                try:
                    (control.asked.unload_model if (turn + number) % 3 == 0 else control.asked.load_model)(
                        "m"
                    )
                except InferenceServerException as error:
                    errors.append(str(error))

        with Traffic(client(server), "other") as traffic:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for one in threads:
                one.start()
            for one in threads:
                one.join(60)
        # A client hears so whose load was overtaken by what another one asked for.
        assert [error for error in errors if "the load was cancelled" not in error] == traffic.errors == []
        control = client(server)
        control.asked.load_model("m")
        assert control.infer("m").tag == 1.0
        wait_until(lambda: len(server.workers) == 2, "one worker a model is left")


# ---- while things break -------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_load_goes_on_without_the_front_that_asked_for_it(tmp_path: Path) -> None:
    gate = fifo(tmp_path, "gate")
    with operated(tmp_path, entry("m", 1.0)) as server:
        write(tmp_path / "config.yaml", entry("m", 2.0, load_fifo=str(gate)))
        loading = InBackground(client(server).asked.load_model, "m")
        wait_until(lambda: len(server.workers) == 2, "it loads")
        front = server.front
        os.kill(front, signal.SIGKILL)
        with pytest.raises(InferenceServerException):
            loading.result()
        wait_until(
            lambda: server.front not in (0, front) and server.status("/v2/health/ready") == 200, "another"
        )
        control = client(server)
        assert (control.infer("m").tag, control.states("m")) == (1.0, {"1": "READY"})
        gate.write_bytes(b"")
        wait_until(lambda: control.infer("m").tag == 2.0, "the load is complete")
        wait_until(lambda: len(server.workers) == 1, "the old worker is ended")


@pytest.mark.thorough
def test_a_front_that_dies_while_a_model_is_unloaded(tmp_path: Path) -> None:
    run = fifo(tmp_path, "run")
    with operated(tmp_path, entry("m", 1.0, run_fifo=str(run))) as server:
        running = InBackground(client(server).infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it runs")
        unloading = InBackground(client(server).asked.unload_model, "m")
        control = client(server, "http")
        wait_until(lambda: control.states("m") == {"1": "UNLOADING"}, "it is unloaded")
        os.kill(server.front, signal.SIGKILL)
        for one in (running, unloading):
            with pytest.raises(InferenceServerException):
                one.result()
        run.write_bytes(b"")
        wait_until(lambda: server.status("/v2/health/ready") == 200, "another front")
        wait_until(lambda: client(server).states("m") == {"1": "UNAVAILABLE"}, "it is unloaded all the same")
        assert server.workers == []


@pytest.mark.thorough
def test_a_worker_that_dies_while_it_finishes_is_replaced_for_that(tmp_path: Path) -> None:
    run = fifo(tmp_path, "run")
    with operated(tmp_path, entry("m", 1.0, run_fifo=str(run))) as server:
        running = InBackground(client(server).infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it runs")
        (victim,) = server.workers
        unloading = InBackground(client(server).asked.unload_model, "m")
        control = client(server)
        wait_until(lambda: control.states("m") == {"1": "UNLOADING"}, "it is unloaded")
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: server.workers not in ([], [victim]), "another takes its place")
        run.write_bytes(b"")
        assert running.result().pid != victim
        unloading.result()


@pytest.mark.thorough
@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_a_server_that_is_stopped_while_a_model_loads(tmp_path: Path, number: signal.Signals) -> None:
    gate = fifo(tmp_path, "gate")
    path = write(tmp_path / "config.yaml", entry("m", 1.0), host="127.0.0.1")
    with OperatedServer(path).until_killed() as server:
        write(path, entry("m", 2.0, load_fifo=str(gate)))
        loading = InBackground(client(server).asked.load_model, "m")
        wait_until(lambda: len(server.workers) == 2, "it loads")
        family = server.family()
        assert server.end(number) == 0
        with pytest.raises(InferenceServerException, match="Server exiting"):
            loading.result()
        assert not wait_ended(family, 2.0)
