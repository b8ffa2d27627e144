"""The supervisor's loop: descriptors, timers, other threads, signal handlers, and its end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from gpuserve.supervisor.control.reactor import Reactor


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    with suppress(OSError):
        reactor.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_readable_descriptor_calls_back_until_it_is_unwatched(
    reactor: Reactor, pipe: tuple[int, int]
) -> None:
    heard: list[bytes] = []

    def read() -> None:
        heard.append(os.read(pipe[0], 1))
        if heard[-1] == b"c":
            reactor.unwatch(pipe[0])
            reactor.call_later(0.0, reactor.stop)

    reactor.watch(pipe[0], read)
    os.write(pipe[1], b"abcd")
    reactor.run()
    assert heard == [b"a", b"b", b"c"]


def test_a_descriptor_that_an_earlier_callback_unwatched_is_not_called(reactor: Reactor) -> None:
    called: list[int] = []
    with closing(open(os.devnull)):
        ends = [os.pipe() for _ in range(2)]

        def first_one_only(own: int, other: int) -> None:
            called.append(own)
            reactor.unwatch(own)
            reactor.unwatch(other)
            reactor.call_later(0.0, reactor.stop)

        for own, other in ((0, 1), (1, 0)):
            fds = ends[own][0], ends[other][0]
            reactor.watch(fds[0], lambda fds=fds: first_one_only(*fds))
            os.write(ends[own][1], b"x")
        reactor.run()
    for pair in ends:
        for fd in pair:
            os.close(fd)
    assert len(called) == 1


def test_unwatching_an_unknown_descriptor_does_nothing(reactor: Reactor, pipe: tuple[int, int]) -> None:
    reactor.unwatch(pipe[0])
    reactor.watch(pipe[0], reactor.stop)
    os.write(pipe[1], b"x")
    reactor.run()
    assert os.read(pipe[0], 1) == b"x"


def test_timers_run_in_order_of_time_then_of_asking(reactor: Reactor) -> None:
    order: list[str] = []
    reactor.call_later(0.02, reactor.stop)
    reactor.call_later(0.01, lambda: order.append("late"))
    reactor.call_later(0.0, lambda: order.append("first"))
    reactor.call_later(0.0, lambda: order.append("second"))
    reactor.run()
    assert order == ["first", "second", "late"]


def test_a_call_from_another_thread_wakes_the_loop(reactor: Reactor) -> None:
    threads: list[int] = []

    def call() -> None:
        threads.append(threading.get_ident())
        reactor.stop()

    other = threading.Thread(target=lambda: reactor.call_soon_threadsafe(call))
    reactor.call_later(0.0, other.start)
    reactor.run()
    other.join()
    assert threads == [threading.get_ident()]


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


def test_stop_leaves_the_rest_of_the_round_uncalled(reactor: Reactor) -> None:
    called: list[int] = []
    reactor.call_soon_threadsafe(reactor.stop)
    reactor.call_soon_threadsafe(lambda: called.append(1))
    reactor.call_later(0.0, lambda: called.append(2))
    reactor.run()
    assert called == []


def test_a_callback_that_raises_ends_the_loop_with_its_error(reactor: Reactor) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    reactor.call_later(0.0, fail)
    with pytest.raises(RuntimeError, match="a defect"):
        reactor.run()


def test_what_was_asked_for_before_the_end_is_still_called_by_close() -> None:
    reactor, called = Reactor(), []
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


def test_a_callback_that_fails_ends_the_loop_only_if_the_owner_says_so(pipe: tuple[int, int]) -> None:
    errors: list[Exception] = []
    called: list[str] = []

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
    with closing(Reactor()) as reactor:
        reactor.call_soon_threadsafe(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reactor.run()
