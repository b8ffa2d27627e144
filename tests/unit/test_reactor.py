"""The supervisor's loop: descriptors, timers, other threads, signal handlers, and its end."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest

from gpuserve.supervisor.control.reactor import Reactor


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    with suppress(OSError):
        reactor.close()


@pytest.fixture
def called() -> list[Any]:
    """What callbacks note."""
    return []


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_readable_descriptor_calls_back_until_it_is_unwatched(
    reactor: Reactor, pipe: tuple[int, int], called: list[Any]
) -> None:
    def read() -> None:
        called.append(os.read(pipe[0], 1))
        if called[-1] == b"c":
            reactor.unwatch(pipe[0])
            reactor.call_later(0.0, reactor.stop)

    reactor.unwatch(pipe[0])  # an unknown descriptor
    reactor.watch(pipe[0], read)
    os.write(pipe[1], b"abcd")
    reactor.run()
    assert called == [b"a", b"b", b"c"]


def test_a_descriptor_that_an_earlier_callback_unwatched_is_not_called(
    reactor: Reactor, called: list[Any]
) -> None:
    ends = [os.pipe() for _ in range(2)]

    def first_one_only(own: int) -> None:
        called.append(own)
        for fd, _ in ends:
            reactor.unwatch(fd)
        reactor.call_later(0.0, reactor.stop)

    for read_end, write_end in ends:
        reactor.watch(read_end, partial(first_one_only, read_end))
        os.write(write_end, b"x")
    reactor.run()
    for fd in itertools.chain(*ends):
        os.close(fd)
    assert len(called) == 1


def test_timers_run_in_order_of_time_then_of_asking(reactor: Reactor, called: list[Any]) -> None:
    reactor.call_later(0.02, reactor.stop)
    for delay_s, name in ((0.01, "late"), (0.0, "first"), (0.0, "second")):
        reactor.call_later(delay_s, partial(called.append, name))
    reactor.run()
    assert called == ["first", "second", "late"]


def test_a_call_from_another_thread_wakes_the_loop(reactor: Reactor, called: list[Any]) -> None:
    def call() -> None:
        called.append(threading.get_ident())
        reactor.stop()

    other = threading.Thread(target=lambda: reactor.call_soon_threadsafe(call))
    reactor.call_later(0.0, other.start)
    reactor.run()
    other.join()
    assert called == [threading.get_ident()]


def test_a_call_from_a_signal_handler_wakes_the_loop(reactor: Reactor) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: reactor.call_soon_threadsafe(reactor.stop))
    try:
        reactor.call_later(0.0, lambda: signal.raise_signal(signal.SIGUSR1))
        reactor.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert reactor.call_soon_threadsafe(lambda: None)


def test_a_signal_that_comes_just_before_the_loop_sleeps_wakes_it(reactor: Reactor) -> None:
    """Its handler has not run then: what the interpreter writes for it is all that can wake the loop."""
    before = signal.set_wakeup_fd(-1)
    rounds: list[int] = []

    def look() -> None:
        rounds.append(fd := signal.set_wakeup_fd(-1))
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        if len(rounds) == 1:
            os.write(fd, bytes((signal.SIGUSR1,)))
            reactor.call_later(3600, reactor.stop)
        else:
            reactor.call_soon_threadsafe(reactor.stop)

    select = reactor._selector.select
    reactor._selector.select = lambda timeout: (look(), select(timeout))[1]  # type: ignore[method-assign]
    reactor.run()
    assert rounds[0] >= 0
    assert signal.set_wakeup_fd(before) == -1, "it is given back"


def test_stop_leaves_the_rest_of_the_round_uncalled(reactor: Reactor, called: list[Any]) -> None:
    reactor.call_soon_threadsafe(reactor.stop)
    reactor.call_soon_threadsafe(lambda: called.append(1))
    reactor.call_later(0.0, lambda: called.append(2))
    reactor.run()
    assert called == []


def test_what_was_asked_for_before_the_end_is_still_called_by_close(called: list[Any]) -> None:
    reactor = Reactor()
    reactor.call_soon_threadsafe(reactor.stop)
    reactor.run()
    assert reactor.call_soon_threadsafe(lambda: called.append("asked in time"))
    reactor.close()
    assert called == ["asked in time"]


def test_a_closed_reactor_says_so_and_writes_to_nobody_elses_descriptor() -> None:
    reactor = Reactor()
    reactor.close()
    # The number of the reactor's own descriptor goes to whoever opens something next.
    ends = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
    try:
        assert not reactor.call_soon_threadsafe(lambda: None)
        for fd in ends:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
    finally:
        for fd in ends:
            os.close(fd)


def test_a_callback_that_fails_ends_the_loop_only_if_the_owner_says_so(
    pipe: tuple[int, int], called: list[Any]
) -> None:
    errors: list[Exception] = []

    def fail() -> None:
        called.append("read")
        raise ValueError("a callback of a descriptor that stays readable")

    def stop() -> None:
        called.append("timer")
        reactor.stop()

    with closing(Reactor(errors.append)) as reactor:
        reactor.watch(pipe[0], fail)
        os.write(pipe[1], b"x")
        reactor.call_soon_threadsafe(lambda: 1 / 0)
        reactor.call_later(1e300, fail)  # longer than epoll waits
        reactor.call_later(0.2, stop)
        reactor.run()
    assert called == ["read", "timer"]  # the descriptor is not watched for a second
    assert {type(error) for error in errors} == {ValueError, ZeroDivisionError}
    for soon in (True, False):
        with closing(Reactor()) as reactor:
            if soon:
                reactor.call_soon_threadsafe(lambda: 1 / 0)
            else:
                reactor.call_later(0.0, lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                reactor.run()
