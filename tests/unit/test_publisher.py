"""The socket that events are published on: who hears what, and that nobody is waited for."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from gpuserve.core.event_log import EventKind, EventLog, Subscriptions, topic
from gpuserve.supervisor.control.front_messages import WatchRates
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.operator.event_publication import MAX_WAITING, EventPublication
from gpuserve.supervisor.processes.child_supervision import LogLines

TIMEOUT_MS = 10_000


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    one = Reactor()
    yield one
    one.close()


class Served:
    """An event publication, and the parts of its server that it uses."""

    def __init__(self, reactor: Reactor) -> None:
        self.events, self.lines, self.reactor = EventLog(), LogLines(reactor), reactor
        self.sent: list[WatchRates] = []
        self.front = SimpleNamespace(send=self.sent.append)
        self.publication = EventPublication(cast(Any, self), lambda call, then: then(call()))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        def check() -> None:
            if is_done():
                self.reactor.stop()
            else:
                self.reactor.call_later(0.005, check)

        check()
        self.reactor.run()

    def run_until_heard(self, *sockets: zmq.Socket[bytes]) -> None:
        """Run the server until it has the subscriptions of these sockets: their greetings are answered."""
        hellos = [b"hello/%d" % number for number in range(len(sockets))]
        for socket, hello in zip(sockets, hellos, strict=True):
            socket.subscribe(hello)
        self.run_until(lambda: all(socket.poll(0) for socket in sockets))
        for socket, hello in zip(sockets, hellos, strict=True):
            assert socket.recv_multipart() == [hello, b"{}"]


@pytest.fixture
def served(reactor: Reactor) -> Iterator[Served]:
    one = Served(reactor)
    one.publication.open(lambda: None)
    yield one
    one.publication.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as one:
        yield one


def subscriber(
    context: zmq.Context[zmq.Socket[bytes]], address: str, prefix: bytes, waiting: int = 1000
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, waiting)
    socket.set(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.set(zmq.LINGER, 0)
    socket.subscribe(prefix)
    socket.connect(address)
    return socket


def test_only_what_is_wanted_is_sent(served: Served, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with subscriber(context, served.publication.address, topic(EventKind.LOG, "m")) as socket:
        served.run_until_heard(socket)
        served.lines.add("1", {"model": "other"})
        served.events.record(EventKind.INSTANCE_DIED, model="m")
        served.lines.add("2", {"model": "m"})
        name, text = socket.recv_multipart()
        assert (name, json.loads(text)["line"]) == (b"log/m", "2")


@pytest.mark.parametrize("events", [20_000, pytest.param(200_000, marks=pytest.mark.thorough)])
def test_who_never_reads_loses_events_and_holds_nobody_up(
    served: Served, context: zmq.Context[zmq.Socket[bytes]], events: int
) -> None:
    address = served.publication.address
    with (
        subscriber(context, address, b"instance_died/", waiting=1) as slow,
        subscriber(context, address, b"drained/") as quick,
    ):
        served.run_until_heard(slow, quick)
        slept = _times_slept()
        for _ in range(events):
            served.events.record(EventKind.INSTANCE_DIED, model="m", reason="x" * 200)
        assert _times_slept() - slept < events / 1000
        served.events.record(EventKind.DRAINED)
        assert quick.recv_multipart()[0] == b"drained/"
        slow.set(zmq.RCVTIMEO, 200)
        heard = 0
        while heard < events:
            try:
                slow.recv_multipart()
            except zmq.Again:
                break
            heard += 1
        assert heard < events, f"{MAX_WAITING} wait in the server, and what the kernel has room for"


def test_the_front_measures_rates_while_somebody_wants_samples(
    served: Served, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with subscriber(context, served.publication.address, topic(EventKind.SAMPLE)) as socket:

        def has_ended() -> bool:
            if served.sent:
                socket.unsubscribe(topic(EventKind.SAMPLE))
            return len(served.sent) == 2

        served.run_until(has_ended)
    assert served.sent == [WatchRates(True), WatchRates(False)]


def _times_slept() -> int:
    """How often this thread has waited for something; that others had the processor does not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_nothing_stays_open(reactor: Reactor) -> None:
    before = set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    served = Served(reactor)
    served.publication.open(lambda: None)
    served.publication.close()
    served.publication.close()
    served.events.record(EventKind.DRAINED)
    assert (set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


def test_what_subscribers_want_together() -> None:
    wanted = Subscriptions()
    assert not wanted.wants_some(EventKind.SAMPLE)
    for message in (b"\1log/m", b"\1sample/", b"\1instance_"):
        assert wanted.handle(message) == b""
    assert wanted.wants(topic(EventKind.INSTANCE_DIED, "m"))
    assert wanted.wants_some(EventKind.LOG)
    assert not wanted.wants(topic(EventKind.LOG, "n"))
    wanted.handle(b"\0sample/")
    assert not wanted.wants_some(EventKind.SAMPLE)
    wanted.handle(b"\1")
    assert wanted.wants_some(EventKind.SAMPLE)
    assert wanted.handle(b"\1hello/x") == b"hello/x"
