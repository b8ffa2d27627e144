"""How the runs of a benchmark become ratios, verdicts, tables, JSON and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import SECTIONS, parse
from benchmarks.figures import Goal
from benchmarks.load import GrpcLoad
from benchmarks.payloads import EchoPayload
from benchmarks.report import Report
from benchmarks.request_section import RequestPart, cpu_cell
from benchmarks.rounds import Comparison, Ratio, Sample, Samples
from benchmarks.rows import WITHOUT, Goals, Measure, Row
from benchmarks.servers import SERVERS
from benchmarks.servers.server import Kind

KINDS = {name: server.kind for name, server in SERVERS.items()} | {WITHOUT: Kind.BASELINE}
LOAD = GrpcLoad(EchoPayload(64), 1, 1)
THROUGHPUT = Row(
    "fast",
    "Fast",
    LOAD,
    Measure.THROUGHPUT,
    Goals(Goal(2.0, at_least=True), (("pytriton", Goal(7.0, at_least=True)),)),
)
LATENCY = Row("soon", "Soon", LOAD, Measure.LATENCY, Goals(Goal(0.9)))


def sample(value: float, **by_role: float) -> Sample:
    return Sample(value, value, 0.001, 0.002, sum(by_role.values()), by_role, 0.1)


def comparison(row: Row, failed: str | None = None, **values: list[float]) -> Comparison:
    by_pair = {
        (row.name, name.replace("_", "-")): [sample(one, front=2e-5, worker=1e-5) for one in runs]
        for name, runs in values.items()
    }
    failures = {} if failed is None else {(row.name, failed): "it did not answer"}
    return Comparison(KINDS, Samples(by_pair, failures))


def test_a_ratio_is_taken_inside_each_round() -> None:
    ratio = Ratio.of([10.0, 30.0, 40.0], [10.0, 10.0, 20.0])
    assert (ratio.median, ratio.lowest, ratio.highest) == (2.0, 1.0, 3.0)


def test_a_latency_target_is_met_from_below() -> None:
    assert Goal(0.3).met_by(0.2)
    assert not Goal(0.9, at_least=True).met_by(0.8)


def test_the_best_peer_is_the_one_with_the_best_median_and_never_a_floor() -> None:
    values = {"gpuserve": [9.0], "triton": [5.0], "mlserver": [6.0], "nghttpd": [99.0]}
    assert comparison(THROUGHPUT, **values).best_peer(THROUGHPUT) == "mlserver"
    assert comparison(LATENCY, **values).best_peer(LATENCY) == "triton"
    assert comparison(LATENCY, gpuserve=[9.0], nghttpd=[1.0]).best_peer(LATENCY) is None


def test_a_server_that_failed_in_a_round_is_not_the_best() -> None:
    compared = comparison(THROUGHPUT, failed="triton", gpuserve=[9.0, 9.0], triton=[50.0], mosec=[3.0, 3.0])
    assert compared.best_peer(THROUGHPUT) == "mosec"
    assert compared.ratio(THROUGHPUT, "triton") is None


def test_every_goal_has_a_verdict_and_that_of_the_best_peer_comes_first() -> None:
    compared = comparison(THROUGHPUT, gpuserve=[30.0], triton=[10.0], pytriton=[5.0])
    best, named = compared.verdicts(THROUGHPUT)
    assert (best.against, best.is_best, best.reached) == ("triton", True, True)
    assert (named.against, named.is_best, named.reached) == ("pytriton", False, False)


def test_a_goal_against_a_server_that_was_not_measured_is_open() -> None:
    (best, named) = comparison(THROUGHPUT, gpuserve=[30.0], triton=[10.0]).verdicts(THROUGHPUT)
    assert best.reached
    assert named.reached is None


def test_a_row_with_an_option_is_held_against_this_server_without_it() -> None:
    goals = Goals(Goal(2.0, at_least=True), ((WITHOUT, Goal(0.9, at_least=True)),))
    row = Row("guarded", "Guarded", LOAD, Measure.THROUGHPUT, goals)
    best, without = comparison(row, gpuserve=[30.0], triton=[10.0], without=[40.0]).verdicts(row)
    assert (best.against, best.reached) == ("triton", True)
    assert (without.against, without.is_best, without.reached) == (WITHOUT, False, False)


def test_a_row_without_us_has_no_verdicts() -> None:
    assert comparison(THROUGHPUT, triton=[10.0]).verdicts(THROUGHPUT) == []


def test_a_peer_that_is_named_and_the_best_has_one_line_where_the_goal_is_the_same() -> None:
    row = Row(
        "x",
        "X",
        LOAD,
        Measure.THROUGHPUT,
        Goals(Goal(1.2, at_least=True), (("mosec", Goal(1.2, at_least=True)),)),
    )
    assert len(comparison(row, gpuserve=[3.0], mosec=[2.0]).verdicts(row)) == 1


def test_the_tables_say_which_goals_are_reached() -> None:
    compared = comparison(THROUGHPUT, failed="mosec", gpuserve=[30.0], triton=[10.0], nghttpd=[90.0])
    titles = {name: SERVERS[name].title for name in ("gpuserve", "triton", "nghttpd")}
    text = RequestPart([THROUGHPUT], titles, compared).markdown()
    assert "| Fast (req/s) | 30 | 10 | 90 |" in text
    assert "| Fast | the best peer: Triton 2.51 Python backend | 3.00 (3.00 to 3.00) | ≥ 2 | yes |" in text
    assert "| Fast | pytriton | - | ≥ 7 | not measured |" in text
    assert "floor: nghttpd" in text
    assert "Other processes used 10% of the machine" in text


def test_cpu_time_is_parted_among_the_processes() -> None:
    runs = [sample(1.0, front=2e-5, worker=1e-5, supervisor=0.0) for _ in range(3)]
    assert cpu_cell(runs) == "30 (front 20, worker 10)"
    assert cpu_cell([sample(1.0, front=2e-5)]) == "20"
    assert cpu_cell([]) == "-"


def test_json_has_every_sample_and_the_cpu_time_of_every_process(tmp_path: Path) -> None:
    part = RequestPart(
        [THROUGHPUT], {"gpuserve": "gpuserve"}, comparison(THROUGHPUT, gpuserve=[1.23456, 2.0])
    )
    Report({"CPU": "some"}, 2, 1.0, {"gpuserve": "gpuserve"}, {}, [part]).write_json(tmp_path / "a/out.json")
    row = json.loads((tmp_path / "a/out.json").read_text())["rows"]["fast"]
    assert row["servers"]["gpuserve"]["value"] == [1.235, 2.0]
    assert row["servers"]["gpuserve"]["cpu_s_by_role"] == [{"front": 2e-5, "worker": 1e-5}] * 2


def test_a_failed_row_is_named_in_the_report() -> None:
    part = RequestPart([THROUGHPUT], {"triton": "Triton"}, comparison(THROUGHPUT, failed="triton"))
    report = Report({}, 1, 1.0, {}, {"nghttpd": "nghttpd is not on PATH"}, [part])
    assert report.failures == {"row fast, server triton": "it did not answer"}
    assert "Skipped: nghttpd: nghttpd is not on PATH." in report.markdown()
    assert "| Fast (req/s) | FAILED |" in report.markdown()


def test_the_command_line_takes_the_rows_of_every_section() -> None:
    usual = set(parse([]).rows)
    assert {"starts", "imports", "grpc-64-1"} < usual == {name for one in SECTIONS for name in one.names}
    assert parse(["--rows", "grpc-64-1,starts"]).rows == ("grpc-64-1", "starts")


def test_a_row_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--rows", "grpc-65"])
    assert ended.value.code == 2
    assert "'grpc-65' is not one of imports, starts" in capsys.readouterr().err


def test_kinds_are_those_of_the_servers() -> None:
    assert KINDS["gpuserve"] is Kind.OURS
    assert [name for name, kind in KINDS.items() if kind is Kind.PEER] == [
        "pytriton",
        "triton",
        "mosec",
        "mlserver",
        "litserve",
    ]
