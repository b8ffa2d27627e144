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

COUNTERS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
}
CACHE_COUNTERS = {
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
    "nv_cache_hit_duration_per_model",
    "nv_cache_miss_duration_per_model",
}
GAUGES = {"nv_inference_pending_request_count", "nv_model_load_duration_secs"}
PARTS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
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


def test_names_types_and_labels() -> None:
    text = lines(metrics())
    types = dict(line.split()[2:] for line in text if line.startswith("# TYPE"))
    assert types == dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    names = {line.split("{")[0] for line in text if not line.startswith("#")}
    assert names == set(types), "the sample of a counter has no _total"
    assert 'nv_inference_request_success{model="m",version="1"} 1' in text
    assert 'nv_inference_count{model="m",version="1"} 2' in text
    assert 'nv_inference_exec_count{model="m",version="1"} 1' in text
    assert 'nv_inference_compute_infer_duration_us{model="m",version="1"} 2' in text
    assert 'nv_inference_pending_request_count{model="m",version="1"} 3.0' in text
    assert 'nv_model_load_duration_secs{model="m",version="1"} 1.5' in text


def test_the_help_that_boards_show() -> None:
    text = lines(metrics())
    for line in (
        "nv_inference_request_success Number of successful inference requests, all batch sizes",
        "nv_inference_request_failure Number of failed inference requests, all batch sizes",
        "nv_inference_count Number of inferences performed (does not include cached requests)",
        "nv_inference_exec_count Number of model executions performed (does not include cached requests)",
        "nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes "
        "cached requests)",
    ):
        assert f"# HELP {line}" in text


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
    assert 'nv_cache_num_misses_per_model{model="m",version="1"} 1' in text
    found = [line for line in text if line.startswith("nv_cache_miss_summary_per_model")]
    assert found[0] == 'nv_cache_miss_summary_per_model{model="m",quantile="0.5",version="1"} 5.0'
    assert found[-2:] == [
        'nv_cache_miss_summary_per_model_count{model="m",version="1"} 1',
        'nv_cache_miss_summary_per_model_sum{model="m",version="1"} 5',
    ]


def test_summaries_only_where_there_is_a_window() -> None:
    assert not [line for line in lines(metrics()) if "summary" in line]
    text = lines(metrics(LatencyWindow()))
    for part in PARTS:
        name = f"nv_inference_{part}_summary_us"
        assert f"# TYPE {name} summary" in text
        assert f'{name}_count{{model="m",version="1"}} 1' in text
    quantiles = [line for line in text if line.startswith("nv_inference_compute_infer_summary_us{")]
    assert quantiles == [
        f'nv_inference_compute_infer_summary_us{{model="m",quantile="{quantile}",version="1"}} 2.0'
        for quantile in (0.5, 0.9, 0.95, 0.99, 0.999)
    ]


def test_an_empty_window_is_not_a_number() -> None:
    model = ModelMetrics("m", "1", dict, LatencyWindow())
    text = lines(model)
    assert 'nv_inference_queue_summary_us{model="m",quantile="0.5",version="1"} NaN' in text


def test_the_first_responses_of_decoupled_models() -> None:
    model = metrics()
    assert not [line for line in lines(model) if "first_response" in line]
    model.statistics.responded(0, ResponseFate.SUCCESS, 0.2, 0.0)
    model.first_response.observe(200.0)
    name = "nv_inference_first_response_histogram_ms"
    found = [line for line in lines(model) if line.startswith(name)]
    assert found == [
        *[
            f'{name}_bucket{{le="{bound}",model="m",version="1"}} {count}'
            for bound, count in (("100", 0), ("500", 1), ("2000", 1), ("5000", 1), ("+Inf", 1))
        ],
        f'{name}_count{{model="m",version="1"}} 1',
        f'{name}_sum{{model="m",version="1"}} 200.0',
    ]


def test_a_page_of_many_models_lets_others_have_their_turn() -> None:
    """All who ask while a page is made share the next one."""
    models = [loaded(f"m{number}") for number in range(50)]
    shown = MetricsPage(lambda: models, "0")
    made, turns = [], []
    shown.add(lambda: made.append(1) or ())  # type: ignore[func-returns-value]

    async def look() -> None:
        while True:
            turns.append(await asyncio.sleep(0))

    async def scrape() -> list[bytes]:
        looking = asyncio.create_task(look())
        first = asyncio.create_task(shown.page())
        for _ in range(4):
            await asyncio.sleep(0)
        pages = [await first, *await asyncio.gather(*(shown.page() for _ in range(50)))]
        looking.cancel()
        return pages

    pages = asyncio.run(scrape())
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


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert list(CpuMetrics(tmp_path).families()) == []
