"""A server whose log nobody reads, and a worker that prints more than anybody would."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from operated import OperatedServer, Orders, config, model
from processes import measured, wait_until


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
