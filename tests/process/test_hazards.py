"""User code that keeps, writes, prints, forks and breaks what it can reach, in a whole server."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exploring import variants
from operated import LARGE, OperatedServer, Orders, config, model
from processes import command_line, finished, measured, wait_ended, wait_until
from serving import FREE_PORTS, GPUSERVE

#: Becomes the command in its arguments, with SIGCHLD ignored.
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Orders]:
    orders = Orders(tmp_path / "orders")
    yield orders
    if (orders.directory / "child").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(orders.child(), signal.SIGKILL)
        assert not wait_ended([orders.child()], 5.0)


def blocks(server: OperatedServer) -> float:
    return server.metric("gpuserve_arena_blocks", model="m")


@pytest.mark.thorough
def test_a_block_is_free_again_when_the_callable_lets_go_of_it(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Keeper"))).until_ended() as server:
        for kept in (1, 2, 3):
            assert server.infer("m", float(kept), width=LARGE).status == 200
            assert blocks(server) == kept
        assert server.infer("m", -1.0).status == 200
        wait_until(lambda: blocks(server) == 0, "every block is free")


@pytest.mark.thorough
def test_blocks_that_a_dead_worker_kept_are_free_again(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Keeper"))).until_ended() as server:
        assert server.infer("m", 1.0, width=LARGE).status == 200
        assert blocks(server) == 1
        os.kill(server.workers[0], signal.SIGKILL)
        wait_until(lambda: blocks(server) == 0, "its block is free")
        server.wait_model_ready("m")
        assert server.infer("m", 1.0, width=LARGE).status == 200


@pytest.mark.thorough
def test_a_new_front_has_no_part_in_what_was_kept_from_the_old_one(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Keeper"))).until_ended() as server:
        assert server.infer("m", 1.0, width=LARGE).status == 200
        first = server.front
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.status("/v2/health/ready") == 200 and server.front != first, "a new front")
        assert blocks(server) == 0
        assert server.infer("m", 2.0, width=LARGE).status == 200
        assert server.infer("m", -1.0).status == 200  # lets go of both
        wait_until(lambda: blocks(server) == 0, "every block is free")


@pytest.mark.thorough
@pytest.mark.parametrize("rows", variants(1, 3))
def test_the_retry_of_a_callable_that_writes_to_its_input_sees_the_original(
    tmp_path: Path, orders: Orders, rows: int
) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Writer"))).until_ended() as server:
        orders.die("SIGKILL")
        answer = server.infer("m", *[1.0] * rows)
        assert answer.output("y") == [2002.0] * rows  # once 1000 more, not twice
        assert [call["first"] for call in orders.calls()] == [1.0, 1.0]


@pytest.mark.thorough
def test_a_large_body_that_was_written_to_is_not_run_again(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Writer"))).until_ended() as server:
        orders.die("segfault")
        assert server.infer("m", 1.0, width=LARGE).status == 503
        assert len(orders.calls()) == 1
        assert blocks(server) == 0


def test_user_code_that_does_what_it_likes_with_its_process(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Rude"))).until_killed() as server:
        (worker,) = server.workers
        assert server.infer("m", 1.0).output("y") == [2.0]
        server.wait_log("a line of the user's")
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
        assert server.infer("m", 3.0).output("pid") == [worker]
        family = server.family()
        assert server.end() == 0
        assert not wait_ended(family, 2.0)
    line = next(one for one in server.messages() if one["msg"] == "a line of the user's")
    assert (line["model"], line["instance"], line["logger"]) == ("m", "cpu#0", "gpuserve.output")
    assert any(one["msg"] == '{"ts": "not a log line"' for one in server.messages())
    assert any("a warning of the user's" in one["msg"] for one in server.messages())


@pytest.mark.parametrize("target", variants("Parent", "Forker"))
def test_a_child_hides_no_death_and_ends_with_its_worker(tmp_path: Path, orders: Orders, target: str) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, target))).until_killed() as server:
        (worker,) = server.workers
        assert server.infer("m", 1.0).output("y") == [2.0]
        child = orders.child()
        os.kill(worker, signal.SIGKILL)
        took_s = wait_until(lambda: worker not in server.workers and server.workers, "a successor")
        measured(f"worker with a living child killed: successor started after {took_s:.3f} s")
        assert not wait_ended([child], 2.0)
        server.wait_model_ready("m")
        (orders.directory / "child").unlink()
        assert server.infer("m", 2.0).output("y") == [4.0]  # the successor has a child of its own
        family = [*server.family(), orders.child()]
        assert server.end() == 0
        assert not wait_ended(family, 2.0)


def test_deaths_are_seen_by_a_server_whose_parent_ignores_those_of_its_children(
    tmp_path: Path, orders: Orders
) -> None:
    path = config(tmp_path, model("m", orders, "Parent"))
    command = (sys.executable, "-c", IGNORING, GPUSERVE, "serve", str(path), *FREE_PORTS, "--log-format=json")
    with OperatedServer(path, command=command).until_ended() as server:
        assert server.infer("m", 1.0).output("y") == [2.0]
        os.kill(server.workers[0], signal.SIGKILL)
        server.wait_log("died (signal SIGKILL)")
        assert not wait_ended([orders.child()], 2.0)
        server.wait_model_ready("m")


@pytest.mark.thorough
def test_a_child_in_a_session_of_its_own_is_the_users(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Releaser"))).until_killed() as server:
        assert server.infer("m", 1.0).output("y") == [2.0]
        family = server.family()
        assert server.end() == 0
        assert not wait_ended(family, 2.0)
        assert command_line(orders.child())


@pytest.mark.thorough
def test_a_child_inherits_nothing_of_ours(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders, "Parent"))).until_ended() as server:
        assert server.infer("m", 1.0, width=LARGE).status == 200
        _, *targets = (orders.directory / "child").read_text().split("\n")
        assert not [one for one in targets if one.startswith("socket:") or "memfd" in one]
        # /dev/null, and the one pipe that stdout and stderr are.
        assert len({one for one in targets if not one.startswith("/proc/")}) <= 2


def test_a_worker_that_breaks_the_protocol_takes_nothing_with_it(tmp_path: Path, orders: Orders) -> None:
    """What one writes to the descriptors of a worker, from inside it, is user code as well."""
    (tmp_path / "vandal.py").write_text(VANDAL)
    entries = [
        {**model(name, orders), "callable": str(tmp_path / f"vandal.py:{target}")}
        for name, target in (("boot", "Boot"), ("link", "Link"), ("closes", "Closes"))
    ]
    with OperatedServer(config(tmp_path, model("well", orders), *entries)).until_ended() as server:
        supervisor, front = server.pid, server.front
        for name in ("boot", "link", "closes"):
            first = server.infer(name, 1.0)  # it vandalises, and is ended; its successor answers
            assert first.status in {200, 503}, first
            server.wait_log(f'"model": "{name}"')
            wait_until(
                lambda name=name: server.metric("gpuserve_worker_restarts_total", model=name) >= 1, name
            )
            server.wait_model_ready(name)
            assert server.infer("well", 1.0).output("y") == [2.0]
        assert (server.pid, server.front) == (supervisor, front)


@pytest.mark.thorough
def test_a_program_with_more_descriptors_than_select_can_take(tmp_path: Path) -> None:
    run = finished([sys.executable, "-c", MANY_DESCRIPTORS])
    assert (run.returncode, run.stdout) == (0, "OSError: no\n"), run.stderr


VANDAL = """
import os
from pathlib import Path
import numpy as np
from gpuserve.decorators import batch

class Vandal:
    def __init__(self, directory):
        self.token = Path(directory, type(self).__name__)
    @batch
    def __call__(self, x):
        if not self.token.exists():
            self.token.touch()
            arguments = Path("/proc/self/cmdline").read_bytes().split(b"\\0")
            self.vandalise(*[int(one) for one in arguments if one.isdigit()][:2])
        return {"y": x, "calls": np.ones((len(x), 1), int), "pid": np.ones((len(x), 1), int)}

class Boot(Vandal):
    def vandalise(self, boot, link):
        os.write(boot, b"garbage")

class Link(Vandal):
    def vandalise(self, boot, link):
        os.write(link, b"\\x93\\x29\\x01\\x02")

class Closes(Vandal):
    def vandalise(self, boot, link):
        os.close(link)
"""

MANY_DESCRIPTORS = """
import os, resource
import numpy as np
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
from gpuserve import ModelConfig, Server, Tensor
from gpuserve.core.errors import StartupError

class Bad:
    def __reduce__(self):
        return exec, ("raise OSError('no')",)
    def __call__(self, requests):
        return requests

x, y = ([Tensor(name=name, dtype=np.float32, shape=(-1,))] for name in "xy")
with Server(http_port=0, grpc_port=0, metrics_port=0) as server:
    server.bind("bad", Bad(), x, y, config=ModelConfig(max_batch_size=4))
    try:
        server.run()
    except StartupError as error:
        print(str(error).rsplit("raised ", 1)[-1])
"""


WRONG = """
import sys
from gpuserve.decorators import batch

@batch
def m(x):
    if x[0, 0] == 1.0:
        sys.exit(3)
    return [][0] if x[0, 0] == 2.0 else None
"""


def test_the_log_shows_frames_of_user_code_only(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    tensor = {"dtype": "float32", "shape": [-1]}
    entry: dict[str, Any] = {"name": "m", "callable": "wrong.py:m", "max_batch_size": 8}
    entry |= {"inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]}
    with OperatedServer(config(tmp_path, entry)).until_ended() as server:
        assert server.infer("m", 0.0).error.startswith("Unsupported output type NoneType: expected")
        assert server.infer("m", 2.0).error == "list index out of range"
        assert server.infer("m", 1.0).error == (
            "model 'm': the worker process died twice while it ran this request"
        )
        server.wait_log("died (its callable raised SystemExit: 3)", 2)
    refused, failed, *exits = [one for one in server.messages() if one["level"] == "error"]
    assert "exc" not in refused
    assert [one["exc"].count("File ") for one in (failed, *exits)] == [1, 1, 1]
    assert all(str(tmp_path / "wrong.py") in one["exc"] for one in (failed, *exits))
    assert exits[0]["msg"] == "the inference callable raised SystemExit: 3"


def test_the_log_names_threads_that_keep_a_worker_from_ending(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import threading\n"
        "def wait():\n"
        "    threading.main_thread().join()\n"
        "    ENDED.wait(1.5)\n"
        "ENDED = threading.Event()\n"
        "threading.Thread(target=wait, name='uploads').start()\n"
        "def answer(requests):\n"
        "    return [{'y': one['x']} for one in requests]\n"
    )
    tensor = {"dtype": "float32", "shape": [1]}
    entry = {"name": "m", "callable": "leaves.py:answer", "inputs": [{"name": "x", **tensor}]}
    path = config(tmp_path, {**entry, "outputs": [{"name": "y", **tensor}]})
    with OperatedServer(path).until_killed() as server:
        assert server.end() == 0
        server.wait_log("the process cannot end before threads of the inference callable: uploads")
