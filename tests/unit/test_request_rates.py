"""Token buckets, under a clock that is an argument, against a naive model of a token bucket."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from present import present

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import ConfigError, RateLimited
from gpuserve.front.net.request_rate_limiter import RequestRates, TokenBuckets, retry_after_s

#: (client, milliseconds since the request before)
REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700)), max_size=200)
RATES = st.sampled_from([1, 2, 5, 100])
BURSTS = st.integers(1, 20)


class Naive:
    """A bucket that counts tokens in thousandths, so that nothing is rounded."""

    def __init__(self, rate: int, burst: int) -> None:
        self.rate, self.most = rate, 1000 * burst
        self.level, self.at_ms = self.most, 0

    def take(self, now_ms: int) -> bool:
        self.level = min(self.most, self.level + self.rate * (now_ms - self.at_ms))
        self.at_ms = now_ms
        if self.level < 1000:
            return False
        self.level -= 1000
        return True


@given(REQUESTS, RATES, BURSTS)
def test_requests_are_granted_as_by_a_bucket_of_tokens(requests: Any, rate: int, burst: int) -> None:
    buckets, naive, now_ms = TokenBuckets(rate, burst), [Naive(rate, burst) for _ in range(4)], 0
    for client, pause_ms in requests:
        now_ms += pause_ms
        wait_s = buckets.take(client, now_ms / 1000)
        assert (wait_s == 0) is naive[client].take(now_ms)


@given(REQUESTS, RATES, BURSTS)
def test_a_client_that_waits_as_told_is_served(requests: Any, rate: int, burst: int) -> None:
    buckets, now = TokenBuckets(rate, burst), 0.0
    for client, pause_ms in requests:
        now += pause_ms / 1000
        if wait_s := buckets.take(client, now):
            assert 0 < wait_s <= 1 / rate + 1e-9
            now += wait_s
            assert buckets.take(client, now) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=300), st.integers(1, 8))
def test_the_table_is_bounded_and_forgets_full_buckets(requests: list[tuple[int, int]], most: int) -> None:
    buckets, now = TokenBuckets(10, 2, most), 0.0
    for client, pause_ms in requests:
        now += pause_ms / 1000
        buckets.take(client, now)
        assert len(buckets) <= most
    for number in range(most):
        buckets.take(number, now + 1000)  # every other bucket is full by then
    assert len(buckets) <= most


def test_many_addresses_take_no_more_than_the_table() -> None:
    buckets = TokenBuckets(1, 1)
    assert all(buckets.take(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 0.0) == 0 for n in range(200_000))
    assert len(buckets) == 65_536
    assert buckets.take("10.0.0.0", 0.0) == 0  # forgotten: the least recently seen
    assert buckets.take("10.3.13.63", 0.0) == 1.0  # the last one is not


def test_a_client_that_goes_on_is_not_forgotten_for_others() -> None:
    buckets = TokenBuckets(1, 1, max_clients=4)
    assert buckets.take("greedy", 0.0) == 0
    for number in range(100):
        assert buckets.take(number, 0.0) == 0
        assert buckets.take("greedy", 0.0) > 0


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 100)), min_size=50, max_size=400), st.integers(1, 5)
)
def test_processes_that_share_what_they_granted_keep_the_rate(
    requests: list[tuple[int, int]], n_apart: int
) -> None:
    """Over any time all together grant the rate and the burst, and what each grants before it hears of it."""
    rate, burst, now = 10, 5, 0.0
    both = [TokenBuckets(rate, burst), TokenBuckets(rate, burst)]
    granted, unheard, most_unheard = 0, [0, 0], 0
    for number, (process, pause_ms) in enumerate(requests):
        now += pause_ms / 1000
        if both[process].take("client", now) == 0:
            granted += 1
            unheard[process] += 1
        most_unheard = max(most_unheard, sum(unheard))
        if number % n_apart == 0:
            for one in (0, 1):
                both[1 - one].charge("client", unheard[one], now)
            unheard = [0, 0]
    assert granted <= burst + rate * now + most_unheard + 1e-6


def limiter(now: list[float], rate: int | None = 2, burst: int | None = 3, **more: Any) -> RequestRates:
    one = RequestRates(lambda: now[0], **more)
    one.adjust(rate, burst)
    return one


def test_a_refusal_says_what_is_expected_and_when_to_retry() -> None:
    now = [0.0]
    rates = limiter(now)
    assert [rates.refusal("10.0.0.1") for _ in range(3)] == [None] * 3
    error = rates.refusal("10.0.0.1")
    assert isinstance(error, RateLimited)
    assert (error.retry_after_s, retry_after_s(error)) == (0.5, 1)
    assert str(error) == (
        "too many requests from this address: expected at most 2 a second and 3 at once "
        "(max_requests_per_s, max_request_burst); retry in 0.500 s"
    )
    assert rates.refusal("10.0.0.2") is rates.refusal(7) is None
    rates.adjust(1, 1)
    assert rates.refusal(7) is None
    error = present(rates.refusal(7))
    assert "from this token" in str(error)
    assert rates.refused == {"address": 1, "token": 1}


def test_a_value_that_is_the_same_keeps_the_buckets_and_another_fills_them() -> None:
    rates = limiter([0.0], 1, 1)
    assert rates.refusal("a") is None
    rates.adjust(1, None)  # null is the rate
    assert rates.refusal("a") is not None
    rates.adjust(1, 2)
    assert rates.refusal("a") is None
    rates.adjust(None, 2)
    assert not rates.is_on


def test_what_was_granted_is_reported_once() -> None:
    rates = limiter([0.0], 1, 2, reports=True)
    for client in ("a", "b", "a", "a"):
        rates.refusal(client)
    assert dict(rates.take_spent()) == {"a": 2, "b": 1}
    assert rates.take_spent() == ()
    rates.charge((("b", 1),))
    assert rates.refusal("b") is not None


@pytest.mark.parametrize("name", ["max_requests_per_s", "max_request_burst"])
@pytest.mark.parametrize("value", [0, -1, 0.5, float("inf"), float("nan"), True, "many", 1_000_001])
def test_a_rate_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises((ConfigError, ValueError), match=f"{name} must be"):
        ServerSettings.from_wire({name: value})
