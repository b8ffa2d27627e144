"""The status of a server: its rows, and its text."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpuserve.cli.live.status_view import status_screen, status_text
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control.front_messages import Census
from gpuserve.supervisor.operator.server_status import StatusSources, model_rows

INSTANCE = {"name": "cpu#0", "device": "cpu", "state": "READY", "pid": 12, "restarts": 0, "threads": 2}
MODEL: dict[str, Any] = {"name": "linear", "version": 1, "state": "READY", "reason": "", "source": "config"}
MODEL |= {"queued": 3, "in_flight": 2, "slots": 1, "saturation": 1.25}
MODEL["instances"] = [{**INSTANCE, "memory_nbytes": 40 << 20}]
SERVER: dict[str, Any] = {"name": "gpuserve", "version": "1.2", "pid": 10, "config": "/srv/config.yaml"}
SERVER |= {"state": "SERVING", "service": "IN_SERVICE", "ready": True, "uptime_s": 11_530.4, "doors": []}
SERVER["addresses"] = {"http": "http://localhost:8000", "grpc": "localhost:8001"}
SERVER["front"] = {"pid": 11, "restarts": 0, "answers": True}
SHOWN = """\
gpuserve: SERVING, ready, up 3 h 12 min
  version  1.2
  pid      10
  front    pid 11, 0 restarts
  config   /srv/config.yaml
  http     http://localhost:8000
  grpc     localhost:8001

MODEL   VERSION  STATE  QUEUED  IN FLIGHT  SLOTS  SATURATION  SOURCE
linear  1        READY  3       2          1      1.25        config

MODEL   INSTANCE  DEVICE  STATE  PID  RESTARTS  THREADS  MEMORY
linear  cpu#0     cpu     READY  12   0         2        40 MiB
"""


def shown(*models: Any, server: Any = SERVER, width: int | None = None, **more: Any) -> str:
    document = {"server": server, "models": list(models), **more}
    return status_text(document) if width is None else status_text(document, width)


def test_all_of_it_and_an_instance_of_several_ranks_is_one_row() -> None:
    assert shown(MODEL) == shown(MODEL, width=80) == SHOWN
    instance = {**MODEL["instances"][0], "ranks": 3, "pids": [12, 11, 10]}
    text = shown({**MODEL, "instances": [instance]})
    assert "linear  cpu#0     cpu     READY  12 +2  0         2        40 MiB\n" in text


def test_ingress_processes_are_shown() -> None:
    up = {"number": 0, "pid": 13, "state": "UP", "connections": 5, "requests": 70, "cpu_s": 62.5}
    down = {**up, "number": 1, "pid": None, "state": "DOWN", "connections": 0, "restarts": 2}
    server = {**SERVER, "doors": [{**up, "restarts": 0}, down]}
    assert shown(server=server).split("\n\n")[1] == (
        "INGRESS  PID  STATE  CONNECTIONS  REQUESTS  CPU        RESTARTS\n"
        "0        13   UP     5            70        1 min 2 s  0\n"
        "1        -    DOWN   0            70        1 min 2 s  2\n"
    )


def test_how_long_it_runs() -> None:
    times = {0.4: "0 s", 59.9: "59 s", 61.0: "1 min 1 s", 3600.0: "1 h 0 s", 90_061.0: "1 d 1 h"}
    for uptime_s, text in times.items():
        found = shown(server={**SERVER, "uptime_s": uptime_s}).splitlines()[0]
        assert found == f"gpuserve: SERVING, ready, up {text}"


def test_what_is_not_known_is_a_dash() -> None:
    front = {"pid": None, "restarts": 2, "answers": False}
    server = {**SERVER, "front": front, "ready": False, "config": "", "service": "OUT_OF_SERVICE"}
    instance = {"name": "0", "device": "cpu", "state": "DOWN", "pid": None, "restarts": None}
    unknown = dict.fromkeys(("queued", "in_flight", "slots", "saturation"))
    model = {**MODEL, "state": "UNAVAILABLE", "reason": "no live instance", **unknown}
    lines = shown({**model, "instances": [instance]}, server=server).splitlines()
    assert lines[0] == "gpuserve: SERVING, drained, not ready, up 3 h 12 min"
    assert "  front    pid -, 2 restarts, does not answer" in lines
    assert "  config   -" in lines
    (row,) = [line for line in lines if "UNAVAILABLE (no live instance)" in line]
    assert row.split()[-5:] == ["-", "-", "-", "-", "config"]
    assert lines[-1].split() == ["linear", "0", "cpu", "DOWN", "-", "-", "-", "-"]


def test_memory_of_gpus_is_a_column_where_the_driver_tells_it() -> None:
    told = {**INSTANCE, "name": "cuda:0#0", "device": "cuda:0", "gpu_memory_nbytes": 2 << 30}
    lines = shown({**MODEL, "instances": [INSTANCE, told]}).splitlines()
    assert lines[-3].endswith("MEMORY  GPU MEMORY")
    assert [line.split()[7:] for line in lines[-2:]] == [["-", "-"], ["-", "2048", "MiB"]]


LONG: dict[str, Any] = {
    **MODEL,
    "name": "a_model_of_a_rather_long_name",
    "version": 0,
    "state": "UNAVAILABLE",
    "reason": "its callable could not be imported: No module named 'a_package_that_is_not_installed' here",
    "instances": [
        {**INSTANCE, "name": f"cuda:{n}#0", "device": f"cuda:{n}", "memory_nbytes": 3 << 30} for n in range(2)
    ],
}
WIDE = {"server": {**SERVER, "config": f"/srv/{'folder/' * 20}config.yaml"}, "models": [MODEL, LONG]}


@pytest.mark.parametrize("width", [80, 60, 40])
def test_nothing_is_wider_than_the_terminal_nor_broken_in_a_word(width: int) -> None:
    text = status_text(WIDE, width)
    assert max(map(len, text.splitlines())) <= width
    words = set(text.replace(",", " ").split())
    assert {"SERVING", "READY", "UNAVAILABLE", "cuda:1#0", "linear", "1.25"} <= words
    if width >= 60:
        assert {"a_model_of_a_rather_long_name", "'a_package_that_is_not_installed'"} <= words
        assert "/folder/config.yaml" in text


def test_what_fits_is_a_table_and_what_does_not_is_paragraphs() -> None:
    assert shown(MODEL, width=60).split("\n\n")[1:] == [
        "model linear\n"
        "  version 1, state READY, queued 3, in flight 2, slots 1,\n"
        "  saturation 1.25, source config",
        "model linear\n  instance cpu#0, device cpu, state READY, pid 12,\n"
        "  restarts 0, threads 2, memory 40 MiB\n",
    ]


def test_models_on_demand_and_the_budgets_are_shown() -> None:
    cold = {**MODEL, "residence": "COLD", "instances": []}
    memory = {"cpu": {"limit_nbytes": 1 << 30, "nbytes": 96 << 20}}
    text = shown(cold, memory=memory)
    assert "linear  1        READY, cold  3" in text
    assert text.endswith("MEMORY  TAKEN   BUDGET\ncpu     96 MiB  1024 MiB\n")


def test_reasons_that_have_no_room_stand_below_their_table() -> None:
    parts = shown(MODEL, {**LONG, "name": "big"}, width=80).split("\n\n")
    assert parts[1].splitlines()[2].split()[:3] == ["big", "-", "UNAVAILABLE"]
    assert parts[2] == (
        "  big: its callable could not be imported: No module named\n  'a_package_that_is_not_installed' here"
    )


def test_a_screen_is_not_longer_than_the_terminal() -> None:
    shown = status_screen(WIDE, os.terminal_size((80, 10)))
    lines = shown.split("\n")
    assert len(lines) == 10
    assert lines[8] == f"{len(status_text(WIDE, 80).splitlines()) - 8} more lines\x1b[K"
    assert "more lines" not in status_screen(WIDE, os.terminal_size((80, 100)))


# ---- the rows of the status ----


def rows(census: Census | None, **known: Any) -> list[dict[str, Any]]:
    facts: dict[str, Any] = {"names": (), "specs": (), "workers": (), "attached": (), **known}
    return model_rows(StatusSources("config", census=census, **facts))


def census(counts: tuple[Any, ...] = (), states: tuple[Any, ...] = ()) -> Census:
    return Census(1, True, counts, states, ())


def test_the_generations_of_a_version_are_counted_together() -> None:
    old, new = ("m", 1, 2, 3, 0, None), ("m", 1, 1, 1, 4, 0.5)
    (row,) = rows(census((old, new), (("m", "1", "READY", ""),)))
    assert (row["queued"], row["in_flight"], row["slots"], row["saturation"]) == (3, 4, 4, 0.5)
    assert (row["name"], row["version"], row["state"], row["source"]) == ("m", 1, "READY", "config")


def test_versions_have_rows_of_their_own_in_their_order_loaded_or_not() -> None:
    states = tuple((name, version, "READY", "") for name, version in (("n", "1"), ("m", "10"), ("m", "2")))
    found = [(one["name"], one["version"]) for one in rows(census((), states))]
    assert found == [("m", 2), ("m", 10), ("n", 1)]
    (row,) = rows(census((), (("m", "", "", ""),)))
    assert (row["version"], row["state"], row["reason"]) == (0, "UNAVAILABLE", "not loaded")


def test_without_a_front_the_supervisor_says_what_it_knows() -> None:
    spec = ModelSpec("m", (), (), 0, (), version=3)
    found = [
        (one["name"], one["version"], one["state"]) for one in rows(None, names=("m", "n"), specs=(spec,))
    ]
    assert found == [("m", 3, "READY"), ("n", 0, "UNAVAILABLE")]
