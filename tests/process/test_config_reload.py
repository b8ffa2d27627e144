"""The config of a running server changes, and SIGHUP has it read again: under traffic, while things break."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from config_operator import Operator, fifo, operated
from exploring import variants
from operated import MODELS, TIMEOUT_S, OperatedServer
from processes import children, command_line, wait_ended, wait_until
from repositories import Traffic, clients_are_closed, entry, write
from serving import FREE_PORTS, GPUSERVE
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here


def ensemble(name: str, asked: str) -> dict[str, Any]:
    """An ensemble of one step, which answers as the model does."""
    tensors = {key: entry(asked)[key] for key in ("inputs", "outputs")}
    outputs = {one["name"]: one["name"] for one in tensors["outputs"]}
    steps = [{"model": asked, "inputs": {"x": "x"}, "outputs": outputs}]
    return {"name": name, "max_batch_size": 8, "ensemble": {"steps": steps}, **tensors}


# ---- models -------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.thorough)])
def test_no_request_is_lost_by_reloads(tmp_path: Path, times: int) -> None:
    with operated(tmp_path, entry("m", 0.0), entry("same")) as operator:
        same = operator.client().infer("same").pid
        with (
            Traffic(operator.client(), "m") as one,
            Traffic(operator.client("http"), "m") as other,
        ):
            for tag in range(1, times + 1):
                operator.reload(entry("m", float(tag)), entry("same"))
                for traffic in (one, other):
                    traffic.wait_for(tag)
        assert (one.errors, other.errors) == ([], [])
        for traffic in (one, other):
            tags = [told.tag for told in traffic.told]
            assert tags == sorted(tags)
            assert set(tags) == set(range(times + 1))
        operator.wait_said("config reload: model m is reloaded", times)
        wait_until(lambda: len(operator.server.workers) == 2, "the earlier workers are ended")
        assert operator.client().infer("same").pid == same


@pytest.mark.thorough
def test_a_version_that_fails_to_load_leaves_what_serves_and_is_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    with operated(tmp_path, entry("m", 1.0)) as operator:
        with Traffic(operator.client(), "m") as traffic:
            operator.reload(entry("m", 2.0, broken=str(broken)), entry("other"))
            operator.wait_said("config reload: model m: version 1: instance cpu#0 could not be started")
            operator.wait_said("config reload: model other is loaded")
        assert traffic.errors == []
        assert {told.tag for told in traffic.told} == {1.0}
        broken.unlink()
        operator.server.process.send_signal(signal.SIGHUP)
        operator.wait_said("config reload: model m is reloaded")
        assert operator.client().infer("m").tag == 2.0


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m", 1.0)) as operator:
        wrong = entry("m", 2.0) | {"max_batch_sise": 4}
        operator.reload(wrong, entry("other") | {"callable": "absent.py:f"}, log_level="debug")
        operator.wait_said("the config is not reloaded, and nothing has changed")
        (told,) = [one["msg"] for one in operator.server.messages() if "is not reloaded" in one["msg"]]
        assert "unknown key 'max_batch_sise' in models[0]; did you mean 'max_batch_size'?" in told
        assert "there is no file 'absent.py'" in told
        assert operator.client().infer("m").tag == 1.0
        operator.reload(entry("m", 3.0))
        operator.wait_said("model m is reloaded")
        assert operator.client().infer("m").tag == 3.0


@pytest.mark.thorough
def test_a_module_that_never_comes_back_holds_only_its_reload_up(tmp_path: Path) -> None:
    """It is asked what it is, for its entry does not say it."""
    gate = fifo(tmp_path, "gate")
    (tmp_path / "hangs.py").write_text(f"open({str(gate)!r}).read()\n\ndef hangs(x): ...\n")
    with operated(tmp_path, entry("m", 1.0)) as operator:
        server = operator.server
        operator.reload(entry("m", 2.0), {"name": "new", "callable": "hangs.py:hangs"})

        def asked() -> list[int]:
            return [
                one for one in children(server.pid) if "gpuserve.model.describe_child" in command_line(one)
            ]

        wait_until(lambda: len(asked()) == 1, "the module is asked")
        (child,), (worker,) = asked(), server.workers
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.workers not in ([], [worker]), "another worker is started")
        server.wait_model_ready("m")
        assert operator.client().infer("m").tag == 1.0
        assert server.end() == 0
        assert not wait_ended([child], TIMEOUT_S)


def test_numbers_of_instances_change_in_place(tmp_path: Path) -> None:
    def of(count: int) -> dict[str, Any]:
        return entry("m", 1.0, instances=[{"device": "cpu", "count": count}])

    with operated(tmp_path, of(1)) as operator:
        (first,) = operator.server.workers
        with Traffic(operator.client(), "m") as one, Traffic(operator.client("http"), "m") as other:
            for turn, count in enumerate((3, 2, 1), 1):
                operator.reload(of(count))
                operator.wait_said("config reload: model m is scaled", turn)
                wait_until(lambda count=count: len(operator.server.workers) == count, f"{count} workers")
        assert (one.errors, other.errors) == ([], [])
        assert operator.server.workers == [first]
        operator.reload(entry("m", 2.0, instances=[{"device": "cpu", "count": 2}]))
        operator.wait_said("config reload: model m is reloaded")
        wait_until(lambda: len(operator.server.workers) == 2, "two workers")


def test_models_come_and_go(tmp_path: Path) -> None:
    with operated(tmp_path, entry("a"), entry("b")) as operator:
        operator.reload(entry("a"), entry("c", 3.0))
        operator.wait_said("config reload: model b is unloaded")
        client = operator.client()
        assert (client.infer("c").tag, client.infer("a").tag) == (3.0, 1.0)
        assert sorted(one[:3] for one in client.index()) == [("a", "1", "READY"), ("c", "1", "READY")]
        with pytest.raises(InferenceServerException, match="'b'"):
            client.infer("b")
        assert len(operator.server.workers) == 2
        operator.server.process.send_signal(signal.SIGHUP)
        operator.wait_said("config reload: nothing has changed")


@pytest.mark.thorough
def test_an_ensemble_and_its_models_change_together(tmp_path: Path) -> None:
    with operated(tmp_path, entry("a", 1.0), ensemble("e", "a")) as operator:
        with Traffic(operator.client(), "e") as traffic:
            operator.reload(entry("b", 2.0), ensemble("e", "b"))
            operator.wait_said("config reload: model a is unloaded")
            traffic.wait_for(2.0)
        assert traffic.errors == []
        told = [one["msg"] for one in operator.server.messages() if one["msg"].startswith("config reload: ")]
        assert told == [
            f"config reload: model {text}" for text in ("b is loaded", "e is reloaded", "a is unloaded")
        ]
        operator.reload(entry("b", 2.0))
        operator.wait_said("config reload: model e is unloaded")


@pytest.mark.thorough
def test_what_clients_have_unloaded_or_loaded_is_left_to_them(tmp_path: Path) -> None:
    explicit = {"model_control": "explicit", "load_at_start": ["m", "n"]}
    with operated(tmp_path, entry("m"), entry("n"), entry("o"), **explicit) as operator:
        client = operator.client()
        client.asked.unload_model("m")
        operator.write(entry("m", 2.0), entry("n", 2.0), entry("o"), **explicit)
        client.asked.load_model("n")  # it reads the file
        loaded = client.infer("n").pid
        operator.reload(entry("m", 2.0), entry("n", 2.0), entry("o"), entry("p"), **explicit)
        operator.wait_said("config reload: nothing has changed")
        assert client.infer("n").pid == loaded
        assert client.states("m") == {"1": "UNAVAILABLE"}
        assert client.states("p") == {"": ""}  # it can be loaded
        operator.reload(
            entry("m", 2.0), entry("n", 2.0), entry("o"), **explicit | {"load_at_start": ["n", "o"]}
        )
        operator.wait_said("config reload: model o is loaded")
        assert client.infer("o").tag == 1.0


# ---- when it comes ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_signal_at_the_start_is_remembered(tmp_path: Path) -> None:
    gate = fifo(tmp_path, "gate")
    path = tmp_path / "config.yaml"
    operator = Operator(OperatedServer(path), path)
    operator.write(entry("m", 1.0, load_fifo=str(gate)))
    with operator.server as server:
        wait_until(lambda: bool(server.front), "its first child runs")
        server.process.send_signal(signal.SIGHUP)  # it reads its command line, or the config
        wait_until(lambda: bool(server.workers), "the model loads")
        operator.reload(entry("m", 2.0))
        operator.reload(entry("m", 3.0))
        gate.write_bytes(b"")
        server.wait_ready()
        operator.wait_said("config reload: model m is reloaded")
        assert operator.client().infer("m").tag == 3.0
        operator.reload(entry("m", 4.0))
        operator.wait_said("config reload: model m is reloaded", 2)
        assert operator.said("config reload: ") == 2  # those of the start were one
        assert server.end() == 0


@pytest.mark.thorough
def test_a_signal_while_it_reloads_takes_back_what_still_loads(tmp_path: Path) -> None:
    gate = fifo(tmp_path, "gate")
    with operated(tmp_path, entry("m", 1.0)) as operator:
        operator.reload(entry("m", 2.0, load_fifo=str(gate)))
        wait_until(lambda: len(operator.server.workers) == 2, "it loads")
        assert operator.client().infer("m").tag == 1.0
        operator.reload(entry("m", 4.0))
        operator.server.replace_front()
        wait_until(lambda: operator.client().infer("m").tag == 4.0, "the last one holds")


@pytest.mark.thorough
@pytest.mark.parametrize("number", variants(signal.SIGTERM, signal.SIGINT))
def test_a_server_that_is_stopped_while_it_reloads(tmp_path: Path, number: signal.Signals) -> None:
    gate = fifo(tmp_path, "gate")
    path = tmp_path / "config.yaml"
    operator = Operator(OperatedServer(path), path)
    operator.write(entry("m", 1.0))
    with operator.server as server:
        server.wait_ready()
        operator.reload(entry("a", load_fifo=str(gate)), ensemble("e", "a"))
        wait_until(lambda: len(server.workers) == 2, "it loads")
        assert server.end(number) == 0
    assert operator.said("model a: the server has been stopped") == 1


@pytest.mark.thorough
def test_a_server_of_a_callable_asks_it_again(tmp_path: Path) -> None:
    module = tmp_path / "model.py"
    module.write_text("def f(requests):\n    return [{'y': one['x']} for one in requests]\n")
    tensors = ("--input", "x:float32:-1", "--output", "y:float32:-1")
    command = (GPUSERVE, "serve", f"{module}:f", *tensors, *FREE_PORTS, "--log-format", "json")
    with OperatedServer(module, command=command).until_killed() as server:
        server.process.send_signal(signal.SIGHUP)
        server.wait_log("config reload: nothing has changed")
        assert server.status("/v2/health/ready") == 200
        assert server.end(signal.SIGINT) == 0


@pytest.mark.thorough
def test_a_terminal_that_is_closed_ends_the_server(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", entry("m"), host="127.0.0.1")
    ours, theirs = os.openpty()

    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen(
        ["setsid", "--ctty", GPUSERVE, "serve", str(path), *FREE_PORTS, "--log-format", "json"],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=log,
    )
    os.close(theirs)
    with log:
        wait_until(lambda: '"ready: ' in (tmp_path / "log").read_text(), "it is ready")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: "nothing has changed" in (tmp_path / "log").read_text(), "it is reloaded")
        os.close(ours)
        assert server.wait(TIMEOUT_S) == 0
        assert "stopping: " in (tmp_path / "log").read_text()


# ---- without a signal: the files are followed ----------------------------------------------------


POLLING = {"model_control": "poll", "repository_poll_s": 0.1}


def local(name: str, folder: Path, tag: str) -> dict[str, Any]:
    """An entry whose callable is a file in that folder, with this tag of its own."""
    put(folder, tag)
    return entry(name) | {"callable": f"{folder / 'own.py'}:Own", "kwargs": {}}


def put(folder: Path, tag: str) -> None:
    """Put the file of the callable there, in one step."""
    source = (MODELS / "generations.py").read_text()
    new = folder / "own.new"
    new.write_text(
        f"{source}\n\nclass Own(Tagged):\n    def __init__(self):\n        super().__init__({tag})\n"
    )
    new.rename(folder / "own.py")


def test_files_that_change_are_followed_under_traffic(tmp_path: Path) -> None:
    same, own = entry("same"), local("m", tmp_path, "0.0")
    with operated(tmp_path, own, same, **POLLING) as operator:
        pid = operator.client().infer("same").pid
        with Traffic(operator.client(), "m") as one, Traffic(operator.client("http"), "m") as other:
            put(tmp_path, "1.0")
            for traffic in (one, other):
                traffic.wait_for(1.0)
            put(tmp_path, "1 / 0")
            operator.wait_said("config reload: model m: version 1: instance cpu#0 could not be started")
            operator.write({**own, "max_batch_sise": 4}, same, **POLLING)
            operator.wait_said("the config is not reloaded, and nothing has changed")
            put(tmp_path, "2.0")
            operator.write(own, same, entry("new", 3.0), **POLLING)
            for traffic in (one, other):
                traffic.wait_for(2.0)
        assert (one.errors, other.errors) == ([], [])
        operator.wait_said("config reload: model new is loaded")
        client = operator.client()
        assert (client.infer("new").tag, client.infer("same").pid) == (3.0, pid)
        operator.write(own, same, **POLLING)
        operator.wait_said("config reload: model new is unloaded")
        with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
            client.asked.load_model("m")
        with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
            client.asked.unload_model("m")
        assert operator.said("could not be started") == 1
        operator.write(own, same, model_control="none")
        operator.wait_said('server.model_control is "none" now, it was "poll"')
        put(tmp_path, "4.0")
        operator.reload(own, same, entry("last"), model_control="none")
        operator.wait_said("config reload: model last is loaded")
        assert client.infer("m").tag == 2.0
