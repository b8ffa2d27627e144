"""Models of a running server at an operator's word: loaded, unloaded, loaded anew, scaled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bound import FLOATS_IN_AND_OUT, free_server
from bound import ask as infer
from commands import ask, ask_and_hear, gpuserve, row
from exploring import variants
from operated import InBackground, OperatedServer, Orders, config, model
from processes import wait_until

from gpuserve.supervisor.control.operator_protocol import VERBS

ENSEMBLE = {
    "name": "both",
    "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
    "outputs": [{"name": "z", "dtype": "float32", "shape": [-1]}],
    "max_batch_size": 64,
    "ensemble": {"steps": [{"model": "m", "inputs": {"x": "x"}, "outputs": {"y": "z"}}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operated")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[OperatedServer]:
    """A server that clients may not load models of, with "m", and "n"."""
    orders = Orders(folder / "orders")
    with OperatedServer(config(folder, model("m", orders), model("n", orders), host="127.0.0.1")) as server:
        yield server.wait_ready()


@pytest.fixture
def at(shared: OperatedServer) -> str:
    return shared.addresses["HTTP"]


def test_a_model_goes_and_comes_back(shared: OperatedServer, at: str) -> None:
    gone = gpuserve("unload", "n", server=shared)
    assert (gone.status, gone.stdout, gone.stderr) == (0, "model 'n' is unloaded\n", "unloading model n\n")
    assert (row(at, "n")["state"], row(at, "n")["reason"]) == ("UNAVAILABLE", "unloaded")
    assert shared.infer("n", 1.0).status == 404
    again = ask(at, "unload", model="n")
    assert (again.code, again.text) == ("INVALID_ARGUMENT", "model 'n' is not loaded")
    assert ask(at, "reload", model="n").text == "model 'n' is not loaded"
    assert ask(at, "scale", counts={"n": 2}).text == "model 'n' is not loaded"
    back = gpuserve("load", "n", "--json", server=shared)
    assert (back.status, back.stderr) == (0, "loading model n\n")
    assert back.document == {"n": {"text": "model 'n' is loaded"}}
    assert shared.infer("n", 1.0).output("y") == [2.0]


def test_one_that_is_loaded_stays_as_it_is(shared: OperatedServer, at: str) -> None:
    workers = shared.workers
    outcome = ask(at, "load", model="m")
    assert (outcome.code, outcome.text) == ("", "model 'm' is loaded already")
    assert shared.workers == workers


def test_two_loads_at_once_are_one(shared: OperatedServer, at: str) -> None:
    assert ask(at, "unload", model="n").code == ""
    both = [InBackground(ask, at, "load", model="n") for _ in range(2)]
    texts = sorted(one.result().text for one in both)
    assert texts == ["model 'n' is loaded", "model 'n' is loaded already"]


@pytest.mark.parametrize("verb", ["load", "unload", "reload"])
def test_a_model_that_does_not_exist(shared: OperatedServer, at: str, verb: str) -> None:
    outcome = ask(at, verb, model="mm")
    assert (outcome.code, outcome.text) == ("NOT_FOUND", "there is no model 'mm'; did you mean 'm'?")


def test_what_can_be_done_is_done(shared: OperatedServer) -> None:
    found = gpuserve("reload", "m", "nothing", "n", server=shared)
    assert found.status == 1
    assert found.stdout == "model 'm' is reloaded\nmodel 'n' is reloaded\n"
    assert "there is no model 'nothing'" in found.stderr
    found = gpuserve("unload", "nothing", "--json", server=shared)
    assert found.status == 1
    assert found.document["nothing"]["code"] == "NOT_FOUND"
    assert found.document["nothing"]["error"].startswith("there is no model 'nothing'")


def test_a_model_is_loaded_anew(shared: OperatedServer, at: str) -> None:
    (before,) = [one["pid"] for one in row(at, "m")["instances"]]
    asked = ask_and_hear(at, "reload", model="m")
    assert asked.outcome.code == ""
    assert asked.told == ["reloading model m, beside the one that serves"]
    wait_until(lambda: len(row(at, "m")["instances"]) == 1, "the old one has ended")
    assert row(at, "m")["instances"][0]["pid"] != before


def test_more_instances_and_fewer(shared: OperatedServer, at: str) -> None:
    found = gpuserve("scale", "m=3", "n=2", server=shared)
    assert (found.status, found.stdout) == (0, "m: 1 -> 3\nn: 1 -> 2\n")
    assert len(row(at, "m")["instances"]) == row(at, "m")["slots"] == 3
    found = gpuserve("scale", "m=3", "--json", server=shared)
    assert found.document == {"models": {"m": {"before": 3, "after": 3}}}
    outcome = ask(at, "scale", counts={"m": 1, "n": 1})
    assert outcome.result == {"models": {"m": {"before": 3, "after": 1}, "n": {"before": 2, "after": 1}}}
    wait_until(lambda: len(shared.workers) == 2, "the others have ended")
    assert shared.infer("m", 4.0).output("y") == [8.0]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"m": 2, "q": 2}, "there is no model 'q'"),
        ({"m": 0}, "model 'm': expected 1 instance or more on each device, got 0"),
        ({"m": True}, "got True"),
        ({"m": "3"}, "got '3'"),
        ({}, "expected the number of instances by model"),
        ({"m": 2, "n": 257}, "a model may have 256 instances at most, given 257"),
        ({"m": 10**9}, "at most"),
    ],
)
def test_nothing_is_scaled_where_one_cannot_be(
    shared: OperatedServer, at: str, counts: dict[str, Any], text: str
) -> None:
    workers = shared.workers
    outcome = ask(at, "scale", counts=counts)
    assert outcome.code in {"INVALID_ARGUMENT", "NOT_FOUND"}
    assert text in outcome.text
    assert shared.workers == workers


@pytest.mark.parametrize(
    "line",
    variants(
        "scale m", "scale m=0", f"scale m={10**30}", "scale m=1 m=2", "load", "drain --undo --timeout 1"
    ),
)
def test_a_wrong_command_line(shared: OperatedServer, line: str) -> None:
    found = gpuserve(*line.split(), server=shared)
    assert (found.status, found.stdout) == (2, "")
    assert found.stderr


@pytest.mark.parametrize(
    ("verb", "arguments", "text"),
    [
        ("explode", {}, f"expected one of {', '.join(VERBS)}, got 'explode'"),
        ("status", {"model": "m"}, "status has no argument 'model'"),
        ("load", {}, "load: expected the name of a model, got None"),
        ("load", {"model": 3}, "load: expected the name of a model, got 3"),
        ("drain", {"timeout": 3}, "drain has no argument 'timeout'; did you mean 'timeout_s'?"),
        ("drain", {"timeout_s": -1}, "timeout_s: expected 0 to 86400 seconds, got -1"),
        ("drain", {"undo": "yes"}, "undo: expected true or false, got 'yes'"),
    ],
)
def test_wrong_arguments(at: str, verb: str, arguments: dict[str, Any], text: str) -> None:
    outcome = ask(at, verb, **arguments)
    assert (outcome.code, outcome.text) == ("INVALID_ARGUMENT", text)


def test_a_file_that_is_wrong_by_now_is_told_and_nothing_changes(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    path = config(tmp_path, model("m", orders), host="127.0.0.1")
    good = path.read_text()
    with OperatedServer(path) as server:
        at = server.wait_ready().addresses["HTTP"]
        path.write_text(good.replace('"max_batch_size": 64', '"max_batch_size": "many"'))
        outcome = ask(at, "reload", model="m")
        assert outcome.code == "INVALID_ARGUMENT"
        assert "models[0].max_batch_size" in outcome.text
        path.write_text(good.replace(":Mortal", ":NoSuchName"))
        outcome = ask(at, "reload", model="m")
        assert outcome.code == "INVALID_ARGUMENT"
        start = "model 'm' stays as it was: version 1: instance cpu#0 could not be started: "
        assert outcome.text.startswith(start)
        assert "NoSuchName" in outcome.text
        assert server.infer("m", 1.0).output("y") == [2.0]


def test_a_model_that_the_file_has_got_meanwhile(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    with OperatedServer(config(tmp_path, model("m", orders), host="127.0.0.1")) as server:
        at = server.wait_ready().addresses["HTTP"]
        config(tmp_path, model("m", orders), model("new", orders), host="127.0.0.1")
        assert ask(at, "load", model="new").text == "model 'new' is loaded"
        assert server.infer("new", 1.0).output("y") == [2.0]


@pytest.mark.thorough
def test_an_ensemble_brings_its_models_and_has_no_instances(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    with OperatedServer(config(tmp_path, model("m", orders), ENSEMBLE, host="127.0.0.1")) as server:
        at = server.wait_ready().addresses["HTTP"]
        assert (row(at, "both")["instances"], row(at, "both")["state"]) == ((), "READY")
        assert "scale the models of its steps" in ask(at, "scale", counts={"both": 2}).text
        assert ask(at, "unload", model="both").code == ""
        assert ask(at, "unload", model="m").text == "model 'm' is unloaded"
        assert ask(at, "load", model="both").code == ""
        assert row(at, "m")["state"] == "READY"
        gone = ask(at, "unload", model="m")
        assert gone.text == "model 'm' is unloaded; without it these cannot run: both"


@pytest.mark.thorough
def test_models_that_a_program_has_bound() -> None:
    with free_server() as server:
        server.bind("m", lambda requests: [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests],
                    **FLOATS_IN_AND_OUT)  # fmt: skip
        server.run()
        at = server.addresses["grpc"]
        assert ask(at, "scale", counts={"m": 2}).result == {"models": {"m": {"before": 1, "after": 2}}}
        assert ask(at, "unload", model="m").code == ""
        assert ask(at, "load", model="m").code == ""
        assert infer(server, "m", 1.0) == [2.0]
        assert ask(at, "reload", model="m").code == ""
        assert "no config file" in ask(at, "reload").text
