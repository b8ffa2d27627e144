"""From what a front says of its models to the rows of the status."""

from __future__ import annotations

from typing import Any

from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control.front_messages import Census
from gpuserve.supervisor.operator.server_status import StatusSources, model_rows


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


def test_versions_have_rows_of_their_own_in_their_order() -> None:
    states = tuple((name, version, "READY", "") for name, version in (("n", "1"), ("m", "10"), ("m", "2")))
    assert [(one["name"], one["version"]) for one in rows(census((), states))] == [
        ("m", 2),
        ("m", 10),
        ("n", 1),
    ]


def test_a_model_that_was_never_loaded() -> None:
    (row,) = rows(census((), (("m", "", "", ""),)))
    assert (row["version"], row["state"], row["reason"]) == (0, "UNAVAILABLE", "not loaded")


def test_without_a_front_the_supervisor_says_what_it_knows() -> None:
    spec = ModelSpec("m", (), (), 0, (), version=3)
    found = rows(None, names=("m", "n"), specs=(spec,))
    assert [(one["name"], one["version"], one["state"]) for one in found] == [
        ("m", 3, "READY"),
        ("n", 0, "UNAVAILABLE"),
    ]
