"""Instances of several ranks: every rank gets each batch, and all end with the first that ends."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import bound
import numpy as np
import pytest
from commands import status
from operated import MODELS, Answer, InBackground, OperatedServer
from operated import config as written
from processes import finished, measured, wait_ended, wait_until
from serving import GPUSERVE
from worker_process import model

from gpuserve.errors import BadModelConfig
from gpuserve.supervisor.processes.child_process import spawn
from gpuserve.supervisor.processes.lifecycle import STEADY_S
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import close_all
from gpuserve_worker.protocol.link import Link

MODEL = MODELS / "ranked.py"
FAULT, KILLED, REFUSED, HUNG, LEFT, SLOW, ALL = -13.0, 0.0, 1.0, 2.0, 3.0, 4.0, 99.0
RANKS = 3
#: 1 + 2 + 3.
SUM = 6.0


def entry(directory: Path, **changes: Any) -> dict[str, Any]:
    tensor = {"dtype": "float32", "shape": [-1]}
    kwargs = {"directory": str(directory), **changes.pop("kwargs", {})}
    return {
        "name": "m",
        "callable": f"{MODEL}:Ranked",
        "kwargs": kwargs,
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "max_batch_size": 8,
        "instances": [{"ranks": RANKS}],
        **changes,
    }


def infer(server: OperatedServer, values: Any, source: str = "127.0.0.1", model: str = "m") -> Answer:
    """Send one row, as binary data, from an address of the loopback interface."""
    row = np.asarray(values, np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, row.size]}
    tensor["parameters"] = {"binary_data_size": row.nbytes}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    address, timeout_s = server.addresses["HTTP"], 60.0
    with closing(http.client.HTTPConnection(address, timeout=timeout_s, source_address=(source, 0))) as asked:
        asked.request("POST", f"/v2/models/{model}/infer", head + row.tobytes(), headers)
        response = asked.getresponse()
        return Answer(response.status, response.read())


def pids(directory: Path) -> list[int]:
    """The processes by rank, as the callables know them."""
    return [json.loads((directory / f"rank-{rank}").read_text())["pid"] for rank in range(RANKS)]


def instance(server: OperatedServer) -> dict[str, Any]:
    models = {one["name"]: one for one in status(server.addresses["HTTP"])["models"]}
    (row,) = models["m"]["instances"]
    return dict(row)


class Served(NamedTuple):
    """A server of ``m`` and of an ensemble ``both`` that runs ``m`` twice, and the folder of the ranks."""

    server: OperatedServer
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranks")
    tensors = {key: entry(folder)[key] for key in ("inputs", "outputs", "max_batch_size")}
    steps = [{"model": "m", "inputs": {"x": source}, "outputs": {"y": to}} for source, to in ("xh", "hy")]
    ensemble = {"name": "both", **tensors, "ensemble": {"steps": steps}}
    with OperatedServer(written(folder, entry(folder), ensemble)).until_ended() as server:
        yield Served(server, folder)


def test_every_rank_computes_each_batch(served: Served) -> None:
    server, folder = served
    assert infer(server, [1, 2, 3]).output("y") == [SUM, 2 * SUM, 3 * SUM]
    large = np.arange(1 << 18, dtype=np.float32)
    assert infer(server, large).output("y")[-1] == SUM * ((1 << 18) - 1)
    wait_until(
        lambda: server.metric("gpuserve_arena_blocks", model="m") == 0, "the inputs of all ranks are free"
    )
    assert sorted(server.workers) == sorted(pids(folder))
    row = instance(server)
    assert (row["ranks"], row["pids"]) == (RANKS, tuple(pids(folder)))
    places = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(RANKS)]
    assert [one["LOCAL_RANK"] for one in places] == ["0", "1", "2"]
    assert {one["LOCAL_WORLD_SIZE"] for one in places} == {"3"}


def test_a_call_that_raises_in_every_rank_fails_its_requests_only(served: Served) -> None:
    server, folder = served
    before = pids(folder)
    for _ in range(2):
        refused = infer(server, [FAULT, ALL, REFUSED])
        assert (refused.status, refused.error) == (500, "this rank does not like it")
    assert infer(server, [1]).output("y") == [SUM]
    assert pids(folder) == before


def test_an_ensemble_gives_all_ranks_what_another_model_computed(served: Served) -> None:
    for _ in range(3):
        answer = infer(served.server, np.full(1 << 18, 2, np.float32), model="both")
        assert answer.output("y")[-1] == 2 * SUM * SUM


def test_all_ranks_get_the_same_copy_of_a_clients_region(served: Served) -> None:
    region, nbytes = Path(f"/dev/shm/ranks-{os.getpid()}"), 4 << 18
    region.write_bytes(np.full(1 << 18, 2, np.float32).tobytes())
    try:
        with served.server.client() as client:
            place = {"key": f"/{region.name}", "offset": 0, "byte_size": nbytes}
            client.post("/v2/systemsharedmemory/region/r/register", place)
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1 << 18]}
            tensor["parameters"] = {"shared_memory_region": "r", "shared_memory_byte_size": nbytes}
            for _ in range(3):
                answer = client.post("/v2/models/m/infer", {"inputs": [tensor]})
                assert answer.output("y")[-1] == 2 * SUM
            client.post("/v2/systemsharedmemory/region/r/unregister", {})
    finally:
        region.unlink()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(KILLED, "signal SIGKILL"), (REFUSED, "raised an exception"), (LEFT, "exit status 0")],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_or_raises_alone_ends_all_and_the_batch_runs_again(
    tmp_path: Path, rank: int, fault: float, reason: str
) -> None:
    (tmp_path / "once").touch()
    with OperatedServer(written(tmp_path, entry(tmp_path))).until_ended() as server:
        before = pids(tmp_path)
        large = np.resize(np.array([FAULT, rank, fault], np.float32), 1 << 16)
        assert infer(server, large).output("y")[:1] == [FAULT * SUM]
        assert not wait_ended(before, 5.0)
        assert not set(before) & set(pids(tmp_path))
        (died,) = [one["msg"] for one in server.messages() if one["msg"].startswith("died (")]
        assert f"rank {rank}" in died
        assert reason in died
        assert instance(server)["restarts"] == 1


def test_a_rank_that_hangs_is_found_with_the_stacks_of_all(tmp_path: Path) -> None:
    (tmp_path / "once").touch()
    with OperatedServer(written(tmp_path, entry(tmp_path, execution_timeout_s=1.0))).until_ended() as server:
        before = pids(tmp_path)
        hung = infer(server, [FAULT, 1, HUNG])
        assert (hung.status, "execution_timeout_s" in hung.error) == (504, True), hung
        assert not wait_ended(before, 5.0)
        assert infer(server, [1]).output("y") == [SUM]
        (overdue,) = [json.dumps(one) for one in server.messages() if "is not back" in one["msg"]]
        assert "rank 1:" in overdue
        assert "in hang" in overdue.partition("rank 1:")[2].partition("rank 2:")[0]


def test_ranks_outlive_their_front(tmp_path: Path) -> None:
    with OperatedServer(written(tmp_path, entry(tmp_path))).until_ended() as server:
        before = pids(tmp_path)
        large = np.full(1 << 18, 2, np.float32)
        for _ in range(2):
            assert infer(server, large).output("y")[0] == 2 * SUM
            front, slow = server.front, np.resize(np.array([FAULT, ALL, SLOW], np.float32), 1 << 18)
            running = InBackground(infer, server, slow)
            wait_until(lambda: server.metric("gpuserve_running_requests", model="m") == 1, "a batch runs")
            os.kill(front, signal.SIGKILL)
            wait_until(lambda front=front: server.front not in (0, front), "the next front")
            server.wait_model_ready("m")
            with pytest.raises((OSError, http.client.HTTPException)):
                running.result()
        assert infer(server, large).output("y")[0] == 2 * SUM
        assert pids(tmp_path) == before


def test_a_reload_replaces_all_ranks(tmp_path: Path) -> None:
    file = written(tmp_path, entry(tmp_path))
    with OperatedServer(file).until_killed() as server:
        before = pids(tmp_path)
        written(tmp_path, entry(tmp_path, kwargs={"tag": 2.0}))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: infer(server, [1]).output("y") == [2 * SUM], "the new model")
        assert not wait_ended(before, 10.0)
        assert len(server.workers) == RANKS
        closed = [tmp_path / f"closed-{rank}" for rank in range(RANKS)]
        for one in closed:
            one.unlink()  # by the ranks that were replaced
        assert server.end() == 0
        assert all(one.exists() for one in closed)


def dozing(directory: Path) -> dict[str, Any]:
    idle = {"on_demand": True, "idle_timeout_s": 0.1}
    return entry(directory, callable=f"{MODEL}:Dozing", **idle)


def wait_residence(server: OperatedServer, state: str) -> None:
    def residence() -> Any:
        return status(server.addresses["HTTP"])["models"][0]["residence"]

    wait_until(lambda: residence() == state, f"the model is {state}")


def test_all_ranks_sleep_after_their_last_batch_and_wake_together(tmp_path: Path) -> None:
    with OperatedServer(written(tmp_path, dozing(tmp_path))).until_ended() as server:
        assert infer(server, [1]).output("y") == [SUM]
        before = pids(tmp_path)
        for naps in (1, 2):
            wait_residence(server, "ASLEEP")
            assert instance(server)["pids"] == tuple(before)
            assert infer(server, [2]).output("y") == [2 * SUM]
            for rank in range(RANKS):
                assert (tmp_path / f"naps-{rank}").read_text() == "sleep wake " * naps
        assert pids(tmp_path) == before
        wait_residence(server, "ASLEEP")
        os.kill(before[2], signal.SIGKILL)
        wait_residence(server, "COLD")
        assert not wait_ended(before, 5.0)
        assert infer(server, [1]).output("y") == [SUM]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_sleep_ends_all(tmp_path: Path, rank: int) -> None:
    (tmp_path / "refuses").write_text(f"{rank}")
    with OperatedServer(written(tmp_path, dozing(tmp_path))).until_ended() as server:
        assert infer(server, [1]).output("y") == [SUM]
        before = pids(tmp_path)
        server.wait_log("sleep of the inference callable of model 'm' raised OSError: no sleep")
        wait_residence(server, "COLD")
        assert not wait_ended(before, 5.0)
        (tmp_path / "refuses").unlink()
        assert infer(server, [1]).output("y") == [SUM]


def test_ranks_that_still_load_end_at_once(tmp_path: Path) -> None:
    with OperatedServer(written(tmp_path, entry(tmp_path, kwargs={"load_s": 60.0}))) as server:
        server.wait_log("loading")
        wait_until(lambda: len(server.workers) == RANKS, "all ranks have started")
        started = time.monotonic()
        server.end()
        assert time.monotonic() - started < 5


def test_no_rank_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with OperatedServer(written(tmp_path, entry(tmp_path))).until_killed() as server:
        before = pids(tmp_path)
        server.process.kill()
        assert not wait_ended(before, 5.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("models", "rounds"), [(3, 1), pytest.param(10, 10, marks=pytest.mark.thorough)], ids=["3", "100"]
)
def test_kills_of_any_rank_under_load_lose_no_request(tmp_path: Path, models: int, rounds: int) -> None:
    """One model after the other, so that each has run for long enough to be started again at once."""
    chosen, width = random.Random(32), 1 << 16
    entries = []
    for number in range(models):
        (tmp_path / str(number)).mkdir()
        entries.append({**entry(tmp_path / str(number)), "name": f"m{number}"})
    with OperatedServer(written(tmp_path, *entries, host="127.0.0.1")).until_ended() as server:
        answered, target, stopped = [0], ["m0"], threading.Event()

        def ask() -> None:
            while not stopped.is_set():
                value = chosen.randrange(1, 100)
                # Each from an address of its own: else the kills would make their client a suspect.
                source = f"127.{chosen.randrange(1, 200)}.{chosen.randrange(200)}.{value}"
                answer = infer(server, np.full(width, value, np.float32), source, target[0])
                assert answer.output("y")[0] == value * SUM
                answered[0] += 1

        def instances() -> list[dict[str, Any]]:
            document = status(server.addresses["HTTP"])
            return [dict(row) for model in document["models"] for row in model["instances"]]

        clients = [InBackground(ask) for _ in range(3)]
        every: set[int] = set()
        pauses: list[float] = []
        killed_at = [0.0] * models
        for number in list(range(models)) * rounds:
            target[0] = f"m{number}"
            wait_until(lambda n=number: time.monotonic() - killed_at[n] > 2 * STEADY_S, "it is steady", 60.0)
            row, before = instances()[number], answered[0]
            every.update(row["pids"])
            wait_until(lambda before=before: answered[0] > before + 3, "the load runs")
            os.kill(row["pids"][chosen.randrange(RANKS)], signal.SIGKILL)
            killed_at[number], before = time.monotonic(), answered[0]
            wait_until(lambda before=before: answered[0] > before + len(clients), "the next batch", 60.0)
            pauses.append(time.monotonic() - killed_at[number])
            wait_until(
                lambda n=number, row=row: instances()[n]["restarts"] > row["restarts"], "it is counted"
            )
        stopped.set()
        for one in clients:
            one.result()
        alive = {pid for row in instances() for pid in row["pids"]}
        assert not wait_ended(every - alive, 5.0)
        assert set(server.workers) == alive
        first_s = next(one["msg"] for one in server.messages() if one["msg"].startswith("ready after"))
        measured(
            f"{models * rounds} kills: {answered[0]} requests, none lost; next batch after "
            f"{np.median(pauses):.2f} s (median), {max(pauses):.2f} s at most; a first start was {first_s}"
        )


class Bare:
    """The ranks of an instance without a server: this process is their supervisor and their front."""

    def __init__(self, ranks: int) -> None:
        links: list[socket.socket] = []
        self.processes = []
        boots = []
        for rank in reversed(range(ranks)):
            fds = [one.fileno() for one in links]
            process, (boot, link) = spawn("gpuserve_worker", 2, more_fds=fds, relay_output=False)
            # The followers share the other core, so that none takes the time of rank 0.
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0)) if rank else 0})
            boot.setblocking(True)
            boots.append(Link(boot))
            boots[-1].send(model("ranked.py:first_value", read_only_inputs=True, rank=rank, ranks=ranks))
            self.processes.append(process)
            links.insert(0, link)
        for boot in boots:
            while not isinstance(self.receive(boot), wire.Ready):
                pass
        for link in links[1:]:
            link.close()
        links[0].setblocking(True)
        self.link = Link(links[0])
        self.link.send(wire.Attach(1))
        self.arena = Arena(
            1 << 30, lambda *of: self.link.send(wire.Segment(of[0], of[2]), of[1:2]), lambda _: None
        )
        block = self.block = self.arena.allocate(1 << 20)
        self.tensor = wire.WireTensor(
            "x", "FP32", (1, 1 << 18), wire.Ref(block.segment, block.offset, 1 << 20)
        )
        self.boots = boots

    def receive(self, link: Link) -> wire.Message:
        received = link.receive()
        assert received is not None
        close_all(received[1])
        return received[0]

    def batch(self, number: int) -> float:
        """Run a batch; the seconds until its answer. Returns when all ranks have ended it."""
        started = time.perf_counter()
        self.link.send(wire.Run(number, (1,), (self.tensor,)))
        while not isinstance(message := self.receive(self.link), wire.Done):
            pass
        took_s = time.perf_counter() - started
        while not message.inputs_free and not isinstance(self.receive(self.link), wire.Released):
            pass
        return took_s

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.exit_reason()
            process.close()
        for link in (self.link, *self.boots):
            link.close()
        self.arena.free(self.block)
        self.arena.close()


@pytest.mark.thorough
def test_what_seven_more_ranks_cost_a_batch_of_1_mib() -> None:
    """From the batch to the answer, without a collective, where rank 0 has a core of its own."""
    own_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    groups = {ranks: Bare(ranks) for ranks in (1, 2, 8)}
    try:
        times: dict[int, list[float]] = {ranks: [] for ranks in groups}
        for number in range(1, 1_001):
            for ranks, group in groups.items():
                times[ranks].append(group.batch(number) * 1e6)
        medians = {ranks: float(np.median(found[100:])) for ranks, found in times.items()}
        measured(", ".join(f"{ranks} ranks: {median:.0f} µs" for ranks, median in medians.items()))
    finally:
        os.sched_setaffinity(0, own_cores)
        for group in groups.values():
            group.end()


class Weighted:
    """Answers x times the number of ranks, with weights that are pickled out of band."""

    def __init__(self) -> None:
        self.weights = np.ones(1 << 20, np.float32)

    def __call__(self, requests: Any) -> Any:
        factor = np.float32(os.environ["WORLD_SIZE"]) * self.weights[-1]
        return [{"OUTPUT_1": request["INPUT_1"] * factor} for request in requests]


def test_a_bound_callable_has_ranks_that_share_its_arrays() -> None:
    with bound.free_server() as server:
        with pytest.raises(BadModelConfig, match="each rank is a process"):
            server.bind("m", Weighted(), **bound.FLOATS_IN_AND_OUT, ranks=2, isolation="thread")
        server.bind("m", Weighted(), **bound.FLOATS_IN_AND_OUT, ranks=2)
        server.run()
        assert bound.ask(server, "m", 1.0, 2.0) == [2.0, 4.0]
        (weights,) = status(server.addresses["http"].removeprefix("http://"))["weights"]
        assert weights["instances"] == ("m/0", "m/0 rank 1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"instances": [{"ranks": 2, "device": "cuda:0"}]}, "a list of 2 GPUs as device, one for each rank"),
        pytest.param(
            {"instances": [{"ranks": 2, "device": ["cuda:0", "cuda:1", "cuda:2"]}]},
            "given 'cuda:0+cuda:1+cuda:2'",
            marks=pytest.mark.thorough,
        ),
        pytest.param({"instances": [{"ranks": 0}]}, "ranks", marks=pytest.mark.thorough),
        pytest.param(
            {"instances": [{"ranks": 2}], "decoupled": True},
            "ranks does not go with decoupled",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"instances": [{"ranks": 2}], "max_active": 4},
            "ranks does not go with max_active",
            marks=pytest.mark.thorough,
        ),
        ({"callable": f"{MODEL}:awaits"}, "is an async function, and ranks needs a plain callable"),
        ({"callable": f"{MODEL}:Steps"}, "is a stepped callable, and ranks needs a plain callable"),
    ],
)
def test_wrong_ranks_are_refused_with_a_sentence(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    given = entry(tmp_path, **changes)
    if "callable" in changes:
        del given["kwargs"]
    file = written(tmp_path, given)
    done = finished([GPUSERVE, "check", str(file)])
    assert done.returncode != 0
    assert told in done.stdout + done.stderr
