"""Work in time slices: others have their turn meanwhile, and nobody has one made for himself alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator

import pytest
from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.observability.time_slices import SlicedPage
from gpuserve.front.requests import admin_codec
from gpuserve.front.requests.statistics import ModelStatistics, StatisticsEntry
from gpuserve_worker.execution.async_loop import TimeSlices

N_STEPS = 40
STEP_S = 0.001


async def test_others_have_their_turn_and_share_the_next_page() -> None:
    n_made = 0

    def rendering() -> Generator[None, None, bytes]:
        nonlocal n_made
        n_made += 1
        for _ in range(N_STEPS):
            time.sleep(STEP_S)
            yield
        return b"%d" % n_made

    page = SlicedPage(rendering)
    first = asyncio.create_task(page.page())
    turns = 0
    while not first.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 4:
            others = [asyncio.create_task(page.page()) for _ in range(9)]
    assert turns > N_STEPS / 4
    assert first.result() == b"1"
    assert set(await asyncio.gather(*others)) == {b"2"}


def made(rendering: Generator[None, None, bytes]) -> bytes:
    async def make() -> bytes:
        return await SlicedPage(lambda: rendering).page()

    return asyncio.run(make())


def test_statistics_in_steps_are_those_in_one_go() -> None:
    entries = [StatisticsEntry(name, "1", ModelStatistics(), 7) for name in ("a", "b")]
    by_json = made(admin_codec.statistics_json_in_steps(entries))
    assert by_json == admin_codec.statistics_json(entries)
    assert [one["name"] for one in json.loads(by_json)["model_stats"]] == ["a", "b"]
    by_message = pb.ModelStatisticsResponse.FromString(made(admin_codec.statistics_message_in_steps(entries)))
    assert by_message == admin_codec.statistics_message(entries)
    assert made(admin_codec.statistics_json_in_steps([])) == admin_codec.statistics_json([])


# ---- batches that yield on one event loop ----


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
