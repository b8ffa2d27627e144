"""A callable that never comes back: who is told what, and how an operator gets rid of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from operated import InBackground, OperatedServer
from processes import wait_until
from repositories import Client, clients_are_closed, entry, write
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here


@pytest.mark.thorough
def test_what_waits_behind_a_hung_call_is_answered_by_the_model_that_is_loaded_anew(tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    os.mkfifo(run)
    write(config, entry("m", 1.0, run_fifo=str(run)), host="127.0.0.1", drain_timeout_s=2)
    with OperatedServer(config).until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        hung = InBackground(client.infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it hangs")
        widths = (2, 2, 1 << 17)
        waiting = [InBackground(client.infer, "m", width=width) for width in widths]
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == len(widths), "they wait")
        (before,) = server.workers
        write(config, entry("m", 2.0), host="127.0.0.1", drain_timeout_s=2)
        client.asked.load_model("m")
        loaded_at = time.monotonic()
        assert [one.result().tag for one in waiting] == [2.0] * len(widths)
        assert time.monotonic() - loaded_at < 2  # the drain time of the call that hangs
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            hung.result()
        wait_until(lambda: before not in server.workers, "the process that hung is gone")


@pytest.mark.thorough
def test_a_model_whose_callable_hangs_is_loaded_anew_beside_it(tmp_path: Path) -> None:
    """Its request is told when the drain time is over, and the process is ended although it never answers."""
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    os.mkfifo(run)
    write(config, entry("m", 1.0, run_fifo=str(run)), host="127.0.0.1", drain_timeout_s=0.5)
    with OperatedServer(config).until_ended() as server:
        client = Client("grpc", server.addresses["gRPC"])
        hung = InBackground(client.infer, "m")
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it hangs")
        before = server.workers
        write(config, entry("m", 2.0), host="127.0.0.1", drain_timeout_s=0.5)
        client.asked.load_model("m")
        assert client.infer("m").tag == 2.0
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            hung.result()
        wait_until(lambda: not set(before) & set(server.workers), "the process that hung is gone")
        assert client.infer("m").tag == 2.0
