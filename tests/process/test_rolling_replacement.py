"""Servers of a fleet are replaced one by one under load, as pods of a Deployment are; no request is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from operated import OperatedServer, Orders, config, model
from processes import measured, wait_until
from serving import unlikely_port
from steady_load import SteadyLoad

ROUNDS = 3


class Pod:
    """One address of the fleet, and the server that listens on it now."""

    def __init__(self, folder: Path, number: int) -> None:
        folder = folder / f"pod{number}"
        folder.mkdir()
        ports = {f"{role}_port": unlikely_port() for role in ("http", "grpc", "metrics")}
        settings = {"host": "127.0.0.1", "lame_duck_s": 2, **ports}
        self._config = config(folder, model("m", Orders(folder / "orders")), **settings)
        self._flags = ("--http-port", str(ports["http_port"]))
        self._stack = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self.server = self._stack.enter_context(OperatedServer(self._config, *self._flags))
        self.server.wait_ready()

    def close(self) -> None:
        self._stack.close()


@pytest.mark.thorough
def test_servers_are_replaced_one_by_one_and_no_request_is_lost(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        pods = [Pod(tmp_path, number) for number in range(2)]
        for pod in pods:
            stack.callback(pod.close)
        addresses = [pod.server.addresses for pod in pods]
        load = SteadyLoad([one["HTTP"] for one in addresses], [one["gRPC"] for one in addresses])
        with load:
            for pod in pods * ROUNDS:
                load.wait_answers(300)
                for one in pods:  # the client of gRPC watches the health of each
                    wait_until(lambda: one.server.metric("gpuserve_streams") > 0, "gRPC is connected")  # noqa: B023
                assert pod.server.end() == 0
                pod.start()
            measured(f"{load.n_answered()} requests answered during {len(pods) * ROUNDS} replacements")
    assert load.lost() == {}
