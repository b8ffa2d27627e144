"""The log: one that nobody reads, one that is flooded, and a server without stdin, stdout or stderr."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from exploring import variants
from operated import TIMEOUT_S, Client, OperatedServer, Orders, config, model
from processes import children, measured, wait_ended, wait_until
from serving import GPUSERVE, unlikely_port


class UnreadServer(OperatedServer):
    """A server whose log is read while ``reading`` is set."""

    def __init__(self, config: Path) -> None:
        super().__init__(config)
        self.reading = threading.Event()
        self.reading.set()
        #: Lines of the worker's, which are not kept.
        self.printed = 0

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "xxxx" in line:
                self.printed += 1
            elif line.endswith("\n"):  # the end may cut the last one off
                with self._news:
                    self.log.append(line)
                    self._news.notify_all()
            self.reading.wait()
        with self._news:
            self._log_ended = True
            self._news.notify_all()


@pytest.mark.thorough
def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path, orders: Orders) -> None:
    unlimited = {"max_output_lines_per_s": 0, "max_output_nbytes_per_s": 0}
    with UnreadServer(config(tmp_path, model("m", orders, "Printer"), **unlimited)).until_killed() as server:
        server.reading.clear()
        try:
            assert server.infer("m", 1.0).status == 200
            (worker,) = server.workers
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: worker not in server.workers and server.workers, "a successor")
            server.wait_model_ready("m")
            assert server.status("/v2/health/ready") == 200

            server.reading.set()
            server.wait_log("lines of the log: nothing reads stderr")
            server.reading.clear()
            assert server.infer("m", 1.0).status == 200
            assert server.end() == 0
        finally:
            server.reading.set()


def test_a_worker_that_prints_without_end_is_logged_at_a_rate(tmp_path: Path, orders: Orders) -> None:
    with UnreadServer(config(tmp_path, model("m", orders, "Printer"))).until_ended() as server:
        assert server.infer("m", 1.0).status == 200
        server.wait_log("lines of its output were dropped")
    measured(f"{server.printed} of 20,000 lines were logged")
    assert 10_000 <= server.printed < 20_000
    dropped = [one for one in server.messages() if "of its output were dropped" in one["msg"]]
    assert {(one["model"], one["instance"]) for one in dropped} == {("m", "cpu#0")}
    assert server.printed + sum(int(one["msg"].split()[0]) for one in dropped) == 20_000


# ---- requests that fail as often as a client likes -----------------------------------------------


MODELS = Path(__file__).resolve().parents[1] / "models"


def test_requests_without_memory_for_their_batch_do_not_flood_the_log(tmp_path: Path) -> None:
    model = {
        "name": "m",
        "callable": f"{MODELS / 'echo.py'}:listed",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": name, "dtype": "float32", "shape": [-1]} for name in ("pid", "calls")],
        "max_batch_size": 8,
    }
    settings = {"host": "127.0.0.1", "lame_duck_s": 0, "max_arena_nbytes": 4096}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"server": settings, "models": [model]}))
    with OperatedServer(path).until_ended() as operated:
        for _ in range(20):
            assert operated.infer("m", 1.0, width=12_000).status == 503
        operated.wait_log("over its limit of 4096")
    lines = [one for one in operated.messages() if "over its limit of 4096" in one["msg"]]
    assert len(lines) < 4


# ---- closed standard streams ---------------------------------------------------------------------


@pytest.mark.parametrize("closed", variants("0<&- 1>&- 2>&-", "2>&-", "0<&-", "1>&-"))
def test_a_server_serves_with_closed_streams(tmp_path: Path, closed: str) -> None:
    port = unlikely_port()
    path = config(
        tmp_path,
        model("m", Orders(tmp_path / "orders")),
        http_port=port,
        grpc_port=None,
        metrics_port=None,
    )
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$0" serve "$1" {closed}', GPUSERVE, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family: list[int] = []
    try:
        wait_until(lambda: process.poll() is not None or _is_ready(port), "the server is ready")
        with Client(f"127.0.0.1:{port}") as client:
            assert client.infer("m", 1.0).output("y") == [2.0]
        family = [process.pid, *children(process.pid)]
        for pid in family:
            for fd in (0, 1, 2):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                assert target == os.devnull or target.startswith("pipe:"), (pid, fd, target)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        assert not wait_ended(family, TIMEOUT_S)


def _is_ready(port: int) -> bool:
    try:
        with Client(f"127.0.0.1:{port}") as client:
            return client.get("/v2/health/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False
