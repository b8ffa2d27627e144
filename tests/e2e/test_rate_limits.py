"""Instances of several models that share resources: who runs at the same time, and who is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bound import InBackground, free_server, infer
from processes import wait_until

from gpuserve import ModelConfig, RateLimiter, Resource, Server, Tensor
from gpuserve.core.errors import StartupError
from gpuserve.decorators import batch

NUMBER = Tensor((1,), np.int32)


class Tally:
    """How many calls of some models run, and how many ever did at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.most = 0
        self.let = threading.Event()

    @batch
    def __call__(self, INPUT_1: Any) -> Any:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.let.wait(30)
        with self.lock:
            self.running -= 1
        return [INPUT_1]


def bind(server: Server, name: str, tally: Tally, instances: int, *resources: Resource) -> None:
    config = ModelConfig(max_batch_size=1, rate_limiter=RateLimiter(resources))
    server.bind(name, [tally] * instances, [NUMBER], [NUMBER], config=config, isolation="thread")


def ask(server: Server, name: str, count: int) -> list[InBackground]:
    one = np.zeros((1, 1), np.int32)
    return [InBackground(lambda: infer(server, name, INPUT_1=one)) for _ in range(count)]


@pytest.fixture(scope="module")
def tallies() -> Iterator[tuple[Server, dict[str, Tally]]]:
    with free_server(rate_limit="execution_count", rate_limit_resources=("R:2",)) as server:
        made = {"limited": Tally(), "free": Tally()}
        for name in "ab":
            bind(server, name, made["limited"], 3, Resource("R"))
        bind(server, "free", made["free"], 3)
        server.run()
        yield server, made
        for tally in made.values():
            tally.let.set()  # after a failure something may still run


def test_no_more_run_than_there_is_for(tallies: tuple[Server, dict[str, Tally]]) -> None:
    server, made = tallies
    asked = ask(server, "a", 6) + ask(server, "b", 6)
    wait_until(lambda: made["limited"].running == 2, "two run")
    free = ask(server, "free", 3)
    wait_until(lambda: made["free"].running == 3, "those that need nothing run all the same")
    assert made["limited"].running == 2
    for tally in made.values():
        tally.let.set()
    assert [set(one.result()) for one in asked + free] == [{"OUTPUT_1"}] * 15
    assert made["limited"].most == 2
    assert made["free"].most == 3


def test_a_server_that_could_never_run_a_model_does_not_start() -> None:
    server = free_server(rate_limit="execution_count", rate_limit_resources=("R:2",))
    bind(server, "a", Tally(), 1, Resource("R", 3))
    with pytest.raises(StartupError, match='Resource count for "R" is limited to 2'):
        server.run()


def test_limits_that_are_off_limit_nothing() -> None:
    tally = Tally()
    with free_server() as server:
        bind(server, "a", tally, 3, Resource("R"))
        server.run()
        asked = ask(server, "a", 3)
        wait_until(lambda: tally.running == 3, "all run")
        tally.let.set()
        assert all(one.result() for one in asked)
