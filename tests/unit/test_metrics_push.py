"""The metrics page as OpenTelemetry's metrics, and the thread that sends pages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading

import pytest

from gpuserve.front.observability.metrics.metrics_push import MetricsPusher
from gpuserve.front.observability.otlp import metrics_of

PAGE = r"""# HELP gpuserve_jobs_total Jobs.
# TYPE gpuserve_jobs_total counter
gpuserve_jobs_total{model="a"} 3.0
gpuserve_jobs_total{model="b,\"\\\n}"} 4.0
# HELP gpuserve_depth Depth.
# TYPE gpuserve_depth gauge
gpuserve_depth 0.5
# HELP gpuserve_time_seconds Time.
# TYPE gpuserve_time_seconds histogram
gpuserve_time_seconds_bucket{le="0.1",model="a"} 1.0
gpuserve_time_seconds_bucket{le="1.0",model="a"} 3.0
gpuserve_time_seconds_bucket{le="+Inf",model="a"} 4.0
gpuserve_time_seconds_count{model="a"} 4.0
gpuserve_time_seconds_sum{model="a"} 9.5
# HELP gpuserve_nothing_total Nothing yet.
# TYPE gpuserve_nothing_total counter
# HELP nv_inference_count Repeated.
# TYPE nv_inference_count counter
nv_inference_count{model="a"} 3
"""


def test_each_kind_of_metric_keeps_its_name_labels_and_numbers() -> None:
    rests: list[None] = []
    jobs, depth, spent = metrics_of(PAGE, 1, 2, lambda: rests.append(None))
    assert (jobs.name, jobs.description) == ("gpuserve_jobs_total", "Jobs.")
    assert [(one.attributes, one.value) for one in jobs.data.data_points] == [
        ({"model": "a"}, 3.0),
        ({"model": 'b,"\\\n}'}, 4.0),
    ]
    assert {(one.start_time_unix_nano, one.time_unix_nano) for one in jobs.data.data_points} == {(1, 2)}
    assert [(one.attributes, one.value) for one in depth.data.data_points] == [({}, 0.5)]
    (point,) = spent.data.data_points
    assert (point.attributes, point.count, point.sum) == ({"model": "a"}, 4, 9.5)  # type: ignore[union-attr]
    assert (point.bucket_counts, point.explicit_bounds) == ([1, 2, 1], [0.1, 1.0])  # type: ignore[union-attr]
    assert len(rests) == 5


class Sender:
    """Fails where ``failing``; each page waits for ``go_on``."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failing = True
        self.began, self.go_on, self.third = threading.Event(), threading.Event(), threading.Event()

    def send(self, page: bytes) -> None:
        self.began.set()
        assert self.go_on.wait(10)
        self.sent.append(page)
        if len(self.sent) == 3:
            self.third.set()
        if self.failing:
            raise OSError("nobody is there")

    def close(self) -> None:
        self.sent.append(b"closed")


def test_the_loop_does_not_wait_for_the_collector_and_failures_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender, numbers = Sender(), itertools.count(1)

    async def page() -> bytes:
        return b"%d" % next(numbers)

    async def main() -> None:
        pusher = MetricsPusher(page, lambda: sender, 0.001)
        pushing = asyncio.ensure_future(pusher.run())
        await asyncio.to_thread(sender.began.wait, 10)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert next(numbers) == 2, "one page at a time"
        sender.go_on.set()
        await asyncio.to_thread(sender.third.wait, 10)
        pushing.cancel()
        sender.failing = False
        await pusher.close(10)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert sender.sent[:3] == [b"1", b"3", b"4"]
    assert sender.sent[-1] == b"closed"
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]
    assert "nobody is there" in caplog.text
