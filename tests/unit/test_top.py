"""What ``gpuserve top`` shows of samples and does at keys, without a terminal and without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from present import present

from gpuserve.cli.live import top_columns as rows
from gpuserve.cli.live.top_screen import KEYS, QUIT, Screen, View

GIGA = 1 << 30


def instance(name: str = "cpu#0", **more: Any) -> dict[str, Any]:
    found = {"name": name, "device": name.partition("#")[0], "state": "READY", "pid": 4711, "restarts": 0}
    return {**found, "memory_nbytes": 30 << 20, "batches_per_s": 12.0, "busy": 0.5, **more}


def model(name: str, **more: Any) -> dict[str, Any]:
    rates = {"requests_per_s": 0.0, "failures_per_s": 0.0, "rejections_per_s": 0.0, "batch_size": None}
    times = {"p50_s": None, "p99_s": None, "queued": 0, "in_flight": 0, "slots": 1, "saturation": 0.0}
    about = {"name": name, "version": 1, "state": "READY", "reason": "", "source": "config"}
    return {**about, "instances": [instance()], **rates, **times, **more}


def sample(*models: dict[str, Any], **more: Any) -> dict[str, Any]:
    server = {"name": "gpuserve", "version": "0.1.0", "state": "SERVING", "ready": True}
    server |= {"uptime_s": 90.0, "requests_per_s": 1234.0, "connections": 3}
    return {"kind": "sample", "server": server, "models": list(models), "gpus": [], "doors": [], **more}


def screen_of(*models: dict[str, Any], **more: Any) -> Screen:
    made = Screen()
    made.add_event(sample(*models, **more))
    return made


def shown(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    lines = [one.plain for one in screen.lines(width, height)]
    assert len(lines) <= height
    assert all(len(one) <= width for one in lines)
    return lines


def names(screen: Screen) -> list[str]:
    lines = shown(screen)
    head = next(place for place, one in enumerate(lines) if one.startswith("MODEL"))
    return [one.split()[0] for one in lines[head + 1 :] if one.strip()][:-1]


NUMBERS = {0: "0", 0.25: "0.2", 12.5: "12.5", 99.96: "100", 340: "340", 999.6: "1k", 12_340.0: "12.3k"}
NUMBERS |= {None: "-", 999_900: "1M", 4_100_000: "4.1M"}
TIMES = {8.5e-5: "85us", 0.0012: "1.2ms", 0.00996: "10ms", 0.34: "340ms", 2.5: "2.5s", 90: "90s", None: "-"}


def test_numbers_and_times_are_short() -> None:
    assert {value: rows.count_text(value) for value in NUMBERS} == NUMBERS
    assert {value: rows.duration_text(value) for value in TIMES} == TIMES


@given(st.floats(0, 1e8), st.floats(0, 900) | st.floats(0, 0.02))
def test_no_rate_and_no_time_is_wider_than_its_column(rate: float, time_s: float) -> None:
    assert len(rows.count_text(rate)) <= 5
    assert len(rows.duration_text(time_s)) <= 5


def test_80_columns_have_all_that_matters() -> None:
    busy = model("resnet", requests_per_s=2700.0, p50_s=0.0043, p99_s=0.02, queued=7, batch_size=15.6)
    lines = shown(screen_of(busy | {"saturation": 0.95, "failures_per_s": 2.0}))
    assert lines[0] == "gpuserve 0.1.0  SERVING  up 1.5 min  1.2k req/s  3 connections"
    assert " ".join(lines[2].split()) == "MODEL STATE INST REQ/S P50 P99 QUEUE BATCH SATUR ERR/S RESTARTS"
    assert " ".join(lines[3].split()) == "resnet READY 1/1 2.7k 4.3ms 20ms 7 15.6 95% 2 0"


@given(st.integers(20, 200), st.integers(3, 60), st.integers(0, 70))
def test_any_size_of_terminal_holds_the_picture(width: int, height: int, models: int) -> None:
    made = screen_of(*[model(f"a-name-that-is-rather-long-{number}") for number in range(models)])
    died = {"kind": "instance_died", "time": 0.0, "number": 1, "model": "m", "reason": "signal SIGKILL " * 9}
    made.add_event(died)
    shown(made, width, height)
    made.press_key("\r")
    shown(made, width, height)


def test_the_busiest_come_first_and_keys_sort_by_others() -> None:
    made = screen_of(
        model("a", requests_per_s=1, p99_s=3.0), model("b", requests_per_s=2, p99_s=1.0), model("c")
    )
    assert names(made) == ["b", "a", "c"]
    made.press_key("s")  # p50
    made.press_key("s")  # p99
    assert made.sort == "p99"
    assert names(made) == ["a", "b", "c"]
    made.press_key("S")
    assert names(made) == ["c", "b", "a"]


def test_names_are_sorted_from_a_to_z_and_versions_are_told_apart() -> None:
    made = Screen(sort="model")
    made.add_event(sample(model("b"), model("c"), model("a")))
    assert names(made) == ["a", "b", "c"]
    assert names(screen_of(model("m"), model("m", version=2), model("n"))) == ["m:1", "m:2", "n"]


def test_a_filter_is_typed_and_taken_back() -> None:
    made = screen_of(model("bert"), model("resnet"), model("quit"))
    for key in "/quitx\x7f":
        assert made.press_key(key) is None
    assert made.view is View.FILTER
    assert names(made)[0] == "quit"
    made.press_key("\r")
    assert names(made) == ["quit"]
    made.press_key("/")
    made.press_key("\x1b")
    assert len(names(made)) == 3


def test_a_model_is_shown_with_its_instances() -> None:
    dead = instance("cuda:1#0", state="WAITING", pid=None, restarts=3, gpu_memory_nbytes=2 * GIGA)
    made = screen_of(model("bert", instances=[instance("cuda:0#0"), dead]), model("other"))
    made.press_key("j")
    made.press_key("k")
    made.press_key("\x1b[C")
    assert made.view is View.MODEL
    text = "\n".join(shown(made, 100))
    assert "bert version 1: READY, from config" in text
    assert [line.split()[0] for line in text.splitlines() if "#" in line] == ["cuda:0#0", "cuda:1#0"]
    assert next(line for line in text.splitlines() if "cuda:1#0" in line).split()[1:3] == ["WAITING", "-"]
    assert "steps/s" not in text
    assert made.press_key("q") is None, "it goes back first"
    assert made.press_key("q") is QUIT


def test_steps_of_a_stepped_callable() -> None:
    made = screen_of(model("writer", steps_per_s=412.0, responses_per_s=15700.0, first_p50_s=0.012))
    made.press_key("\x1b[C")
    assert "412 steps/s, 15.7k responses/s, first response p50 12ms" in "\n".join(shown(made, 100))


def test_nothing_is_done_without_a_yes() -> None:
    made = screen_of(model("bert"))
    made.press_key("+")
    assert shown(made)[-1].startswith("scale bert from 1 to 2 on each device? y yes")
    assert made.press_key("n") is None
    assert (made.view, made.notice) == (View.MODELS, "nothing was done")
    made.press_key("-")
    assert (made.view, made.notice) == (View.MODELS, "the model has only one instance on a device")


@pytest.mark.parametrize(
    ("key", "verb", "arguments"),
    [
        ("+", "scale", {"counts": {"bert": 2}}),
        ("r", "reload", {"model": "bert"}),
        ("d", "drain", {}),
        ("u", "drain", {"undo": True}),
    ],
)
def test_keys_ask_the_server(key: str, verb: str, arguments: dict[str, Any]) -> None:
    made = screen_of(model("bert"))
    made.press_key("\r")
    made.press_key(key)
    command = present(made.press_key("Y"))
    assert (command.verb, command.arguments, made.view) == (verb, arguments, View.MODEL)


def test_a_paused_screen_stays() -> None:
    made = screen_of(model("a"))
    made.press_key("p")
    made.add_event(sample(model("b")))
    assert names(made) == ["a"]
    assert "PAUSED" in shown(made)[0]
    made.press_key("p")
    made.add_event(sample(model("b")))
    assert names(made) == ["b"]


def test_200_models_scroll_with_the_chosen_one() -> None:
    made = screen_of(*[model(f"m{number:03d}") for number in range(200)])
    made.press_key("G")
    assert names(made)[-1] == "m199"
    made.press_key("\x1b[5~")
    made.press_key("g")
    assert names(made)[0] == "m000"


def test_gpus_and_ingress_processes_have_lines() -> None:
    gpu = {"device": "cuda:0", "uuid": "GPU-1", "utilization": 0.83}
    gpu |= {"memory_used_nbytes": 12 * GIGA, "memory_nbytes": 80 * GIGA}
    states = ((0, "UP", 12), (1, "STARTING", 0))
    ingress = [dict(zip(("number", "state", "connections"), one, strict=True)) for one in states]
    lines = shown(screen_of(model("a"), gpus=[gpu], doors=ingress))
    assert lines[1].split() == ["cuda:0", "83%", "12G", "of", "80G"]
    assert lines[2] == "connections of each ingress process: 0 12, 1 STARTING 0"


@given(st.lists(st.sampled_from([*KEYS, *"qsShpdu+-r/y?xz", "\x1b[Z", "é"]), max_size=60))
def test_no_key_breaks_the_picture(keys: list[str]) -> None:
    made = screen_of(model("a"), model("b", instances=[]))
    for key in keys:
        made.press_key(key)
        assert shown(made)


def test_before_the_first_sample_and_without_models() -> None:
    made = Screen()
    assert shown(made) == ["waiting for the server …"]
    for key in ("\r", "+", "y", "/", "x", "\r"):
        made.press_key(key)
    made.add_event(sample())
    assert "no model contains 'x'" in "\n".join(shown(made))
