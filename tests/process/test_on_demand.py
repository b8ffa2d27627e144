"""Models that are loaded for their requests, and go for others: one load for many requests, failures on the
way, and what operators and clients see of models that are cold.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ask, status
from operated import MODELS, Answer, Client, InBackground, OperatedServer, config
from processes import children, command_line, measured, wait_until
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from gpuserve import ModelConfig, Server, Tensor
from gpuserve.decorators import batch
from gpuserve.openai import ChatRequest
from gpuserve.supervisor.models.on_demand import GIVE_WAY_S

MIB = 1 << 20


def heavy(folder: Path, name: str, nbytes: int = 0, **keys: Any) -> dict[str, Any]:
    (folder / name).mkdir(exist_ok=True)
    return {
        "name": name,
        "callable": f"{MODELS / 'heavy.py'}:Heavy",
        "kwargs": {"folder": str(folder / name), "nbytes": nbytes},
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": one, "dtype": dtype, "shape": [-1]} for one, dtype in OUTPUTS],
        "max_batch_size": 64,
        "on_demand": True,
        **keys,
    }


OUTPUTS = (("y", "float32"), ("pid", "int64"))


@contextmanager
def serving(folder: Path, *models: dict[str, Any], **settings: Any) -> Iterator[OperatedServer]:
    with OperatedServer(config(folder, *models, **settings)).until_ended() as server:
        yield server


def loads(folder: Path, name: str) -> int:
    path = folder / name / "loads"
    return len(path.read_text().splitlines()) if path.exists() else 0


def residences(server: OperatedServer) -> dict[str, str]:
    return {one["name"]: one["residence"] for one in status(server.addresses["HTTP"])["models"]}


def wait_cold(server: OperatedServer, name: str) -> None:
    wait_until(lambda: residences(server)[name] == "COLD", f"model {name} is cold")


def post(server: OperatedServer, path: str, document: Any) -> Answer:
    with server.client() as client:
        return client.post(path, document)


def infer_within(server: OperatedServer, name: str, timeout_s: float) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    request = {"inputs": [tensor], "parameters": {"timeout": round(timeout_s * 1e6)}}
    return post(server, f"/v2/models/{name}/infer", request)


def burst(server: OperatedServer, name: str, count: int) -> list[object]:
    """Answers, or errors, of so many requests at once."""
    given = grpc.InferInput("x", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    results: list[object] = []
    ended = threading.Semaphore(0)

    def on_answer(result: object, error: object) -> None:
        results.append(error or result)
        ended.release()

    with grpc.InferenceServerClient(server.addresses["gRPC"]) as client:
        for _ in range(count):
            client.async_infer(name, [given], on_answer)
        for _ in range(count):
            assert ended.acquire(timeout=20)
    return results


class MemorySampler(threading.Thread):
    """Samples the proportional memory of a server's workers until it is ended."""

    def __init__(self, server: OperatedServer) -> None:
        super().__init__()
        self._server = server
        self._ended = threading.Event()
        self.most_nbytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.05):
            nbytes = sum(map(self._pss, self._server.workers))
            self.most_nbytes = max(self.most_nbytes, nbytes)

    def _pss(self, pid: int) -> int:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most_nbytes


def test_a_thousand_requests_cause_one_load_and_an_idle_model_goes(tmp_path: Path) -> None:
    with serving(tmp_path, heavy(tmp_path, "m", idle_timeout_s=1), heavy(tmp_path, "other")) as server:
        assert server.workers == []
        assert server.status("/v2/health/ready") == server.status("/v2/models/m/ready") == 200
        states = {
            one["name"]: one["state"] for one in json.loads(post(server, "/v2/repository/index", {}).body)
        }
        assert states == {"m": "READY", "other": "READY"}

        (tmp_path / "m" / "closed").touch()
        late = infer_within(server, "m", 0.3)
        assert (late.status, "were given to model 'm'" in late.error) == (504, True)
        answers = InBackground(burst, server, "m", 1000)
        wait_until(lambda: server.metric("gpuserve_queue_requests", model="m") == 1000, "all wait")
        assert server.status("/v2/health/ready") == 200
        (tmp_path / "m" / "closed").unlink()
        assert not [one for one in answers.result() if isinstance(one, InferenceServerException)]
        assert loads(tmp_path, "m") == 1
        assert server.metric("gpuserve_cold_start_duration_seconds_count", model="m") == 1

        wait_cold(server, "m")
        assert server.workers == []
        assert server.metric("gpuserve_evictions_total", model="m", reason="idle") == 1
        assert server.status("/v2/health/ready") == server.status("/v2/models/m/ready") == 200
        assert server.infer("m", 1.0).output("y") == [2.0]
        assert loads(tmp_path, "m") == 2
        assert loads(tmp_path, "other") == 0


def test_the_least_recently_used_model_goes_within_the_budget(tmp_path: Path) -> None:
    models = [heavy(tmp_path, name, 40 * MIB) for name in "abc"]
    # Two of them fit: a worker takes some 20 MiB itself.
    with serving(tmp_path, *models, memory={"host": "150MiB"}) as server:
        for position, name in enumerate(
            "abacbcbcbc"
        ):  # c comes for b, and b for a, which is idle from then on
            if position == 3:  # a model counts as used for as long as it took to load
                began_at = time.monotonic()
                wait_until(lambda at=began_at: time.monotonic() - at > GIVE_WAY_S, "no model counts as used")
            assert server.infer(name, 1.0).output("y") == [2.0]
            taken = status(server.addresses["HTTP"])["memory"]["cpu"]
            assert taken["nbytes"] <= taken["limit_nbytes"] == 150 * MIB
        assert {name: loads(tmp_path, name) for name in "abc"} == {"a": 1, "b": 2, "c": 1}
        assert residences(server) == {"a": "COLD", "b": "RESIDENT", "c": "RESIDENT"}
        assert server.metric("gpuserve_evictions_total", reason="memory") == 2
        wait_until(
            lambda: server.metric("gpuserve_resident_memory_bytes", model="b", device="cpu") > 40 * MIB,
            "the metrics show the measured memory",
        )
        assert server.metric("gpuserve_resident_memory_bytes", model="a") == 0


@pytest.mark.thorough
def test_steps_of_an_ensemble_and_open_sequences_count_as_use(tmp_path: Path) -> None:
    tensors = {key: heavy(tmp_path, "x")[key] for key in ("inputs", "outputs")}
    step = {"model": "step", "inputs": {"x": "x"}, "outputs": {"y": "y", "pid": "pid"}}
    ensemble = {"name": "both", **tensors, "max_batch_size": 64, "ensemble": {"steps": [step]}}
    talk = heavy(tmp_path, "talk", idle_timeout_s=0.5, sequence_batching={"max_sequence_idle_us": "20s"})
    with serving(tmp_path, heavy(tmp_path, "step", idle_timeout_s=0.5), ensemble, talk) as server:
        assert server.status("/v2/models/both/ready") == 200
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}

        def say(**parameters: Any) -> int:
            request = {"inputs": [tensor], "parameters": {"sequence_id": 7, **parameters}}
            return int(post(server, "/v2/models/talk/infer", request).output("pid")[0])

        pid = say(sequence_start=True)
        assert server.infer("both", 1.0).output("y") == [2.0]
        wait_cold(server, "step")
        assert server.infer("both", 1.0).output("y") == [2.0]
        assert loads(tmp_path, "step") == 2
        assert say(sequence_end=True) == pid, "the model stayed for the sequence"
        wait_cold(server, "talk")


@pytest.mark.thorough
def test_models_of_unknown_size_are_measured_one_after_the_other(tmp_path: Path) -> None:
    models = [heavy(tmp_path, name, 40 * MIB) for name in "abc"]
    with serving(tmp_path, *models, memory={"host": "150MiB"}) as server:
        sampler = MemorySampler(server)
        sampler.start()
        answers = [InBackground(server.infer, name, 1.0) for name in "abc"]
        assert [one.result().output("y") for one in answers] == [[2.0]] * 3
        assert sampler.end() <= 1.02 * 150 * MIB


@pytest.mark.thorough
def test_models_in_use_take_turns_if_their_memory_does_not_suffice_for_both(tmp_path: Path) -> None:
    models = [heavy(tmp_path, name, memory_nbytes="100MiB") for name in "ab"]
    with serving(tmp_path, *models, memory={"host": "150MiB"}) as server:
        ended = threading.Event()

        def ask_on() -> int:
            count = 0
            while not ended.is_set():
                assert server.infer("a", 1.0).output("y") == [2.0]
                count += 1
            return count

        busy = [InBackground(ask_on) for _ in range(4)]
        wait_until(lambda: loads(tmp_path, "a") == 1, "a is loaded")
        began = time.monotonic()
        assert server.infer("b", 1.0).output("y") == [2.0]
        assert 2 <= time.monotonic() - began < 10
        wait_until(lambda: loads(tmp_path, "a") == 2, "a comes back")
        ended.set()
        assert all(one.result() > 0 for one in busy)


@pytest.mark.thorough
def test_a_load_that_fails_is_told_to_its_requests_and_tried_again(tmp_path: Path) -> None:
    with serving(tmp_path, heavy(tmp_path, "m"), heavy(tmp_path, "other")) as server:
        (tmp_path / "m" / "broken").touch()
        refused = server.infer("m", 1.0)
        assert (refused.status, "the weights are broken" in refused.error) == (503, True)
        assert loads(tmp_path, "m") == 2, "the first restart comes at once"
        assert server.status("/v2/models/m/ready") == server.status("/v2/health/ready") != 200
        assert server.infer("other", 1.0).output("y") == [2.0]
        (tmp_path / "m" / "broken").unlink()
        wait_until(lambda: server.status("/v2/models/m/ready") == 200, "the model is loaded again")
        assert server.infer("m", 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_deaths_of_a_worker_and_of_the_front_during_a_cold_start(tmp_path: Path) -> None:
    with serving(tmp_path, heavy(tmp_path, "m"), heavy(tmp_path, "cold")) as server:
        (tmp_path / "m" / "closed").touch()
        answer = InBackground(server.infer, "m", 1.0)
        wait_until(lambda: loads(tmp_path, "m") == 1, "it loads")
        os.kill(server.workers[0], signal.SIGKILL)
        wait_until(lambda: loads(tmp_path, "m") == 2, "it loads again")
        (tmp_path / "m" / "closed").unlink()
        (pid,) = answer.result().output("pid")

        server.replace_front()
        assert server.infer("m", 1.0).output("pid") == [pid]
        assert server.infer("cold", 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_a_drain_waits_for_a_cold_start(tmp_path: Path) -> None:
    with OperatedServer(config(tmp_path, heavy(tmp_path, "m"))).until_killed() as server:
        (tmp_path / "m" / "closed").touch()
        answer = InBackground(server.infer, "m", 1.0)
        wait_until(lambda: loads(tmp_path, "m") == 1, "it loads")
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("finishing queued requests")
        (tmp_path / "m" / "closed").unlink()
        assert answer.result().output("y") == [2.0]
        assert server.process.wait(20) == 0


@pytest.mark.thorough
def test_operators_and_clients_change_cold_models(tmp_path: Path) -> None:
    models = [heavy(tmp_path, name) for name in "ab"]
    with serving(tmp_path, *models, model_control="explicit") as server:
        address = server.addresses["HTTP"]
        assert ask(address, "scale", counts={"a": 2}).code == ""
        assert server.workers == []
        assert server.infer("a", 1.0).output("y") == [2.0]
        wait_until(lambda: loads(tmp_path, "a") == 2, "both instances are loaded")

        config(tmp_path, heavy(tmp_path, "a"), heavy(tmp_path, "b", prefetch=1), model_control="explicit")
        assert ask(address, "reload").result["reloaded"] == ("b",)
        assert residences(server)["b"] == "COLD"
        assert post(server, "/v2/repository/models/b/load", {}).status == 200
        assert loads(tmp_path, "b") == 1
        assert residences(server)["b"] == "RESIDENT"
        (tmp_path / "b" / "broken").touch()
        refused = post(server, "/v2/repository/models/b/load", {})
        assert (refused.status, "the weights are broken" in refused.error) == (400, True)
        assert server.infer("b", 1.0).output("y") == [2.0], "a load that fails changes nothing"

        assert post(server, "/v2/repository/models/b/unload", {}).status == 200
        assert server.infer("b", 1.0).status == 404
        (tmp_path / "a" / "closed").touch()
        assert post(server, "/v2/repository/models/a/unload", {}).status == 200
        assert server.infer("a", 1.0).status == 404
        (tmp_path / "a" / "closed").unlink()
        assert post(server, "/v2/repository/models/a/load", {}).status == 200
        assert server.infer("a", 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_a_program_binds_models_on_demand_and_openai_clients_see_cold_ones() -> None:
    def double(x: Any) -> Any:
        return {"y": 2 * x}

    def talk(request: ChatRequest) -> str:
        return request.messages[-1].text

    given, made = ([Tensor(name=one, dtype="float32", shape=(1,))] for one in "xy")
    options = ModelConfig(max_batch_size=4, on_demand=True, idle_timeout_s=1)
    with Server(http_port=0, grpc_port=0, metrics_port=0) as server:
        server.bind("early", batch(double), given, made, config=options)
        server.bind("talker", talk, config=ModelConfig(openai=True, on_demand=True))
        server.run()
        server.bind("later", batch(double), given, made, config=options)
        assert not [pid for pid in children(os.getpid()) if "gpuserve_worker" in command_line(pid)]
        with Client(server.addresses["http"].removeprefix("http://")) as client:
            listed = json.loads(client.get("/v1/models").body)["data"]
            assert [one["id"] for one in listed] == ["talker"]
            for name in ("early", "later"):
                assert client.infer(name, 1.0).output("y") == [2.0]
            chat = {"model": "talker", "messages": [{"role": "user", "content": "hello"}]}
            assert client.post("/v1/chat/completions", chat).status == 200


#: The models of 100 MiB that fit into 1 GiB, with some 20 MiB for each process.
RESIDENT = 8


@pytest.mark.thorough
def test_a_hundred_models_of_100_mib_within_one_gib_under_zipf_traffic(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(100)]
    chosen = random.Random(1).choices(names, [1 / rank for rank in range(1, 101)], k=300)
    with serving(
        tmp_path, *[heavy(tmp_path, name, 100 * MIB) for name in names], memory={"host": "1GiB"}
    ) as server:
        sampler = MemorySampler(server)
        sampler.start()
        lru: OrderedDict[str, None] = OrderedDict()
        hits = lru_hits = 0
        cold_s, warm_s = [], []
        with server.client() as client:
            for name in chosen:
                before = loads(tmp_path, name)
                began = time.monotonic()
                assert client.infer(name, 1.0).output("y") == [2.0]
                took_s = time.monotonic() - began
                is_hit = loads(tmp_path, name) == before
                hits += is_hit
                (warm_s if is_hit else cold_s).append(took_s)
                lru_hits += name in lru
                lru[name] = None
                lru.move_to_end(name)
                while len(lru) > RESIDENT:
                    lru.popitem(last=False)
        most = sampler.end()
        answers = [InBackground(server.infer, name, 1.0) for name in chosen[:100]]
        assert all(one.result().output("y") == [2.0] for one in answers)
    measured(
        f"{hits} of {len(chosen)} requests met a warm model, {lru_hits} in a plain LRU cache of {RESIDENT}; "
        f"workers took {most / MIB:.0f} MiB at most; a cold start took {np.median(cold_s):.3f} s, p99 "
        f"{np.quantile(cold_s, 0.99):.3f} s, a warm request {np.median(warm_s) * 1e3:.2f} ms"
    )
    assert most <= 1.02 * (1 << 30)
    assert abs(hits - lru_hits) <= 0.02 * len(chosen)


@pytest.mark.thorough
def test_no_request_fails_while_models_come_and_go_and_workers_are_killed(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(20)]
    models = [heavy(tmp_path, name, 20 * MIB, idle_timeout_s=2) for name in names]
    models[3]["instances"] = [{"device": "cpu", "count": 2}]
    with serving(tmp_path, *models, memory={"host": "200MiB"}) as server:
        ended = threading.Event()

        def ask_on(seed: int) -> int:
            chosen, count = random.Random(seed), 0
            with server.client() as client:
                while not ended.is_set():
                    (name,) = chosen.choices(names, [1 / rank for rank in range(1, 21)])
                    assert client.infer(name, 1.0).output("y") == [2.0]
                    count += 1
            return count

        clients = [InBackground(ask_on, seed) for seed in range(6)]
        sampler = MemorySampler(server)
        sampler.start()
        for number in range(6):
            loaded = sum(loads(tmp_path, name) for name in names)
            wait_until(lambda: sum(loads(tmp_path, name) for name in names) >= loaded + 8, "models change")  # noqa: B023
            for pid in server.workers[number % 2 : number % 2 + 1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ended.set()
        answered = sum(one.result() for one in clients)
        most = sampler.end()
        wait_until(lambda: not server.workers, "all models are idle and gone")
    measured(f"{answered} requests answered; workers took {most / MIB:.0f} MiB at most")
    assert most <= 1.02 * 200 * MIB


@pytest.mark.thorough
def test_a_loaded_model_on_demand_answers_as_fast_as_any_other(tmp_path: Path) -> None:
    others = [heavy(tmp_path, f"m{number}") for number in range(98)]
    pair = {"on demand": "warm", "always loaded": "pinned"}
    models = [*others, heavy(tmp_path, "warm"), heavy(tmp_path, "pinned", on_demand=False)]
    with serving(tmp_path, *models, memory={"host": "1GiB"}) as server, server.client() as client:
        took_s: dict[str, list[float]] = {kind: [] for kind in pair}
        for _ in range(10):
            for kind, name in pair.items():
                for number in range(300):
                    began = time.monotonic()
                    assert client.infer(name, 1.0).output("y") == [2.0]
                    if number >= 20:
                        took_s[kind].append(time.monotonic() - began)
    p99 = {kind: float(np.quantile(each, 0.99)) for kind, each in took_s.items()}
    for kind, each in took_s.items():
        measured(f"{kind}: p50 {np.median(each) * 1e3:.2f} ms, p99 {p99[kind] * 1e3:.2f} ms")
    assert p99["on demand"] <= 2 * p99["always loaded"]
