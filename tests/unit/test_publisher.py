"""The socket that events are published on: who hears what, and that nobody is waited for."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest
import zmq

from gpuserve.core.event_log import EventKind, Subscriptions, topic
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.operator.event_publication import MAX_WAITING, EventPublisher

TIMEOUT_MS = 10_000
EVENT = b'{"kind":"instance_died","reason":"' + b"x" * 200 + b'"}'


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    one = Reactor()
    yield one
    one.close()


class Served(EventPublisher):
    """A publisher that stops its reactor when what it waits for is subscribed to."""

    def __init__(self, reactor: Reactor) -> None:
        super().__init__(reactor, self._changed)
        self._loop = reactor
        self._wanted: tuple[bytes, ...] = ()

    def _changed(self) -> None:
        if all(map(self.subscriptions.wants, self._wanted)):
            self._loop.stop()

    def run_until_wanted(self, *topics: bytes) -> None:
        self._wanted = topics
        self._changed()
        self._loop.run()


@pytest.fixture
def publisher(reactor: Reactor) -> Iterator[Served]:
    one = Served(reactor)
    one.open()
    yield one
    one.close()


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


def test_only_what_is_wanted_is_sent(publisher: Served, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with subscriber(context, publisher.address, topic(EventKind.LOG, "m")) as socket:
        publisher.run_until_wanted(b"log/m")
        publisher.publish(b"log/other", b"1")
        publisher.publish(b"log/m", b"2")
        assert socket.recv_multipart() == [b"log/m", b"2"]


@pytest.mark.parametrize("events", [20_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
def test_who_never_reads_loses_events_and_holds_nobody_up(
    publisher: Served, context: zmq.Context[zmq.Socket[bytes]], events: int
) -> None:
    with (
        subscriber(context, publisher.address, b"instance_died/", waiting=1) as slow,
        subscriber(context, publisher.address, b"drained/") as quick,
    ):
        publisher.run_until_wanted(b"instance_died/", b"drained/")
        slept = _times_slept()
        for _ in range(events):
            publisher.publish(b"instance_died/m", EVENT)
        assert _times_slept() - slept < events / 1000
        publisher.publish(b"drained/", b"{}")
        assert quick.recv_multipart() == [b"drained/", b"{}"]
        slow.set(zmq.RCVTIMEO, 200)
        heard = 0
        while heard < events:
            try:
                slow.recv_multipart()
            except zmq.Again:
                break
            heard += 1
        assert heard < events, f"{MAX_WAITING} wait in the server, and what the kernel has room for"


def _times_slept() -> int:
    """How often this thread has waited for something; that others had the processor does not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_a_greeting_is_answered(publisher: Served, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with subscriber(context, publisher.address, b"hello/1234") as socket:
        publisher.run_until_wanted(b"hello/1234")
        assert socket.recv_multipart() == [b"hello/1234", b"{}"]


def test_nothing_stays_open(reactor: Reactor) -> None:
    before = set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    publisher = EventPublisher(reactor, lambda: None)
    publisher.open()
    publisher.close()
    publisher.close()
    publisher.publish(b"log/", b"{}")
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
