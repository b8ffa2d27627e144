"""A callable that raises ``UnrecoverableError``: its client is told, and its model says what ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server, status
from exploring import variants
from operated import MODELS, InBackground, OperatedServer, Orders, config, model
from processes import measured, wait_until

from gpuserve import ModelConfig, Server, UnrecoverableError
from gpuserve.core.errors import ModelUnrecoverable
from gpuserve.errors import UnrecoverableError as SameError

TIMEOUT_S = 20.0
TEXT = "no further inference is possible"
SLACK = 4.0
CALLABLE = f"{MODELS / 'unrecoverable.py'}:Unrecoverable"


def broken(requests: Any) -> Any:
    raise UnrecoverableError(TEXT)


def echo(requests: Any) -> Any:
    return [{"OUTPUT_1": one["INPUT_1"]} for one in requests]


def test_it_is_one_class_under_two_names() -> None:
    assert UnrecoverableError is SameError


def last_of(server: OperatedServer) -> tuple[str, str]:
    """What the server has logged last, as far as that was read."""
    last = server.messages()[-1]
    return last["level"], last["msg"]


def test_the_client_gets_the_text_and_the_server_ends_with_6(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, callable=CALLABLE))).until_killed() as server:
        assert server.infer("m", 1.0).output("y") == [2.0]
        orders.die(TEXT)
        answer = server.infer("m", 1.0)
        started = time.monotonic()
        assert (answer.status, answer.error) == (500, TEXT)
        assert server.process.wait(TIMEOUT_S) == 6
        took_s = time.monotonic() - started
        measured(f"from the answer to the exit: {took_s:.3f} s")
        assert took_s < 1.0 * SLACK
        told = ("error", f"model 'm' cannot go on: {TEXT}")
        wait_until(lambda: last_of(server) == told, "the last line is read", TIMEOUT_S)


@pytest.mark.thorough
def test_other_models_finish_and_its_own_queue_is_refused_at_once(tmp_path: Path, orders: Orders) -> None:
    other = Orders(tmp_path / "other")
    one = model("m", orders, callable=CALLABLE, max_batch_size=1)
    with OperatedServer(config(tmp_path, one, model("other", other))).until_killed() as server:
        orders.shut()
        other.shut()
        elsewhere = InBackground(server.infer, "other", 21.0)
        other.wait_calls(1)
        running = InBackground(server.infer, "m", 1.0)
        orders.wait_calls(1)
        orders.die(TEXT)  # in the next call
        queued = [InBackground(server.infer, "m", float(number)) for number in range(2, 5)]
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 3, "they are queued")
        orders.open()
        assert running.result().status == 200
        assert sorted(asked.result().status for asked in queued) == [500, 503, 503]
        assert server.process.poll() is None  # it waits for the other model
        other.open()
        assert elsewhere.result().output("y") == [42.0]
        assert server.process.wait(TIMEOUT_S) == 6


@pytest.mark.thorough
def test_other_models_that_do_not_finish_hold_it_up_no_longer_than_the_drain_time(
    tmp_path: Path, orders: Orders
) -> None:
    other = Orders(tmp_path / "other")
    one = model("m", orders, callable=CALLABLE)
    with OperatedServer(
        config(tmp_path, one, model("other", other), drain_timeout_s=0.2)
    ).until_killed() as server:
        other.shut()
        elsewhere = InBackground(server.infer, "other", 21.0)
        other.wait_calls(1)
        orders.die(TEXT)
        assert server.infer("m", 1.0).status == 500
        assert elsewhere.result().status == 503
        other.open()
        assert server.process.wait(TIMEOUT_S) == 6


def test_restart_worker_starts_that_worker_again_and_the_server_goes_on(
    tmp_path: Path, orders: Orders
) -> None:
    entry = model("m", orders, callable=CALLABLE, on_unrecoverable="restart_worker")
    with OperatedServer(config(tmp_path, entry)).until_ended() as server:
        (worker,) = server.workers
        assert server.infer("m", 1.0).output("calls") == [1]
        orders.die(TEXT)
        answer = server.infer("m", 1.0)
        assert (answer.status, answer.error) == (500, TEXT)
        server.wait_log(f"died (its callable cannot go on: {TEXT})")
        assert server.infer("m", 1.0).output("calls") == [1]
        assert server.workers != [worker]


@pytest.mark.parametrize("isolation", variants("thread", "process"))
def test_serve_raises_and_the_server_is_not_alive(isolation: Literal["process", "thread"]) -> None:
    with free_server() as server:
        server.bind("m", broken, **FLOATS_IN_AND_OUT, isolation=isolation)
        server.bind("echo", echo, **FLOATS_IN_AND_OUT, isolation=isolation)
        server.run()
        serving = InBackground(server.serve)
        with pytest.raises(Refused, match=TEXT):
            ask(server, "m", 1.0)
        with pytest.raises(ModelUnrecoverable, match=f"model 'm' cannot go on: {TEXT}"):
            serving.result()
        assert not server.is_alive()


@pytest.mark.thorough
def test_serve_raises_what_ended_the_server_before() -> None:
    with free_server() as server:
        server.bind("m", broken, **FLOATS_IN_AND_OUT)
        server.run()
        with pytest.raises(Refused, match=TEXT):
            ask(server, "m", 1.0)
        wait_until(lambda: not server.is_alive(), "it ends")
        with pytest.raises(ModelUnrecoverable):
            server.serve()


def test_it_is_asked_for_in_bind() -> None:
    times: list[int] = []

    def once(requests: Any) -> Any:
        times.append(1)
        if len(times) == 1:
            raise UnrecoverableError(TEXT)
        return echo(requests)

    with free_server() as server:
        keys = {**FLOATS_IN_AND_OUT, "config": ModelConfig(max_batch_size=4)}
        server.bind("m", once, **keys, isolation="thread", on_unrecoverable="restart_worker")
        server.run()
        with pytest.raises(Refused, match=TEXT):
            ask(server, "m", 1.0)
        assert ask(server, "m", 1.0) == [1.0]
        assert server.is_alive()


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", variants("thread", "process"))
def test_an_attachment_ends_and_the_server_goes_on(isolation: Literal["process", "thread"]) -> None:
    with free_server() as server:
        server.bind("own", echo, **FLOATS_IN_AND_OUT)
        server.run()
        with Server.attach(server.addresses["http"], timeout_s=5.0) as attached:
            attached.bind("m", broken, **FLOATS_IN_AND_OUT, isolation=isolation)
            attached.bind("n", echo, **FLOATS_IN_AND_OUT, isolation=isolation)
            serving = InBackground(attached.serve)
            with pytest.raises(Refused, match=TEXT):
                ask(server, "m", 1.0)
            with pytest.raises(ModelUnrecoverable, match=f"model 'm' cannot go on: {TEXT}"):
                serving.result()
            assert not attached.is_alive()
        for name in ("m", "n"):
            wait_until(lambda name=name: status(server, f"/v2/models/{name}/ready") != 200, "it is gone")
        assert ask(server, "own", 1.0) == [1.0]
        assert status(server, "/v2/health/ready") == 200
    assert [one for one in threading.enumerate() if one.name.startswith("gpuserve")] == []
