"""Which version of a model answers, and what is told of those that do not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument, NotFound, Unavailable
from gpuserve.front.observability.gpu_health.gpu_monitor import GpuWatch
from gpuserve.front.requests.inference import IndexEntry
from gpuserve.front.requests.server_status import HealthSubscribers
from gpuserve.front.service.model_table import ModelTable, version_number
from gpuserve.model.spec import InstanceSpec, ModelSpec

SPEC = ModelSpec("m", (), (), 0, (InstanceSpec("cpu#0", "cpu", {}),))


def new_table() -> ModelTable:
    """A table of a machine without GPUs."""
    return ModelTable(GpuWatch(), HealthSubscribers())


def driver(version: int, *, ready: bool = True, was_ready: bool | None = None) -> Any:
    """What the table looks at of a driver."""
    spec = dataclasses.replace(SPEC, version=version)
    was_ready = ready if was_ready is None else was_ready
    return SimpleNamespace(spec=spec, ready=ready, was_ready=was_ready, is_starved=False)


def test_the_highest_version_that_was_ready_is_the_latest() -> None:
    table = new_table()
    waiting = driver(2, ready=False)
    table.serve("m", [driver(1, ready=False), waiting])
    assert table.find("m", "") is waiting, "before any is ready, requests wait for the highest"
    one, two, ten = driver(1), driver(2), driver(10, ready=False)
    table.serve("m", [ten, one, two])
    assert table.latest["m"] is two
    assert table.find("m", "") is two
    assert [table.find("m", version) for version in ("1", "2", "10", "02", "+1")] == [one, two, ten, two, one]
    ten.ready = ten.was_ready = True
    table.refresh("m")
    assert table.find("m", "") is ten
    ten.ready = False  # its instances start again: it stays the latest
    table.refresh("m")
    assert table.find("m", "") is ten
    assert table.metadata("m", "")["versions"] == ["1", "2"]
    table.serve("m", [])
    assert (table.latest, table.all()) == ({}, [])


NOT_FOUND = "Request for unknown model: 'm' version 3 is not found"


@pytest.mark.parametrize(
    ("served", "states", "version", "text"),
    [
        (
            (),
            [(2, "UNAVAILABLE", "unloaded")],
            "",
            "Request for unknown model: 'm' has no available versions",
        ),
        (
            (),
            [(2, "UNAVAILABLE", "unloaded")],
            "2",
            "Request for unknown model: 'm' version 2 is not at ready state",
        ),
        ((), [(2, "UNAVAILABLE", "unloaded")], "3", NOT_FOUND),
        ((1,), [], "3", f"{NOT_FOUND}, only version 1 is"),
        ((2, 11), [], "3", f"{NOT_FOUND}, only versions 2, 11 are"),
        ((), [], "", "Request for unknown model: 'm' is not found"),
        ((), [], "1", "Request for unknown model: 'm' is not found"),
    ],
)
def test_what_is_not_served(served: tuple[int, ...], states: Any, version: str, text: str) -> None:
    table = new_table()
    table.set_states("m", [(0, "", "")])
    table.serve("m", map(driver, served))
    table.set_states("m", states)
    with pytest.raises(Unavailable if "ready state" in text else NotFound) as raised:
        table.find("m", version)
    assert str(raised.value) == text
    assert ("m" in table.names()) == bool(served or states)


def test_the_index() -> None:
    table = new_table()
    table.serve("m", [driver(1), driver(2, ready=False), driver(3, ready=False)])
    table.set_states("m", [(2, "LOADING", ""), (3, "READY", ""), (4, "UNAVAILABLE", "no weights")])
    table.set_states("never", [(0, "", "")])
    table.serve("attached", [driver(7)])
    assert table.index() == [
        IndexEntry("attached", "7", "READY"),
        IndexEntry("m", "1", "READY"),
        IndexEntry("m", "2", "LOADING"),
        IndexEntry("m", "3", "UNAVAILABLE", "no live instance"),
        IndexEntry("m", "4", "UNAVAILABLE", "no weights"),
        IndexEntry("never"),
    ]


@given(st.integers(min_value=1, max_value=(1 << 63) - 1))
def test_positive_integers_are_versions(number: int) -> None:
    assert version_number("m", str(number)) == number


@given(st.text(max_size=30) | st.integers(max_value=0).map(str) | st.integers(min_value=1 << 63).map(str))
def test_anything_else_is_refused_for_what_it_is(text: str) -> None:
    number, told = 0, ""
    try:
        number = version_number("m", text)
    except InvalidArgument as error:
        told = str(error)
    if told:
        assert told.endswith("version should be an integral value > 0 for model 'm'")
    else:
        assert number == int(text) > 0
