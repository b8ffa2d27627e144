"""Events: telling them, keeping the last ones, and passing them on to a front that may be slow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.event_log import (
    FACTS,
    KEPT,
    KEPT_BY_FRONT,
    MAX_TEXT_CHARACTERS,
    OBSERVED_BY_FRONT,
    Event,
    EventKind,
    EventLog,
)
from gpuserve.front.service.inference_service import FrontEventLog as SeenByFront
from gpuserve.supervisor.control.front_messages import CONTROL, EventBatch, FrontEvent
from gpuserve.supervisor.control.reactor import Channel, Reactor, channel_pair
from gpuserve.supervisor.processes.child_supervision import LogLines
from gpuserve.supervisor.processes.front_monitor import FrontEventFeed, FrontMonitor
from gpuserve.supervisor.processes.lifecycle import LiveSettings, ServerLifecycle
from gpuserve.supervisor.processes.listeners import Listeners
from gpuserve.supervisor.processes.server_core import ServerCore
from gpuserve.supervisor.workers.gpu_fences import GpuFences


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def event_log() -> EventLog:
    return EventLog(Clock())


def test_an_event_as_a_document_leaves_out_what_it_is_not_about(event_log: EventLog) -> None:
    event_log.record(EventKind.SERVER_STATE, state="SERVING")
    event_log.record(EventKind.INSTANCE_DIED, model="m", version=2, instance="cpu#0", reason="signal SIGKILL")
    first, second = (one.document() for one in event_log.recent)
    assert first == {"time": 1001.0, "number": 1, "kind": "server_state", "state": "SERVING"}
    assert second == {
        "time": 1002.0, "number": 2, "kind": "instance_died", "model": "m", "version": 2,
        "instance": "cpu#0", "reason": "signal SIGKILL",
    }  # fmt: skip


def test_an_event_is_the_same_after_the_wire(event_log: EventLog) -> None:
    event_log.record(EventKind.CONFIG_RELOADED, ok=False, changes={"failed": [{"model": "m"}]})
    (event,) = event_log.recent
    (wire,) = CONTROL.decode(CONTROL.encode(EventBatch((event.to_wire(),)))).events
    assert json.dumps(Event.from_wire(wire).document()) == json.dumps(event.document())


def test_facts_can_be_said_in_json_and_have_a_bound(event_log: EventLog) -> None:
    event_log.record(EventKind.INSTANCE_DIED, model="m", reason="x" * 1_000_000, restart_in_s=math.inf)
    (event,) = event_log.recent
    document = event.document()
    assert len(document["reason"]) < MAX_TEXT_CHARACTERS + 10
    assert document["restart_in_s"] is None
    json.dumps(document, allow_nan=False)


def test_only_the_last_events_are_kept(event_log: EventLog) -> None:
    for _ in range(KEPT + 10):
        event_log.record(EventKind.SCALED, model="m")
    numbers = [one.number for one in event_log.recent]
    assert numbers == list(range(11, KEPT + 11))
    assert [one.number for one in event_log.recent.after(KEPT + 8)] == [KEPT + 9, KEPT + 10]


def test_a_follower_hears_each_event_until_it_leaves(event_log: EventLog) -> None:
    heard: list[Event] = []
    leave = event_log.recent.subscribe(heard.append)
    event_log.record(EventKind.SCALED, model="a")
    event_log.recent.add(heard[0])  # known already
    leave()
    event_log.record(EventKind.SCALED, model="b")
    assert [one.model for one in heard] == ["a"]


def test_each_kind_has_its_facts() -> None:
    assert FACTS.keys() == set(EventKind)


class Front:
    """The supervisor's end of a front that reads when it is told to."""

    def __init__(self) -> None:
        self.ready = True
        ours, theirs = channel_pair()
        self._channel, self.front = Channel(ours, CONTROL), Channel(theirs, CONTROL)

    def offer(self, message: Any) -> bool:
        return self._channel.offer(message)

    def read(self) -> list[int]:
        found = []
        while self.front.pending():
            found += [Event.from_wire(one).number for one in self.front.receive().events]  # type: ignore[union-attr]
        return found

    def close(self) -> None:
        self._channel.close()
        self.front.close()


class Later(Reactor):
    """A reactor whose timers a test fires."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[Any] = []

    def call_later(self, delay_s: float, callback: Any) -> None:
        self.due.append(callback)


@pytest.fixture
def front() -> Iterator[Front]:
    one = Front()
    yield one
    one.close()


@pytest.fixture
def reactor() -> Iterator[Later]:
    one = Later()
    yield one
    one.close()


def test_a_front_hears_in_time_and_in_order(event_log: EventLog, front: Front, reactor: Later) -> None:
    passed = FrontEventFeed(event_log.recent, front, reactor)  # type: ignore[arg-type]
    passed.open()
    for _ in range(3):
        event_log.record(EventKind.SCALED, model="m")
    assert front.read() == [1, 2, 3]


def test_a_front_is_told_once_it_is_ready(event_log: EventLog, front: Front, reactor: Later) -> None:
    front.ready = False
    passed = FrontEventFeed(event_log.recent, front, reactor)  # type: ignore[arg-type]
    passed.open()
    for _ in range(KEPT):
        event_log.record(EventKind.SCALED, model="m")
    assert front.read() == []
    front.ready = True
    passed.front_ready()
    assert front.read() == list(range(KEPT - KEPT_BY_FRONT + 1, KEPT + 1))
    passed.front_ready()  # its successor
    assert front.read() == list(range(KEPT - KEPT_BY_FRONT + 1, KEPT + 1))


def test_a_front_that_does_not_read_blocks_nobody(event_log: EventLog, front: Front, reactor: Later) -> None:
    passed = FrontEventFeed(event_log.recent, front, reactor)  # type: ignore[arg-type]
    passed.open()
    while not reactor.due:
        event_log.record(EventKind.INSTANCE_DIED, model="m", reason="x" * 1000)
    before = front.read()
    event_log.record(EventKind.SCALED, model="m")
    assert front.read() == []  # until it is due
    reactor.due.pop()()
    assert before + front.read() == [one.number for one in event_log.recent]


def test_a_gpu_that_is_lost_and_comes_back(reactor: Later, event_log: EventLog) -> None:
    settings, lines = LiveSettings(ServerSettings()), LogLines(reactor)
    monitor = FrontMonitor(reactor, Listeners(), settings, event_log, lines, no_front)
    core = ServerCore(ServerLifecycle(event_log), settings, reactor, Listeners(), monitor, event_log, lines)
    fences = GpuFences(core, {}, lambda: ())
    lost = ("GPU-1", "cuda:0", "it fell off the bus"), ("GPU-2", "cuda:1", "it is too hot")
    fences.gpus_lost(lost)
    fences.gpus_lost(lost[1:])
    found = [(one.kind, one.facts["uuid"], one.facts.get("reason")) for one in event_log.recent]
    assert found == [
        (EventKind.GPU_FENCED, "GPU-1", "it fell off the bus"),
        (EventKind.GPU_FENCED, "GPU-2", "it is too hot"),
        (EventKind.GPU_RELEASED, "GPU-1", None),
    ]


def no_front() -> Any:
    raise AssertionError("nobody starts one")


def test_what_the_front_has_seen_is_one_message() -> None:
    said: list[Any] = []
    SeenByFront(said.append).publish(EventKind.INGRESS_DIED, door=1, reason="signal SIGKILL")
    assert said == [FrontEvent("door_died", "", 0, "", {"door": 1, "reason": "signal SIGKILL"})]
    assert EventKind.INGRESS_DIED in OBSERVED_BY_FRONT


def test_a_supervisor_without_time_holds_no_front_up() -> None:
    def full(_: Any) -> None:
        raise BlockingIOError

    SeenByFront(full).publish(EventKind.INGRESS_DIED, door=1)
