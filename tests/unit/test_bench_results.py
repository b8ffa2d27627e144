"""From counted durations to figures, warnings and reports."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserve.cli.bench.bench_report import (
    BenchReport,
    fit_table,
    report_from_json,
    report_notes,
    report_table,
    report_to_json,
)
from gpuserve.cli.bench.level_results import (
    LatencyHistogram,
    LevelResult,
    LevelTally,
    Window,
    is_stable,
    percentile_curve,
)
from gpuserve.cli.bench.load_generator import CallCounts, count_durations
from gpuserve.cli.bench.load_plan import BenchOptionError, LoadKind, LoadLevel
from gpuserve.cli.bench.report_output import check_output, csv_text, markdown_text
from gpuserve.cli.bench.server_control import ServerTime, ServerTotals, parse_statistics, server_time_between

CLOSED = LoadLevel(LoadKind.CONCURRENCY, 8)
OPEN = LoadLevel(LoadKind.RATE, 100)


def interval(*latencies_s: float, **more: object) -> CallCounts:
    fields: dict[str, object] = {
        "duration_s": 2.0,
        "cpu_s": 0.2,
        "sent": len(latencies_s),
        "completed": len(latencies_s),
        "responses": len(latencies_s),
        "latencies": count_durations(latencies_s),
    }
    return CallCounts(**{**fields, **more})  # type: ignore[arg-type]


def result(
    level: LoadLevel = CLOSED, *intervals: CallCounts, server: ServerTime | None = None
) -> LevelResult:
    tally = LevelTally()
    for process, one in enumerate(intervals or (interval(0.001, 0.002, 0.003),)):
        tally.add(process, one)
    return tally.result(level, server)


def report(*levels: LevelResult, **more: object) -> BenchReport:
    fields = {"model": "echo", "url": "grpc://h:1", "began_at": "now", "gpuserve": "0", "cores": 2}
    return BenchReport(**fields, settings={"data": "random"}, levels=levels, **more)  # type: ignore[arg-type]


@pytest.mark.thorough
@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(1e-6, 100), min_size=1, max_size=300))
def test_percentiles_are_those_of_the_values(latencies_s: list[float]) -> None:
    found = LatencyHistogram()
    found.add(count_durations(latencies_s))
    summary = found.summary()
    ordered = sorted(latencies_s)
    assert summary.count == len(ordered)
    for percentile, value in ((50, summary.p50_ms), (99, summary.p99_ms), (100, summary.max_ms)):
        rank = max(1, -(-percentile * len(ordered) // 100))
        assert value == pytest.approx(1000 * ordered[rank - 1], rel=0.003)


def test_processes_are_added_up() -> None:
    one = interval(0.001, 0.001, cpu_s=1.0)
    other = interval(0.003, 0.003, 0.003, 0.003, cpu_s=1.9, lags=count_durations([0.5]))
    found = result(CLOSED, one, other)
    assert found.throughput == pytest.approx(3.0)
    assert (found.completed, found.latency.count) == (6, 6)
    assert found.latency.max_ms == pytest.approx(3.0, rel=0.002)
    assert found.client_cpu == pytest.approx(0.95)
    assert len(found.warnings) == 1
    assert "may limit the results" in found.warnings[0]


def test_warnings_of_an_open_loop() -> None:
    late = interval(*[0.001] * 9, lags=count_durations([0.01] * 9), waited=count_durations([5.0, 6.0]))
    found = result(OPEN, late)
    assert [text.split(" ")[0] for text in found.warnings] == ["of", "1", "2"]
    assert found.unanswered == 2
    assert found.latency.max_ms == pytest.approx(6000, rel=0.002)
    assert result(OPEN, interval(*[0.001] * 200)).warnings == ()


def test_failures_are_counted_by_kind() -> None:
    second = interval(failures={"A": (1, "other"), "B": (1, "")})
    found = result(CLOSED, interval(failures={"A": (2, "first")}), second)
    assert (found.failures, found.failed) == ({"A": (3, "first"), "B": (1, "")}, 4)
    assert "8 in flight: 3 times A (first)" in report_notes(report(found))


def test_stability() -> None:
    same = Window(100, 1, 5)
    assert not is_stable([same, same])
    assert is_stable([Window(1, 9, 9), same, same, same])
    assert is_stable([same, Window(104, 1.02, 5.2), same])
    assert not is_stable([same, same, Window(100, 1, 9)])
    assert not is_stable([Window(0, 0, 0)] * 3)


def test_the_servers_time_is_the_difference() -> None:
    before = ServerTotals(10, 100, 100, 100, 100, 10, 0, 10, 10)
    statistics = {
        "inference_stats": {
            "success": {"count": "14", "ns": "1"},
            "queue": {"count": 14, "ns": 8_000_100},
            "compute_input": {"count": 14, "ns": 4_000_100},
            "compute_infer": {"count": 14, "ns": 2_000_100},
            "compute_output": {"count": 14, "ns": 100},
        },
        "inference_count": "18",
        "execution_count": 12,
    }
    found = server_time_between(before, parse_statistics(statistics))
    assert found == ServerTime(4, 2.0, 1.0, 0.5, 0.0, 2, 4.0, 0)
    assert server_time_between(before, before) is None
    assert server_time_between(None, before) is None
    assert server_time_between(parse_statistics(statistics), before) is None


def test_a_report_is_kept_and_read_again() -> None:
    server = ServerTime(4, 2.0, 1.0, 0.5, 0.0, 2, 4.0, 0)
    made = report(result(server=server), result(OPEN, interval(0.1, failures={"A": (1, "x")})))
    assert report_from_json(report_to_json(made)) == made


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "gpuserve bench 1"}', '{"format": "x"}'])
def test_what_is_no_report(text: str) -> None:
    with pytest.raises(BenchOptionError, match=r"expected a \.json report"):
        report_from_json(text)


def test_ratios_to_a_baseline() -> None:
    old = report(result())
    new = report(replace(result(), throughput=3.0), result(OPEN))
    titles, rows = report_table(new, old)
    ratios = [titles.index(title) for title in ("req/s ratio", "p50 ratio", "p99 ratio")]
    assert [titles[at - 1] for at in ratios] == ["req/s", "p50 ms", "p99 ms"]
    assert [[row[at] for at in ratios] for row in rows] == [["2.00", "1.00", "1.00"], ["", "", ""]]
    assert "req/s ratio" not in report_table(new, None).titles
    assert report_notes(new, old) == report_notes(new)


def test_a_baseline_of_other_levels_is_said_to_be_of_no_use() -> None:
    (told, *_) = report_notes(report(result()), report(result(OPEN)))
    assert told.startswith("there are no ratios: the baseline has no level in common with this run, only ")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 1000])
def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers(width: int) -> None:
    whole = report_table(report(result(), result(OPEN)), report(result()))
    made, gone = fit_table(whole, width)
    widest = [max(map(len, column)) for column in zip(made.titles, *made.rows, strict=True)]
    assert sum(widest) + 2 * (len(widest) - 1) <= width
    assert {*made.titles, *gone} == {*whole.titles}
    assert {"load", "req/s", "p50 ms", "p99 ms", "req/s ratio", "p99 ratio"} <= {*made.titles}
    assert gone == [] or width < 1000
    for row, whole_row in zip(made.rows, whole.rows, strict=True):
        assert [whole_row[whole.titles.index(title)] for title in made.titles] == row


def test_markdown_and_csv() -> None:
    streams = result(CLOSED, interval(0.1, first=count_durations([0.01]), gaps=count_durations([0.02])))
    made = report(streams, interrupted=True)
    text = markdown_text(made, None)
    assert text.startswith("# echo\n\ngrpc://h:1, now")
    assert "| first p50 ms |" in text
    assert "- the run was interrupted" in text
    (row,) = csv.DictReader(io.StringIO(csv_text(made, None)))
    assert float(row["concurrency"]) == 8
    assert float(row["latency_p99_ms"]) == pytest.approx(100, rel=0.002)
    assert row["failed"] == "0"
    assert json.loads(report_to_json(made))["interrupted"] is True


@pytest.mark.thorough
def test_a_page_fetches_nothing_and_escapes() -> None:
    made = replace(report(result(), result(replace(CLOSED, value=16))), model="<script>")
    program = (
        "import sys; from gpuserve.cli.bench.report_output import html_page; "
        "from gpuserve.cli.bench.bench_report import report_from_json; "
        "print(html_page(report_from_json(sys.stdin.read()), None))"
    )  # in a process of its own: matplotlib keeps its fonts open
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=report_to_json(made),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text = done.stdout
    assert text.count("<svg") == 3
    assert "<script" not in text
    assert 'src="' not in text


def test_a_curve_goes_up_to_the_last_percentiles() -> None:
    curve = percentile_curve(result().histogram)
    assert [at for at, _ in curve] == sorted(at for at, _ in curve)
    assert curve[0] == (0.0, pytest.approx(1.0, rel=0.002))
    assert curve[-1][1] == pytest.approx(3.0, rel=0.002)


def test_outputs_are_checked_before_the_run() -> None:
    check_output("report.html")
    for path, said in (("report.pdf", "ends in .md, .csv"), ("absent/report.md", "no folder 'absent'")):
        with pytest.raises(BenchOptionError, match=said):
            check_output(path)
