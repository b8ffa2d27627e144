"""Blocked event loops of server processes: a front is replaced, a blocked supervisor is reported."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from operated import OperatedServer, Orders, config, model
from processes import finished, wait_until
from serving import GPUSERVE

from gpuserve.supervisor.control.heartbeat import (
    CpuTimes,
    Heartbeat,
    LoopWatchdog,
    cpu_times,
    heartbeat_period_s,
    state_of,
)
from gpuserve_worker.protocol.stack_signals import STACKS_SIGNAL

HANG_S = 0.6


def entry(tmp_path: Path) -> dict[str, Any]:
    return model("m", Orders(tmp_path / "orders"))


@pytest.mark.parametrize("ingress", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_stopped_front_is_replaced_and_workers_stay(tmp_path: Path, ingress: int) -> None:
    path = config(tmp_path, entry(tmp_path), hang_timeout_s=HANG_S)
    with OperatedServer(path, "--ingress-processes", str(ingress)).until_ended() as server:
        front, workers = server.front, server.workers
        os.kill(front, signal.SIGSTOP)
        stopped_at = time.monotonic()
        server.wait_log("it is stopped (SIGSTOP); it is replaced after 0.6 s (hang_timeout_s)")
        wait_until(lambda: server.front not in {0, front}, "another front is started")
        assert time.monotonic() - stopped_at > HANG_S / 2
        server.wait_model_ready("m")
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert server.workers == workers
        server.wait_log("killed the front: its event loop was blocked for")


@pytest.mark.thorough
def test_a_front_with_a_blocked_loop_logs_its_stacks_and_is_replaced(tmp_path: Path) -> None:
    """An operator's regular expression that never ends and holds the interpreter's lock blocks the loop."""
    path = config(tmp_path, entry(tmp_path), hang_timeout_s=HANG_S, http_header_forward_pattern="^(x+)+$")
    with OperatedServer(path, "--ingress-processes", "1").until_ended() as server:
        front = server.front
        with server.client() as client:
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
            headers = {"x" * 60 + "-": "1"}
            client.connection.request("POST", "/v2/models/m/infer", json.dumps(body), headers)
            with pytest.raises((OSError, http.client.HTTPException)):
                client.connection.getresponse()
        server.wait_log("(hang_timeout_s): it runs")
        stacks = next(line for line in server.log if "it is replaced after 0.6 s" in line)
        assert "Main thread" in stacks
        assert "gpuserve/front/protocols/access/header_forwarding.py" in stacks
        wait_until(lambda: server.front not in {0, front}, "another front is started")
        server.wait_model_ready("m")
        assert server.infer("m", 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_a_stopped_supervisor_is_reported_by_probes_and_by_status(tmp_path: Path) -> None:
    with OperatedServer(config(tmp_path, entry(tmp_path), hang_timeout_s=HANG_S)).until_ended() as server:
        os.kill(server.pid, signal.SIGSTOP)
        began_at = time.monotonic()
        asked = status(server)
        assert (asked.returncode, asked.stdout) == (1, "")
        assert asked.stderr == (
            f"the server does not answer: process {server.pid} is stopped (SIGSTOP), and goes on after "
            f"kill -CONT {server.pid}\n"
        )
        assert time.monotonic() - began_at < 5
        wait_until(lambda: server.status("/v2/health/live") == 400, "it is not live")
        assert server.infer("m", 1.0).output("y") == [2.0]
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: server.status("/v2/health/live") == 200, "it is live again")
        server.wait_log(f"supervisor event loop of process {server.pid} blocked for")
        assert json.loads(status(server, "--json").stdout)["server"]["front"]["restarts"] == 0


def status(server: OperatedServer, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [GPUSERVE, "status", "--server", server.addresses["HTTP"], *flags]
    return finished(command)


@pytest.mark.thorough
def test_an_ingress_process_logs_its_stacks(tmp_path: Path) -> None:
    """The front sends the signal to a process that is silent for ten seconds."""
    with OperatedServer(
        config(tmp_path, entry(tmp_path)), "--ingress-processes", "2"
    ).until_ended() as server:
        rows = json.loads(status(server, "--json").stdout)["server"]["doors"]
        assert len(rows) == 2
        for row in rows:
            os.kill(row["pid"], STACKS_SIGNAL)
        server.wait_log("(most recent call first)", times=len(rows))
        assert server.infer("m", 1.0).output("y") == [2.0]


def test_only_polls_in_time_count() -> None:
    silence = LoopWatchdog()
    assert [silence.poll(False, now, 1.0) for now in (10.0, 11.0, 12.0)] == [0.0, 1.0, 2.0]
    assert silence.poll(False, 100.0, 1.0) == 2.0  # the watchdog itself was stopped
    assert [silence.poll(False, now, 1.0) for now in (101.0, 102.0)] == [3.0, 4.0]
    assert silence.poll(True, 103.0, 1.0) == 0.0


def silent_s(*looks: CpuTimes | None) -> float:
    """Return the silence of a process with these CPU times, a second apart, and without a heartbeat."""
    silence = LoopWatchdog()
    return [silence.poll(False, 10.0 + n, 1.0, one) for n, one in enumerate((None, *looks))][-1]


def test_a_process_that_gets_no_cpu_does_not_hang() -> None:
    starved = [CpuTimes(5.0, 9.0, is_runnable=True) for _ in range(60)]
    assert silent_s(*starved) == 1.0  # the first poll has no earlier times
    throttled = [CpuTimes(0.01 * n, 0.99 * n, is_runnable=True) for n in range(60)]
    assert silent_s(*throttled) == pytest.approx(1.59)
    waited = [CpuTimes(0.0, 1.0 * n, is_runnable=False) for n in range(60)]
    assert silent_s(*waited) == 1.0


def test_a_process_that_runs_or_sleeps_without_a_heartbeat_hangs() -> None:
    busy = [CpuTimes(1.0 * n, 0.0, is_runnable=True) for n in range(31)]
    halved = [CpuTimes(0.5 * n, 0.5 * n, is_runnable=True) for n in range(31)]
    stopped = [CpuTimes(5.0, 9.0, is_runnable=False)] * 31
    assert [silent_s(*looks) for looks in (busy, halved, stopped, [None] * 31)] == [31.0, 16.0, 31.0, 31.0]


def test_cpu_times_of_a_running_and_of_a_waiting_process() -> None:
    began = cpu_times(os.getpid())
    sum(range(3_000_000))
    now = cpu_times(os.getpid())
    assert began is not None
    assert now is not None
    assert now.is_runnable
    assert now.ran_s > began.ran_s
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        wait_until(lambda: state_of(sleeping.pid) == "S", "it sleeps")
        asleep = cpu_times(sleeping.pid)
        sleeping.kill()
    assert asleep is not None
    assert not asleep.is_runnable
    assert cpu_times(sleeping.pid) is None


BURN = "print(flush=True)\nwhile True: pass"


@pytest.mark.thorough
def test_a_front_starved_of_cpu_is_not_replaced(tmp_path: Path) -> None:
    """A real-time process leaves the front a twentieth of its CPU, in one piece a second."""
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("the supervisor needs a CPU of its own")
    path = config(tmp_path, entry(tmp_path), hang_timeout_s=HANG_S)
    with (
        OperatedServer(path, "--ingress-processes", "1").until_ended() as server,
        contextlib.ExitStack() as others,
    ):
        front, cpu = server.front, max(cpus)
        burning = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
        others.enter_context(burning)
        others.callback(burning.kill)
        assert burning.stdout is not None
        burning.stdout.readline()
        os.sched_setaffinity(server.pid, cpus - {cpu})
        os.sched_setaffinity(front, {cpu})
        os.sched_setaffinity(burning.pid, {cpu})
        before = cpu_times(front)
        try:
            os.sched_setscheduler(burning.pid, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            pytest.skip("real-time priority takes CAP_SYS_NICE")
        with pytest.raises(subprocess.TimeoutExpired):
            burning.wait(5 * HANG_S)
        others.close()
        assert server.infer("m", 1.0).output("y") == [2.0]
        after = cpu_times(front)
        assert before is not None
        assert after is not None  # else the front was replaced
        assert after.waited_s - before.waited_s > 2 * HANG_S  # else the front was not starved
        assert server.front == front


def test_several_heartbeats_between_polls_count_once() -> None:
    heartbeat = Heartbeat()
    assert not heartbeat.has_beaten()
    heartbeat.beat()
    heartbeat.beat()
    assert heartbeat.has_beaten()
    assert not heartbeat.has_beaten()
    heartbeat.close()


def test_a_loop_sends_ten_heartbeats_within_the_hang_timeout() -> None:
    assert [heartbeat_period_s(timeout_s) for timeout_s in (0.0, 30.0, 0.6)] == [1.0, 1.0, 0.06]
