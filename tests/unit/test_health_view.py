"""What a server says of its health, and how another thread of it knows."""

from __future__ import annotations

import pytest

from gpuserve.front.protocols.health_port import STUCK_S, HealthView
from gpuserve.front.requests.server_status import HealthReport

REPORT = HealthReport(live=True, started=True, ready=False, models={"m": True, "a/b": False})


@pytest.mark.parametrize(
    ("service", "answer"),
    [
        ("", False),
        ("readiness", False),
        ("inference.GRPCInferenceService", False),
        ("liveness", True),
        ("startup", True),
        ("model/m", True),
        ("model/a/b", False),
        ("model/", None),
        ("model/model/m", None),
        ("m", None),
        ("Liveness", None),
    ],
)
def test_services(service: str, answer: bool | None) -> None:
    assert REPORT.of(service) is answer


def test_before_the_front_has_said_anything() -> None:
    view = HealthView(0.0)
    assert [view.of(one) for one in ("liveness", "startup", "readiness")] == [True, False, False]


def test_who_watches_is_told_of_news() -> None:
    view, told = HealthView(0.0), list[bool | None]()
    unwatch = view.watch(lambda: told.append(view.of("startup")))
    view.update(REPORT, ended=False)
    view.update(REPORT, ended=True)
    unwatch()
    view.update(REPORT._replace(started=False), ended=True)
    assert (told, view.ended) == ([True, True], True)


def test_a_front_that_does_not_turn_is_not_alive() -> None:
    view, told = HealthView(0.0), list[bool | None]()
    view.update(REPORT, ended=False)
    view.watch(lambda: told.append(view.of("liveness")))
    view.check_heartbeat(STUCK_S)
    assert view.live
    view.check_heartbeat(STUCK_S + 1)
    view.check_heartbeat(STUCK_S + 2)
    assert (view.live, view.of("startup")) == (False, True)
    view.heartbeat(STUCK_S + 3)
    view.check_heartbeat(STUCK_S + 4)
    assert (view.live, told) == (True, [False, True])
