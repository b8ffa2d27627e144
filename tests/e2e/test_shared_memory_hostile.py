"""Clients that do to their own shared memory what they please, and workers that die over it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import model, models, tensor, write_config
from leaks import own_name
from operated import OperatedServer, Orders
from operated import model as mortal
from processes import wait_until
from test_v2_inference import CLIENTS, sample
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

NBYTES = 64 << 10
ROW = np.arange(NBYTES // 4, dtype=np.float32).reshape(1, -1)
SMALL = np.arange(4, dtype=np.float32).reshape(1, 4)
#: Requests of each test that are sent while somebody changes the memory.
REQUESTS = 600
ROUND = 50


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("orders") / "orders")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, orders: Orders) -> Iterator[OperatedServer]:
    x, y = [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)]
    made = [
        model("echo", "echo", x, y, 64),
        model("still", "echo", x, y, 64, read_only_inputs=True),
        model("words", "echo", [tensor("x", "BYTES", -1)], [tensor("y", "BYTES", -1)], 64),
        *models("echo_FP16", "echo_BF16"),
        mortal("mortal", orders, "Writer", max_batch_size=1),
        mortal("still_mortal", orders, max_batch_size=1, read_only_inputs=True),
    ]
    config = write_config(tmp_path_factory.mktemp("server"), made, host="127.0.0.1")
    with OperatedServer(config).until_ended() as operated:
        yield operated


@pytest.fixture
def unharmed(server: OperatedServer) -> Iterator[None]:
    """No process of the server may die of what a client does."""
    before = server.family()
    yield
    assert server.family() == before


class File:
    """A client's memory in /dev/shm."""

    def __init__(self, nbytes: int) -> None:
        self.key = f"/{own_name()}"
        self.nbytes = nbytes
        self.fd = os.open(f"/dev/shm{self.key}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.fd, nbytes)

    def close(self) -> None:
        os.close(self.fd)
        os.unlink(f"/dev/shm{self.key}")


@contextlib.contextmanager
def memory(nbytes: int = NBYTES) -> Iterator[File]:
    file = File(nbytes)
    try:
        yield file
    finally:
        file.close()


@contextlib.contextmanager
def client_of(server: OperatedServer) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(server.addresses["gRPC"]) as client:
        yield client


@contextlib.contextmanager
def again_and_again(step: Any) -> Iterator[None]:
    """Somebody does something all the time."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def placed(name: str, shape: Any, datatype: str, nbytes: int, region: str, offset: int = 0) -> Any:
    given = tritonclient.grpc.InferInput(name, list(shape), datatype)
    given.set_shared_memory(region, nbytes, offset)
    return given


def wanted(nbytes: int, region: str) -> Any:
    output = tritonclient.grpc.InferRequestedOutput("y")
    output.set_shared_memory(region, nbytes)
    return output


def plain(x: Any, datatype: str = "FP32") -> Any:
    given = tritonclient.grpc.InferInput("x", list(x.shape), datatype)
    given.set_data_from_numpy(x)
    return given


def outcomes(server: OperatedServer, ask: Any, neighbour: Any, key: str) -> dict[str, int]:
    """What becomes of many requests over a region that is registered anew now and then, beside those of a
    neighbour, which have to be right.
    """
    counted: dict[str, int] = {}
    over = threading.Event()

    def go_on() -> int:
        rounds = 0
        with client_of(server) as client:
            while not over.is_set():
                neighbour(client)
                rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool, client_of(server) as client:
        beside = pool.submit(go_on)
        try:
            for number in range(REQUESTS):
                if number % ROUND == 0:
                    client.unregister_system_shared_memory()
                    register(client, key)
                status, text = outcome(ask, client)
                assert text == "" or "shared memory" in text
                counted[status] = counted.get(status, 0) + 1
        finally:
            over.set()
        assert beside.result(20) > 0
        client.unregister_system_shared_memory()
    return counted


def outcome(ask: Any, *arguments: Any) -> tuple[str, str]:
    """The status and the text of an error, "OK" where there is none."""
    try:
        ask(*arguments)
    except InferenceServerException as error:
        return str(error.status()), str(error)
    return "OK", ""


def register(client: Any, key: str) -> None:
    """Register a region, which is refused while its file is too small."""

    def registered() -> bool:
        status, _ = outcome(client.register_system_shared_memory, "r", key, NBYTES)
        assert status in {"OK", "StatusCode.INVALID_ARGUMENT"}
        return status == "OK"

    wait_until(registered, "the region is registered")


# ---- sizes and contents that change ----------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("model", ["echo", "still"])
@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_file_that_is_shrunk_all_the_time_costs_its_own_requests_only(
    server: OperatedServer, model: str, direction: str
) -> None:
    def ask(client: Any) -> None:
        if direction == "in":
            client.infer(model, [placed("x", ROW.shape, "FP32", NBYTES, "r")])
        else:
            client.infer(model, [plain(ROW)], outputs=[wanted(NBYTES, "r")])

    def neighbour(client: Any) -> None:
        np.testing.assert_array_equal(client.infer(model, [plain(ROW)]).as_numpy("y"), ROW)

    with memory() as file:

        def flip() -> None:
            os.ftruncate(file.fd, 0)
            os.ftruncate(file.fd, NBYTES)

        with again_and_again(flip):
            counted = outcomes(server, ask, neighbour, file.key)
    assert set(counted) <= {"OK", "StatusCode.INVALID_ARGUMENT"}
    assert counted["StatusCode.INVALID_ARGUMENT"] > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("unharmed")
def test_contents_that_change_all_the_time_are_either_right_or_refused(server: OperatedServer) -> None:
    good = serialize_byte_tensor(np.array([b"a", b"bc"], object)).item()
    other = serialize_byte_tensor(np.array([b"", b"abc"], object)).item()
    bad = b"\xff" * len(good)
    seen: set[tuple[bytes, ...]] = set()

    def ask(client: Any) -> None:
        answer = client.infer("words", [placed("x", (1, 2), "BYTES", len(good), "r")])
        seen.add(tuple(answer.as_numpy("y").ravel()))

    words = np.array([[b"of", b"its own"]], object)

    def neighbour(client: Any) -> None:
        assert client.infer("words", [plain(words, "BYTES")]).as_numpy("y").tolist() == words.tolist()

    with memory() as file:
        whole = np.memmap(f"/dev/shm{file.key}", np.uint8, "r+")[: len(good)]
        texts = [np.frombuffer(one, np.uint8) for one in (good, bad, other, bad)]

        def flip() -> None:
            for one in texts:
                whole[:] = one

        with again_and_again(flip):
            counted = outcomes(server, ask, neighbour, file.key)
    assert set(counted) == {"OK", "StatusCode.INVALID_ARGUMENT"}
    # Bytes may come from more than one moment, but they are two strings of the right length in all.
    assert {sum(map(len, one)) for one in seen} == {3}


@pytest.mark.usefixtures("unharmed")
def test_another_registration_under_the_same_name_is_another_memory(server: OperatedServer) -> None:
    with client_of(server) as client, memory() as one, memory() as other:
        os.pwrite(one.fd, ROW.tobytes(), 0)
        os.pwrite(other.fd, (ROW + 1).tobytes(), 0)
        for _ in range(50):
            for file, expected in ((one, ROW), (other, ROW + 1)):
                register(client, file.key)
                for model in ("echo", "still"):
                    answer = client.infer(model, [placed("x", ROW.shape, "FP32", NBYTES, "r")])
                    np.testing.assert_array_equal(answer.as_numpy("y"), expected)
                client.unregister_system_shared_memory("r")


@pytest.mark.usefixtures("unharmed")
def test_an_answer_may_be_written_over_its_own_input(server: OperatedServer) -> None:
    with client_of(server) as client, memory() as file:
        register(client, file.key)
        for model in ("echo", "still"):
            os.pwrite(file.fd, ROW.tobytes(), 0)
            client.infer(model, [placed("x", ROW.shape, "FP32", NBYTES, "r")], outputs=[wanted(NBYTES, "r")])
            assert os.pread(file.fd, NBYTES, 0) == ROW.tobytes()
        client.unregister_system_shared_memory()


# ---- workers that die ------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "expected"), [("mortal", (SMALL + 1000) * 2), ("still_mortal", SMALL * 2)])
def test_rows_of_regions_are_intact_when_a_worker_dies_over_them(
    server: OperatedServer, orders: Orders, model: str, expected: Any
) -> None:
    count = 6
    answers: list[Any] = []
    heard = threading.Condition()

    def on_answer(result: Any, error: Any) -> None:
        with heard:
            answers.append((result, error))
            heard.notify_all()

    with client_of(server) as client, memory() as given, memory() as answered:
        os.pwrite(given.fd, np.concatenate([SMALL + 10 * n for n in range(count)]).tobytes(), 0)
        client.register_system_shared_memory("in", given.key, NBYTES)
        client.register_system_shared_memory("out", answered.key, NBYTES)
        orders.shut()
        calls = len(orders.calls())
        for number in range(count):
            output = tritonclient.grpc.InferRequestedOutput("y")
            output.set_shared_memory("out", SMALL.nbytes, number * SMALL.nbytes)
            tensor = placed("x", SMALL.shape, "FP32", SMALL.nbytes, "in", number * SMALL.nbytes)
            client.async_infer(model, [tensor], on_answer, outputs=[output])
        wait_until(lambda: len(orders.calls()) > calls, "the first one runs")
        os.kill(orders.calls()[-1]["pid"], 9)
        wait_until(lambda: len(orders.calls()) > calls + 1, "it runs again")
        orders.open()
        with heard:
            assert heard.wait_for(lambda: len(answers) == count, 20)
        assert [error for _, error in answers] == [None] * count
        rows = np.frombuffer(os.pread(answered.fd, count * SMALL.nbytes, 0), np.float32).reshape(count, 4)
        np.testing.assert_array_equal(rows, [expected[0] + 20 * n for n in range(count)])
        assert os.pread(given.fd, SMALL.nbytes, 0) == SMALL.tobytes()
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status().regions == {}


# ---- the two datatypes that JSON and contents do not have -------------------------------------


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_the_same_bytes_by_every_way(server: OperatedServer, datatype: str) -> None:
    x = sample(datatype)
    data, answers = x.tobytes(), {}
    with memory() as file:
        os.pwrite(file.fd, data, 0)
        for protocol, library in CLIENTS.items():
            address = server.addresses["gRPC" if protocol == "grpc" else "HTTP"]
            with library.InferenceServerClient(address) as client:
                given = library.InferInput("x", list(x.shape), datatype)
                given._raw_content = given._raw_data = data
                if protocol == "http":
                    given._parameters["binary_data_size"] = len(data)
                raw = client.infer(f"echo_{datatype}", [given])
                answers[f"{protocol} raw"] = bytes_of(raw, protocol)
                client.register_system_shared_memory("r", file.key, NBYTES)
                given = library.InferInput("x", list(x.shape), datatype)
                given.set_shared_memory("r", len(data))
                output = library.InferRequestedOutput("y")
                output.set_shared_memory("r", len(data), 4096)
                client.infer(f"echo_{datatype}", [given], outputs=[output])
                answers[f"{protocol} shared memory"] = os.pread(file.fd, len(data), 4096)
                client.unregister_system_shared_memory()
    assert answers == dict.fromkeys(answers, data)


def bytes_of(result: Any, protocol: str) -> bytes:
    if protocol == "grpc":
        content: bytes = result.get_response().raw_output_contents[0]
        return content
    start = result._output_name_to_buffer_map["y"]
    size = result.get_output("y")["parameters"]["binary_data_size"]
    return bytes(result._buffer[start : start + size])
