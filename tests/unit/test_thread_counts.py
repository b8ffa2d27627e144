"""How the cores of a server are divided among its instances."""

from __future__ import annotations

from typing import Any

import pytest

from gpuserve.model.placement import cores_of_instances, n_threads, overloads
from gpuserve.model.spec import InstanceSpec


def instances(*each: dict[str, Any]) -> list[InstanceSpec]:
    return [InstanceSpec(f"{number}", "cpu", {}, **one) for number, one in enumerate(each)]


@pytest.mark.parametrize(
    ("processors", "ingress", "left"),
    [(1.5, 1, 1.5), (2.0, 4, 2.0), (8.0, 1, 7.0), (16.0, 4, 14.0), (64.0, 4, 59.0)],
)
def test_the_front_has_cores_of_its_own_on_large_machines(
    processors: float, ingress: int, left: float
) -> None:
    assert cores_of_instances(processors, ingress) == left


@pytest.mark.parametrize(
    ("each", "cores", "threads"),
    [
        ([{}], 2.0, [2]),
        ([{}] * 4, 2.0, [1] * 4),
        ([{}] * 3, 8.0, [2] * 3),
        ([{}], 0.5, [1]),
        ([{"threads": 4}, {}, {}], 8.0, [4, 2, 2]),
        ([{"threads": 9}, {}], 8.0, [9, 1]),
        ([{"cpus": (0, 1, 2)}, {}], 8.0, [3, 5]),
        ([{"cpus": (0, 1, 2, 3)}] * 2 + [{"cpus": (4,)}], 8.0, [2, 2, 1]),
    ],
)
def test_shares(
    each: list[dict[str, Any]], cores: float, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = instances(*each)
    assert [n_threads(one, made, cores) for one in made] == threads
    assert any(overloads(made, cores, 1)) is (sum(threads) > max(cores, len(each)))


@pytest.mark.parametrize(("ingress", "processors", "warned"), [(1, 0.5, 0), (2, 2.0, 0), (4, 2.0, 1)])
def test_more_ingress_processes_than_cores_are_warned_of(
    ingress: int, processors: float, warned: int
) -> None:
    found = list(overloads(instances({"threads": 1}), processors, ingress))
    assert len(found) == warned
    assert all("4 ingress processes have 2 cores" in one for one in found)
