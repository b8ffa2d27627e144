"""Callables of programs that are not back in time: in a thread, in a program that is attached, and over a
front that died meanwhile.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import python_backend
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server
from hanging_scene import entry
from ingress import INGRESS_PROCESSES
from operated import InBackground, OperatedServer, config
from processes import children, command_line, wait_until
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gpuserve import ModelConfig, Request, Server, Tensor

LIMIT_S = 0.5
CAUGHT_S = 10.0
LIMITED = ModelConfig(max_batch_size=4, execution_timeout_s=LIMIT_S)


class Gate:
    """Does not come back while it is shut; kept in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # which cannot be pickled
        self.opened = threading.Event()
        self.opened.set()
        self.running = 0

    def __call__(self, requests: list[Request]) -> list[dict[str, Any]]:
        with self.lock:
            self.running += 1
        assert self.running == 1, "two threads call one object"
        assert self.opened.wait(30)
        self.running -= 1
        return [{"OUTPUT_1": request["INPUT_1"] + 1} for request in requests]


@pytest.mark.thorough
def test_a_thread_that_hangs_gets_nothing_until_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with free_server() as server, caplog.at_level(logging.ERROR, "gpuserve"):
        server.bind("m", gate, **FLOATS_IN_AND_OUT, isolation="thread", config=LIMITED)
        server.run()
        gate.opened.clear()
        began_at = time.monotonic()
        with pytest.raises(Refused, match=r"was not back within execution_timeout_s, 0\.5 s") as refused:
            ask(server, "m", 1.0)
        assert time.monotonic() - began_at < LIMIT_S + CAUGHT_S
        assert refused.value.status == 504
        waiting = InBackground(ask, server, "m", 2.0)
        wait_until(lambda: "its thread cannot be killed" in caplog.text, "the log says it")
        gate.opened.set()
        assert waiting.result() == [3.0]
        assert ask(server, "m", 3.0) == [4.0]
    (record,) = [one for one in caplog.records if "cannot be killed" in one.message]
    assert "in __call__" in str(record.exc_text)


@pytest.mark.thorough
def test_a_worker_of_an_attached_program_is_killed_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hang(requests: list[Request]) -> list[dict[str, Any]]:
        if (requests[0]["x"] < 0).any():
            time.sleep(60)
        return [{"y": request["x"] * 2} for request in requests]

    own = entry("own", "in_c")
    with OperatedServer(config(tmp_path, own)).until_ended() as operated:
        tensors = [Tensor((-1,), np.float32, name="x")], [Tensor((-1,), np.float32, name="y")]
        with Server.attach(operated.addresses["HTTP"]) as program, caplog.at_level(logging.ERROR, "gpuserve"):
            program.bind("m", hang, *tensors, config=LIMITED)
            program.run()
            (worker,) = [one for one in children(os.getpid()) if "gpuserve_worker" in command_line(one)]
            began_at = time.monotonic()
            answer = operated.infer("m", -1.0)
            assert (answer.status, "was not back within" in answer.error) == (504, True)
            assert time.monotonic() - began_at < LIMIT_S + CAUGHT_S
            operated.wait_model_ready("m")
            assert operated.infer("m", 1.0).output("y") == [2.0]
            assert worker not in children(os.getpid())
    (record,) = [one for one in caplog.records if "not back after" in one.message]
    assert "Main thread" in str(record.exc_text)


@pytest.mark.thorough
def test_a_call_that_hangs_longer_than_its_front_lives_is_ended_by_the_next(tmp_path: Path) -> None:
    """Nobody waits for it then; who asks next is not to blame, and is answered by the worker's successor.

    An ingress process keeps the connection, and gives the request to the next front, where it hangs again.
    """
    with OperatedServer(
        config(tmp_path, entry("m", "in_c", execution_timeout_s=1.0))
    ).until_ended() as server:
        hung = InBackground(server.infer, "m", -1.0)
        wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "it hangs")
        front = server.front
        os.kill(front, signal.SIGKILL)
        if INGRESS_PROCESSES > 1:
            assert hung.result().status == 504
        else:
            with pytest.raises(Exception):  # noqa: B017, PT011 - whichever way its connection ends
                hung.result()
        wait_until(lambda: server.front not in {0, front}, "another front is started")
        wait_until(lambda: server.status("/v2/health/ready") == 200, "it is ready")
        assert server.infer("m", 1.0).output("y") == [2.0]
        n_calls = 2 if INGRESS_PROCESSES > 1 else 1
        assert server.metric("gpuserve_execution_timeouts_total", model="m") == n_calls


@pytest.mark.thorough
def test_a_response_sender_that_sends_nothing_more_is_ended(tmp_path: Path) -> None:
    numbers = {
        "input": [python_backend.said("X", "FP32", -1)],
        "output": [python_backend.said("Y", "FP32", -1)],
        "model_transaction_policy": {"decoupled": True},
    }
    stalls = python_backend.entry("stalls", config=numbers, execution_timeout_s=LIMIT_S)
    with OperatedServer(config(tmp_path, stalls)).until_ended() as server:
        began_at = time.monotonic()
        asked = python_backend.tensor("X", "FP32", [1.0])
        *responses, last = python_backend.stream(server.addresses["gRPC"], "stalls", asked)
        assert [result.as_numpy("Y").tolist() for result, _ in responses] == [[-1.0]] * 2
        assert "was not back within execution_timeout_s, 0.5 s" in str(last[1])
        assert LIMIT_S <= time.monotonic() - began_at < LIMIT_S + CAUGHT_S
        server.wait_log("in _send")
        server.wait_model_ready("stalls")


@pytest.mark.thorough
def test_a_sequence_whose_request_hangs_ends(tmp_path: Path) -> None:
    steps = entry("m", "in_c", max_batch_size=4, sequence_batching={})
    with (
        OperatedServer(config(tmp_path, steps)).until_ended() as server,
        InferenceServerClient(server.addresses["gRPC"]) as client,
    ):

        def ask_in_sequence(value: float, **more: bool) -> Any:
            asked = python_backend.tensor("x", "FP32", [[value]])
            return client.infer("m", [asked], sequence_id=7, **more).as_numpy("y").item()

        assert ask_in_sequence(1.0, sequence_start=True) == 2.0
        with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED.* was not back within"):
            ask_in_sequence(-1.0)
        server.wait_model_ready("m")
        with pytest.raises(InferenceServerException, match="START"):
            ask_in_sequence(1.0)
        assert ask_in_sequence(1.0, sequence_start=True) == 2.0
