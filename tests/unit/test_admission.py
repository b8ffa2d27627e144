"""Which connections are taken, and what of it is said."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, cast

import pytest

from gpuserve.core.errors import ResourceExhausted
from gpuserve.front.net.admission import Admission, Limits
from gpuserve.front.net.exchange import ConnectionEndpoints, Head
from gpuserve.front.net.request_rate_limiter import LOG_INTERVAL_S


def admission(most: int = 100, of_address: int = 100, n_descriptors: int = 1 << 16) -> Admission:
    return Admission(Limits(max_connections=most, max_connections_per_address=of_address), n_descriptors)


def test_so_many_are_taken_and_each_that_goes_makes_room() -> None:
    one = admission(most=4, of_address=4)
    taken = [one.admit(f"10.0.0.{number}", 5) for number in range(5)]
    assert (taken, one.refused["connections"]) == ([True] * 4 + [False], 1)
    one.release("10.0.0.1")
    assert one.admit("10.0.0.9", 5)


def test_one_address_never_has_all() -> None:
    """Three quarters at most, whatever the settings say; the others are for the rest of the world."""
    one = admission(most=8, of_address=8)
    assert [one.admit("10.0.0.1", 5) for _ in range(7)] == [True] * 6 + [False]
    assert one.admit("10.0.0.2", 5)
    assert (one.n_open, one.refused["address"]) == (7, 1)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("2001:db8::1", "2001:db8::2:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_whose_connections_are_counted_together(first: str, second: str, together: bool) -> None:
    one = admission(of_address=1)
    assert one.admit(first, 5)
    assert one.admit(second, 5) is not together


class Call:
    """A call from an address, with a head of so many bytes."""

    def __init__(self, address: str, nbytes: int = 100) -> None:
        self.head = Head("POST", b"/", [(b"x", bytes(nbytes - 1))], "2", None)
        self.endpoints = ConnectionEndpoints((address, 1), ("", 0), False)


def test_streams_are_counted_with_their_heads_and_one_address_never_has_all() -> None:
    one = Admission(Limits(max_streams=8)).streams
    with contextlib.ExitStack() as opened:

        def opens(address: str, nbytes: int = 100) -> bool:
            try:
                opened.enter_context(one.counted(cast("Any", Call(address, nbytes))))
            except ResourceExhausted:
                return False
            return True

        assert [opens("10.0.0.1", 32 << 10), opens("10.0.0.1"), opens("10.0.0.1")] == [True, True, False]
        assert [opens("10.0.0.2") for _ in range(3)] == [True, True, False]
        assert one.n_open == 8
    assert (one.n_open, one._by_address) == (0, {})


def test_unix_sockets_have_no_address() -> None:
    one = admission(of_address=1)
    assert one.admit(None, 5)
    assert one.admit(None, 6)
    one.release(None)
    assert one.n_open == 1


def test_the_last_descriptors_are_for_nobody() -> None:
    one = admission(n_descriptors=1024)
    assert one.admit("10.0.0.1", 767)
    assert not one.admit("10.0.0.2", 768)
    assert one.refused["descriptors"] == 1
    spare = Admission(n_descriptors=1024, n_spare=128)
    assert spare.admit(None, 895)
    assert not spare.admit(None, 896)


def test_refusals_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 2.0, LOG_INTERVAL_S])
    one = Admission(Limits(max_connections=1), 1 << 16, clock=lambda: next(times))
    assert one.admit(None, 5)
    with caplog.at_level(logging.WARNING):
        assert not any(one.admit(None, 5) for _ in range(4))
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection: max_connections is 1",
        "refused a connection: max_connections is 1 (2 similar warnings suppressed before)",
    ]


def test_limits_change_for_those_who_are_there_and_those_who_come() -> None:
    one = admission(most=1)
    seen = one.limits
    assert one.admit("a", 9)
    assert not one.admit("b", 9)
    one.adjust(Limits(max_connections=3, max_connections_per_address=1, idle_timeout_s=2.0))
    assert seen.idle_timeout_s == 2.0
    assert [one.admit(address, 9) for address in "abcd"] == [False, True, True, False]
