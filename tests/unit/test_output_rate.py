"""How much of a worker's output is logged, with a clock of the test's."""

from __future__ import annotations

import io
import os
import time

import pytest
from processes import wait_until

from gpuserve.config.settings import logs
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_supervision import BURST_S, OutputRate, OutputRelay


def admitted(rate: OutputRate, now: float, nbytes: int, most: int = 100_000) -> int:
    for count in range(most):
        if rate.is_spent(now):
            return count
        rate.spend(nbytes)
    return most


def test_a_burst_and_then_the_rate_of_lines_and_of_bytes() -> None:
    rate = OutputRate(100, 0)
    assert [admitted(rate, now, 10) for now in (5.0, 5.5, 5.5, 1000.0)] == [
        100 * BURST_S, 50, 0, 100 * BURST_S
    ]  # fmt: skip
    rate = OutputRate(0, 1000)
    # One line may be longer than what is left.
    assert [admitted(rate, now, 5000) for now in (0.0, 1.0, 4.9, 5.1)] == [2, 1, 0, 1]
    assert admitted(OutputRate(0, 0), 0.0, 1 << 30, most=1000) == 1000


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(logs, "write_lines", stream.write)
    return stream


def test_a_relay_drops_what_is_over_the_rate_and_says_so(
    log: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    reactor = Reactor()
    rate = OutputRate(1, 0)
    relay = OutputRelay(read_fd, {"model": "m", "instance": "cpu#0"}, reactor, rate)

    def stop_when_told() -> None:
        if caplog.records:
            reactor.stop()
        else:
            reactor.call_later(0.01, stop_when_told)

    relay.open()
    os.write(write_fd, b"line\n" * 100)
    reactor.call_later(0.05, lambda: os.write(write_fd, b"more\n" * 20))
    reactor.call_later(0.1, lambda: os.write(write_fd, b"begun, "))
    reactor.call_later(0.15, stop_when_told)
    with caplog.at_level("WARNING", "gpuserve"):
        reactor.run()
    assert log.getvalue() == "[m/cpu#0] line\n" * int(BURST_S)
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith(f"{120 - int(BURST_S)} lines of its output were dropped")
    wait_until(lambda: not rate.is_spent(time.monotonic()), "the rate admits a line")
    os.write(write_fd, b"and ended\n")
    os.close(write_fd)
    relay.close()
    assert log.getvalue().endswith("[m/cpu#0] begun, and ended\n")
    os.close(read_fd)
    reactor.close()
