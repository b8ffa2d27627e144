"""What load is asked for: levels, arrivals, connections."""

from __future__ import annotations

import itertools
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.cli.bench.load_plan import (
    ArrivalPattern,
    BenchOptionError,
    LoadKind,
    LoadLevel,
    LoadPlan,
    default_processes,
    due_times,
    parse_levels,
)
from gpuserve.cli.bench.request_payloads import parse_headers, parse_url


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4", [4]), ("1,2,8", [1, 2, 8]), ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]),
        ("1:10:x3", [1, 3, 9]), ("8:24:8", [8, 16, 24]), ("1:3", [1, 2, 3]), ("5:5:x2", [5]),
    ],
)  # fmt: skip
def test_levels(text: str, values: list[float]) -> None:
    assert [one.value for one in parse_levels(LoadKind.CONCURRENCY, text)] == values


def test_the_longest_range() -> None:
    assert len(parse_levels(LoadKind.RATE, "1:1000")) == 1000


def test_rates_may_be_fractions() -> None:
    assert [one.value for one in parse_levels(LoadKind.RATE, "0.5:1:0.25")] == [0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a number, a list"),
        ("a", "expected a number, a list"),
        ("1:2:3:4", "expected a number, a list"),
        ("1:8:x1", "a range that ascends"),
        ("8:1:x2", "a range that ascends"),
        ("1:8:-1", "a range that ascends"),
        ("1:8:0", "a range that ascends"),
        ("1:1001", "at most 1000 levels"),
        ("0", "above 0"),
        ("nan", "above 0"),
        ("1.5", "whole numbers"),
    ],
)
def test_wrong_levels(text: str, said: str) -> None:
    with pytest.raises(BenchOptionError, match=said) as raised:
        parse_levels(LoadKind.CONCURRENCY, text)
    assert raised.value.option == "--concurrency"
    assert repr(text) in str(raised.value)


@given(st.integers(1, 1000), st.integers(1, 16))
def test_the_shares_of_a_level_are_the_level(concurrency: int, processes: int) -> None:
    level = LoadLevel(LoadKind.CONCURRENCY, concurrency)
    shares = [level.share(part, processes).value for part in range(processes)]
    assert sum(shares) == concurrency
    assert max(shares) - min(shares) <= 1


def test_a_constant_rate_has_equal_distances() -> None:
    times = list(itertools.islice(due_times(ArrivalPattern.CONSTANT, 100.0, 0, 0.5), 3))
    assert times == pytest.approx([0.005, 0.015, 0.025])


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    times = list(itertools.islice(due_times(ArrivalPattern.POISSON, 1000.0, 7), 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.001, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.001, rel=0.05)
    assert times == list(itertools.islice(due_times(ArrivalPattern.POISSON, 1000.0, 7), 20_000))


def test_connections_follow_the_protocol_and_the_level() -> None:
    plan = LoadPlan(levels=())
    assert plan.connections_of(LoadLevel(LoadKind.CONCURRENCY, 64), "grpc") == 2
    assert plan.connections_of(LoadLevel(LoadKind.CONCURRENCY, 64), "http") == 64
    assert plan.connections_of(LoadLevel(LoadKind.CONCURRENCY, 0), "grpc") == 0
    assert plan.connections_of(LoadLevel(LoadKind.RATE, 1000), "grpc") == 4
    assert LoadPlan((), connections=7, processes=2).connections_of(LoadLevel(LoadKind.RATE, 1), "http") == 4
    assert [default_processes(cores) for cores in (1, 2, 4, 64)] == [1, 1, 2, 4]


@pytest.mark.parametrize(
    ("url", "protocol", "found"),
    [
        (None, None, "grpc://localhost:8001"),
        (None, "http", "http://localhost:8000"),
        ("host", None, "grpc://host:8001"),
        ("host:9", "http", "http://host:9"),
        ("https://host", None, "https://host:443"),
        ("grpcs://[::1]:9", "grpc", "grpcs://[::1]:9"),
    ],
)
def test_urls(url: str | None, protocol: str | None, found: str) -> None:
    assert str(parse_url(url, protocol)) == found


@pytest.mark.parametrize(
    ("url", "protocol", "said"),
    [
        ("ftp://x", None, "--server: Invalid url"),
        ("http://x", "grpc", "--protocol: grpc does not go with --server http://x"),
        (None, "udp", "--protocol: expected grpc or http, given 'udp'"),
    ],
)
def test_wrong_urls(url: str | None, protocol: str | None, said: str) -> None:
    with pytest.raises(BenchOptionError, match=re.escape(said)):
        parse_url(url, protocol)


def test_headers() -> None:
    assert parse_headers(("Authorization: Bearer a:b", "x:")) == (("authorization", "Bearer a:b"), ("x", ""))
    for wrong in ("nothing", ": x", "a: b\r\nc: d", "Content-Length: 3"):
        with pytest.raises(BenchOptionError):
            parse_headers((wrong,))
