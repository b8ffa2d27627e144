"""Scaling in place for each kind of model: with sequences, rates, calls to itself, versions, in threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bound import FLOATS_IN_AND_OUT, free_server
from bound import ask as ask_bound
from commands import ask as operate
from operated import MODELS, InBackground, OperatedServer, Orders, model
from processes import wait_until
from steady_load import SteadyLoad
from test_front_restart import SUMS
from test_front_restart import ask_sums as ask
from test_scale import count_of, on, scaled, started, well

from gpuserve import ModelConfig


@contextlib.contextmanager
def of_sequences(folder: Path, idle_us: int = 60_000_000, **settings: Any) -> Iterator[OperatedServer]:
    """A server of two instances, with the sequence "a" at one and "b" at the other."""
    entry = {**SUMS, **on(2), "sequence_batching": {"max_sequence_idle_us": idle_us}}
    with started(folder, entry, **settings) as server:
        server.wait_ready()
        yield server
        assert server.end() == 0


def begin(server: OperatedServer) -> dict[str, int]:
    """Two sequences, one at each instance: their workers."""
    answers = {name: ask(server, 1, sequence_id=name, sequence_start=True) for name in "ab"}
    pids = {name: answer["pid"] for name, answer in answers.items() if isinstance(answer, dict)}
    assert sorted(pids.values()) == server.workers
    return pids


@pytest.mark.thorough
def test_sequences_are_finished_where_they_are(tmp_path: Path) -> None:
    with of_sequences(tmp_path) as server:
        pids = begin(server)
        scaling = InBackground(scaled, server, sums=1)
        wait_until(lambda: count_of(server, "sums") == 1, "one instance leaves")
        new = ask(server, 1, sequence_id="c", sequence_start=True)
        assert isinstance(new, dict)
        leaving = next(name for name, pid in pids.items() if pid != new["pid"])
        for total in (2, 3):
            answer = ask(server, 1, sequence_id=leaving)
            assert isinstance(answer, dict)
            assert (answer["y"], answer["pid"]) == (total, pids[leaving])
        last = ask(server, 1, sequence_id=leaving, sequence_end=True)
        assert isinstance(last, dict)
        assert last["pid"] == pids[leaving]
        well(scaling.result())
        assert server.workers == [new["pid"]]
        for name in {"a", "b", "c"} - {leaving}:
            assert isinstance(ask(server, 1, sequence_id=name), dict)
        well(scaled(server, sums=2))
        more = ask(server, 1, sequence_id="d", sequence_start=True)
        assert isinstance(more, dict)
        assert more["pid"] != new["pid"], "a new instance has more free seats"


@pytest.mark.thorough
def test_a_sequence_that_says_no_more_is_waited_for_its_idle_time(tmp_path: Path) -> None:
    with of_sequences(tmp_path, idle_us=200_000) as server:
        begin(server)
        well(scaled(server, sums=1))
        assert len(server.workers) == 1


@pytest.mark.thorough
def test_a_sequence_that_goes_on_for_too_long_is_ended(tmp_path: Path) -> None:
    with of_sequences(tmp_path, drain_timeout_s=0.3) as server:
        begin(server)
        well(scaled(server, sums=1))
        answers = [ask(server, 1, sequence_id=name) for name in "ab"]
        assert sum(isinstance(one, dict) for one in answers) == 1
        assert [one for one in answers if isinstance(one, str) and "was lost with its instance" in one]


@pytest.mark.thorough
def test_no_request_is_lost_where_rates_are_limited(tmp_path: Path, orders: Orders) -> None:
    limited = {"rate_limiter": {"resources": [{"name": "R", "count": 1}]}}
    instances = {"instances": [{"device": "cpu", "count": 1, **limited}]}
    rates = {"rate_limit": "execution_count", "rate_limit_resources": ["R:2"]}
    with started(tmp_path, model("m", orders, **instances), **rates) as server:
        server.wait_ready()
        with SteadyLoad([server.addresses["HTTP"]], [server.addresses["gRPC"]]) as load:
            for count in (3, 1, 2, 1):
                well(scaled(server, m=count))
                load.wait_answers(40)
        assert load.lost() == {}
        assert len(server.workers) == 1
        assert server.end() == 0


def with_y_alone(orders: Orders, target: str, **keys: Any) -> dict[str, Any]:
    """Another callable as the model "m"."""
    entry = model("m", orders, callable=target, kwargs={}, **keys)
    return {**entry, "outputs": entry["outputs"][:1]}


@pytest.mark.thorough
def test_a_model_that_asks_itself_keeps_an_instance_that_can_answer(tmp_path: Path, orders: Orders) -> None:
    entry = with_y_alone(orders, f"{MODELS / 'asking_hard.py'}:asks_itself", **on(3))
    with started(tmp_path, entry) as server:
        server.wait_ready()
        ended, answers = threading.Event(), list[Any]()

        def ask_on() -> None:
            with server.client() as client:
                while not ended.is_set():
                    answers.append(client.infer("m", 1.0))

        asking = InBackground(ask_on)
        for count in (2, 3, 2):
            well(scaled(server, m=count))
            so_far = len(answers)
            wait_until(lambda: len(answers) > so_far + 20, "it goes on")  # noqa: B023
        ended.set()
        asking.result()
        assert {answer.status for answer in answers} == {200}
        well(scaled(server, m=1))
        assert "all of its instances (1) wait" in server.infer("m", 1.0).error
        assert server.end() == 0


SLOW_TO_ITSELF = """
import time
from pathlib import Path
import numpy as np
from gpuserve import current_model

def itself(requests):
    x = requests[0]["x"].copy()
    if x.flat[0] == 0:
        Path("DIRECTORY/asked").touch()
        while Path("DIRECTORY/shut").exists():
            time.sleep(0.002)
        return [{"y": x}]
    return [current_model().infer("m", {"x": x - 1})]
"""


@pytest.mark.thorough
def test_a_model_that_would_wait_for_itself_for_ever_is_told(tmp_path: Path, orders: Orders) -> None:
    folder = orders.directory
    (tmp_path / "itself.py").write_text(SLOW_TO_ITSELF.replace("DIRECTORY", str(folder)))
    entry = with_y_alone(orders, f"{tmp_path / 'itself.py'}:itself", **on(2), max_batch_size=1)
    with started(tmp_path, entry, drain_timeout_s=0.3) as server:
        server.wait_ready()
        for _ in range(4):  # whichever of the two asks
            orders.shut()
            asking = InBackground(server.infer, "m", 1.0)
            wait_until((folder / "asked").exists, "the other one is asked")
            scaling = InBackground(scaled, server, m=1)
            wait_until(lambda: server.metric("gpuserve_worker_up", model="m") == 1, "one is gone")
            orders.open()
            assert asking.result().status in (200, 503)
            well(scaling.result())
            assert server.infer("m", 0.0).status == 200
            well(scaled(server, m=2))
            (folder / "asked").unlink()
        assert server.end() == 0


@pytest.mark.thorough
def test_every_version_is_scaled_and_who_asks_first_is_first(tmp_path: Path, orders: Orders) -> None:
    versions = [model("m", orders, "load_slowly", version=one) for one in (1, 2)]
    with started(tmp_path, *versions, model("other", orders), model_control="explicit") as server:
        server.wait_ready()
        orders.shut()
        first = InBackground(scaled, server, m=2)
        wait_until(lambda: len(server.workers) == 5, "a worker more for each version")
        second = InBackground(scaled, server, m=1)
        assert well(scaled(server, other=2)) == {"models": {"other": {"before": 1, "after": 2}}}
        orders.open()
        for outcome in (first.result(), second.result()):
            well(outcome)
        assert sorted(count_of(server, name) for name in ("m", "m/versions/1", "other")) == [1, 1, 2]
        assert len(server.workers) == 4
        assert server.end() == 0


def test_workers_that_are_threads_come_and_go() -> None:
    entered = threading.Barrier(2)

    def meet(requests: Any) -> Any:
        if requests[0]["INPUT_1"].flat[0] > 0:
            entered.wait(20)
        return [{"OUTPUT_1": one["INPUT_1"] * 2} for one in requests]

    server = free_server(host="127.0.0.1")
    server.bind("m", meet, **FLOATS_IN_AND_OUT, config=ModelConfig(max_batch_size=1), isolation="thread")
    with server:
        server.run()
        for count in (2, 1, 2):
            well(operate(server.addresses["http"].removeprefix("http://"), "scale", counts={"m": count}))
            assert ask_bound(server, "m", 0.0) == [0.0]
        both = [InBackground(ask_bound, server, "m", 1.0) for _ in range(2)]
        assert [one.result() for one in both] == [[2.0], [2.0]]
