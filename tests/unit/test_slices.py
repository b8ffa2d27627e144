"""Batches that yield on one event loop: each goes on for a while, then all others have their turn."""

from __future__ import annotations

import asyncio

import pytest

from gpuserve_worker.execution.async_loop import TimeSlices


@pytest.mark.parametrize(
    ("response_ns", "expected"),
    [
        (50_000, "abaaaabbbbaaab"),  # at no cost: the others after the first, then after some
        (1_000_000, "ababababab"),  # slow ones: the others after each
    ],
)
async def test_a_generator_gives_way_when_its_time_is_over(response_ns: int, expected: str) -> None:
    now_ns = 1
    made = ""

    async def generate(name: str, count: int) -> None:
        nonlocal now_ns, made
        for _ in range(count):
            now_ns += response_ns
            made += name
            await slices.rest()

    slices = TimeSlices(lambda: now_ns)
    await asyncio.gather(*(generate(name, expected.count(name)) for name in "ab"))
    assert made == expected
