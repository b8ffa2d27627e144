"""The metrics page under Triton's names: their exact form, and the machine's."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpuserve.front.observability.metrics import metrics_page, prometheus
from gpuserve.front.observability.metrics.metrics_page import (
    CpuMetrics,
    CpuTime,
    MetricsPage,
    cpu_time,
    memory_nbytes,
    utilization,
)
from gpuserve.front.observability.metrics.model_metrics import LatencyWindow, ModelMetrics
from gpuserve.front.requests.statistics import FailureReason, ResponseFate

PARTS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
COUNTERS = {f"nv_inference_{name}" for name in ("request_success", "request_failure", "count", "exec_count")}
COUNTERS |= {f"nv_inference_{part}_duration_us" for part in PARTS}
CACHE_COUNTERS = {f"nv_cache_num_{kind}_per_model" for kind in ("hits", "misses")}
CACHE_COUNTERS |= {f"nv_cache_{kind}_duration_per_model" for kind in ("hit", "miss")}
GAUGES = {"nv_inference_pending_request_count", "nv_model_load_duration_secs"}
#: The labels of the model of these tests.
M = '{model="m",version="1"}'
HELP = """\
nv_inference_request_success Number of successful inference requests, all batch sizes
nv_inference_request_failure Number of failed inference requests, all batch sizes
nv_inference_count Number of inferences performed (does not include cached requests)
nv_inference_exec_count Number of model executions performed (does not include cached requests)
nv_inference_request_duration_us Cumulative inference request duration in microseconds \
(includes cached requests)
"""
STAT = "cpu  10 0 30 50 10 0 0 0 5 5\ncpu0 1 1 1 1\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"


class Request:
    def __init__(self) -> None:
        self.rows, self.enqueued_at, self.counted = 2, 0.0, False


def metrics(window: LatencyWindow | None = None) -> ModelMetrics:
    made = ModelMetrics("m", "1", lambda: {"gpuserve_queue_requests": 3.0}, window)
    made.instance("cpu#0").load_s = 1.5
    made.executed("cpu#0", 2, 0.0, (1000, 2000, 3000), [Request()], [None])
    return made


def lines(*models: ModelMetrics) -> list[str]:
    return prometheus.page(metrics_page.model_families(models, 0.0)).decode().splitlines()


def test_names_types_labels_and_the_help_that_boards_show() -> None:
    text = lines(metrics())
    types = dict(line.split()[2:] for line in text if line.startswith("# TYPE"))
    assert types == dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    names = {line.split("{")[0] for line in text if not line.startswith("#")}
    assert names == set(types), "the sample of a counter has no _total"
    assert {*text} > {
        f"nv_inference_request_success{M} 1",
        f"nv_inference_count{M} 2",
        f"nv_inference_exec_count{M} 1",
        f"nv_inference_compute_infer_duration_us{M} 2",
        f"nv_inference_pending_request_count{M} 3.0",
        f"nv_model_load_duration_secs{M} 1.5",
        *(f"# HELP {line}" for line in HELP.splitlines()),
    }


def test_every_reason_of_failure_is_there_from_the_start() -> None:
    model = metrics()
    model.failed("INTERNAL", FailureReason.BACKEND, 0.0)
    found = [line for line in lines(model) if line.startswith("nv_inference_request_failure{")]
    assert found == [
        f'nv_inference_request_failure{{model="m",reason="{reason}",version="1"}} {count}'
        for reason, count in (("REJECTED", 0), ("CANCELED", 0), ("BACKEND", 1), ("OTHER", 0))
    ]


def test_a_cache_is_counted_where_there_is_one() -> None:
    assert not [line for line in lines(metrics(LatencyWindow())) if "cache" in line.split()[-1].split("{")[0]]
    model = metrics(LatencyWindow())
    model.outcomes.cache_misses = 0
    model.cache_hit(None, 1e-6)
    model.cache_missed(2e-6)
    model.cache_kept(2e-6, 3e-6)
    text = lines(model)
    names = {line.split()[2] for line in text if line.startswith("# TYPE nv_cache")}
    assert names == {*CACHE_COUNTERS, "nv_cache_hit_summary_per_model", "nv_cache_miss_summary_per_model"}
    assert f"nv_cache_num_misses_per_model{M} 1" in text
    summary = "nv_cache_miss_summary_per_model"
    first, *_, count, total = [line for line in text if line.startswith(summary)]
    assert first == f'{summary}{{model="m",quantile="0.5",version="1"}} 5.0'
    assert (count, total) == (f"{summary}_count{M} 1", f"{summary}_sum{M} 5")


def test_summaries_only_where_there_is_a_window() -> None:
    assert not [line for line in lines(metrics()) if "summary" in line]
    text = lines(metrics(LatencyWindow()))
    for part in PARTS:
        name = f"nv_inference_{part}_summary_us"
        assert f"# TYPE {name} summary" in text
        assert f"{name}_count{M} 1" in text
    name = "nv_inference_compute_infer_summary_us"
    assert [line for line in text if line.startswith(f"{name}{{")] == [
        f'{name}{{model="m",quantile="{quantile}",version="1"}} 2.0'
        for quantile in (0.5, 0.9, 0.95, 0.99, 0.999)
    ]
    text = lines(ModelMetrics("m", "1", dict, LatencyWindow()))
    assert 'nv_inference_queue_summary_us{model="m",quantile="0.5",version="1"} NaN' in text


def test_the_first_responses_of_decoupled_models() -> None:
    model = metrics()
    assert not [line for line in lines(model) if "first_response" in line]
    model.statistics.responded(0, ResponseFate.SUCCESS, 0.2, 0.0)
    model.first_response.observe(200.0)
    name = "nv_inference_first_response_histogram_ms"
    buckets = {"100": 0, "500": 1, "2000": 1, "5000": 1, "+Inf": 1}
    assert [line for line in lines(model) if line.startswith(name)] == [
        *(f'{name}_bucket{{le="{bound}",model="m",version="1"}} {n}' for bound, n in buckets.items()),
        f"{name}_count{M} 1",
        f"{name}_sum{M} 200.0",
    ]


async def test_a_page_of_many_models_lets_others_have_their_turn() -> None:
    """All who ask while a page is made share the next one."""
    models = [loaded(f"m{number}") for number in range(50)]
    shown = MetricsPage(lambda: models, "0")
    made, turns = [], []
    shown.add(lambda: made.append(1) or ())  # type: ignore[func-returns-value]

    async def look() -> None:
        while True:
            turns.append(await asyncio.sleep(0))

    looking = asyncio.create_task(look())
    first = asyncio.create_task(shown.page())
    for _ in range(4):
        await asyncio.sleep(0)
    pages = [await first, *await asyncio.gather(*(shown.page() for _ in range(50)))]
    looking.cancel()
    assert len(made) == 2
    assert len(turns) > 10
    assert len({page.partition(b"# HELP nv_cpu_")[0] for page in pages}) == 1
    found = list(text_string_to_metric_families(pages[0].decode()))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    ups = next(one.samples for one in found if one.name == "gpuserve_worker_up")
    assert [one.labels["model"] for one in ups] == [model.model for model in models for _ in range(2)]


def test_each_family_of_hundreds_of_models_is_a_step_of_its_own() -> None:
    models = [loaded("m")]
    rendering = MetricsPage(lambda: models, "0")._rendering(())
    steps = sum(1 for _ in rendering)
    page = asyncio.run(MetricsPage(lambda: models, "0").page())
    of_models, _, _ = page.partition(b"# HELP nv_cpu_")
    assert steps >= len(models) + of_models.count(b"# TYPE") > 50


def loaded(name: str) -> ModelMetrics:
    model = ModelMetrics(name, "1", dict)
    for instance in ("cpu#0", "cpu#1"):
        model.instance(instance)
    return model


def test_a_name_with_odd_characters_is_escaped() -> None:
    model = ModelMetrics('a"b\\c\nd', "1", dict)
    page = asyncio.run(MetricsPage(lambda: [model], "0").page()).decode()
    families = {one.name: one for one in text_string_to_metric_families(page)}
    assert families["nv_inference_count"].samples[0].labels == {"model": 'a"b\\c\nd', "version": "1"}


def test_cpu_and_memory(tmp_path: Path) -> None:
    assert list(CpuMetrics(tmp_path).families()) == [], "a machine that tells nothing"
    assert cpu_time(STAT) == CpuTime(40, 100)
    assert utilization(CpuTime(40, 100), CpuTime(65, 150)) == 0.5
    assert utilization(CpuTime(40, 100), CpuTime(40, 100)) == 0.0
    assert memory_nbytes(MEMINFO) == (1000 * 1024, 600 * 1024)
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    text = prometheus.page(CpuMetrics(tmp_path).families()).decode()
    assert "nv_cpu_utilization 0.4\n" in text
    assert "nv_cpu_memory_total_bytes 1024000\n" in text
    assert "nv_cpu_memory_used_bytes 614400\n" in text
