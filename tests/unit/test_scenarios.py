"""The pure parts of the benchmark's scenarios: arrivals, the ideal server, figures, the open-loop client."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import Figure, Goal, percentile, slope
from benchmarks.peers import PeerCache
from benchmarks.scenarios import command
from benchmarks.scenarios.command import ScenarioReport, markdown, write_json
from benchmarks.scenarios.ideal import capacity_hz, ideal_latencies
from benchmarks.scenarios.loads import periodic, poisson
from benchmarks.scenarios.scenario import DeployedGpuServe, DeployedTriton, Effort, SleepingModel
from benchmarks.servers.server import Ports
from benchmarks.wire_clients import Calls, ClientFailed
from gpuserve.bench import http2_client as http2

ARRIVALS = st.lists(st.floats(0, 2), min_size=1, max_size=80).map(sorted)


# ---- the ideal server ---------------------------------------------------------------------


def test_the_ideal_server_takes_a_lone_request_at_once() -> None:
    assert ideal_latencies([1.0, 2.0], 1, 0.5, 32) == [0.5, 0.5]


def test_the_ideal_server_takes_what_waits_when_it_is_free_in_one_batch() -> None:
    assert ideal_latencies([0.0, 0.25, 0.5, 0.75], 1, 1.0, 32) == [1.0, 1.75, 1.5, 1.25]


def test_an_arrival_at_the_moment_of_the_batch_goes_along() -> None:
    assert ideal_latencies([0.0, 1.0, 1.0], 1, 1.0, 32) == [1.0, 1.0, 1.0]


def test_a_batch_of_the_ideal_server_has_at_most_so_many_rows() -> None:
    assert ideal_latencies([0.0] * 5, 1, 1.0, 2) == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_instances_of_the_ideal_server_share_one_queue() -> None:
    assert ideal_latencies([0.0, 0.5, 0.75], 2, 1.0, 1) == [1.0, 1.0, 1.25]


def test_an_ideal_server_without_instances_is_refused() -> None:
    with pytest.raises(ValueError, match="0 instances"):
        ideal_latencies([0.0], 0, 1.0, 1)


@given(ARRIVALS, st.integers(1, 4), st.integers(1, 8))
def test_the_ideal_server_is_first_come_first_served_and_never_faster_than_a_batch(
    arrivals: list[float], instances: int, max_rows: int
) -> None:
    latencies = ideal_latencies(arrivals, instances, 0.125, max_rows)
    ends = [at + latency for at, latency in zip(arrivals, latencies, strict=True)]
    assert all(latency >= 0.125 - 1e-9 for latency in latencies)
    assert all(first <= second + 1e-9 for first, second in itertools.pairwise(ends))


@given(ARRIVALS, st.integers(1, 4), st.integers(1, 8))
def test_the_ideal_server_keeps_to_its_capacity(arrivals: list[float], instances: int, max_rows: int) -> None:
    latencies = ideal_latencies(arrivals, instances, 0.125, max_rows)
    ends = sorted(at + latency for at, latency in zip(arrivals, latencies, strict=True))
    at_once = instances * max_rows
    for first, later in zip(ends, ends[at_once:], strict=False):
        assert later >= first + 0.125 - 1e-9, "more rows ended within one batch time than there is room for"


def test_capacity_is_rows_of_all_instances() -> None:
    assert capacity_hz(2, 0.005, 32) == pytest.approx(12_800)


# ---- arrivals -----------------------------------------------------------------------------


def test_poisson_arrivals_are_those_of_their_seed() -> None:
    one, same, other = (poisson(1000, 2.0, 8, seed) for seed in (1, 1, 2))
    assert one == same
    assert one.at_s != other.at_s
    assert len(one.at_s) == pytest.approx(2000, rel=0.1)
    assert one.connections == 8
    assert list(one.at_s) == sorted(one.at_s)


def test_periodic_arrivals_are_even_on_each_connection() -> None:
    schedule = periodic(2.0, 3.0, 5, 1)
    assert len(schedule.at_s) == 5 * 6
    for connection in range(5):
        mine = [at for at, its in zip(schedule.at_s, schedule.connection, strict=True) if its == connection]
        assert [b - a for a, b in itertools.pairwise(mine)] == pytest.approx([0.5] * 5)


# ---- figures ------------------------------------------------------------------------------


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0], 99) == 3.0


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_slope_is_that_of_the_nearest_line() -> None:
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope([0, 1, 2, 3], [1, 0, 0, 1]) == pytest.approx(0)


def test_one_point_has_no_slope() -> None:
    with pytest.raises(ValueError, match="two positions"):
        slope([1.0], [1.0])


def test_a_goal_is_at_most_or_at_least() -> None:
    assert Goal(1.15).met_by(1.15)
    assert not Goal(1.15).met_by(1.16)
    assert Goal(0.95, at_least=True).met_by(0.96)
    assert not Goal(0.95, at_least=True).met_by(0.94)


# ---- the open-loop client -----------------------------------------------------------------

ANSWER = b"\0\0\0\0\2ok"


def answer(stream: int, body: bytes = ANSWER) -> bytes:
    frames = [(http2.HEADERS, 4, b"h"), (http2.DATA, 0, body), (http2.HEADERS, 5, b"t")]
    return b"".join(http2.frame(kind, flags, stream, payload) for kind, flags, payload in frames)


def calls(request_nbytes: int = 10) -> Calls:
    return Calls("/m", bytes(request_nbytes), ANSWER)


def test_a_call_is_opened_on_a_stream_of_its_own_and_told_by_its_number() -> None:
    one = calls()
    first, second = one.ask(70), one.ask(71)
    assert [int.from_bytes(sent[5:9]) for sent in (first, second)] == [1, 3]
    assert first.endswith(http2.frame(http2.DATA, http2.END_STREAM, 1, bytes(10)))
    assert one.take(answer(3)) == ([(71, True)], b"")
    assert one.take(answer(1)) == ([(70, True)], b"")


def test_a_call_may_have_more_headers() -> None:
    sent = Calls("/m", b"", ANSWER, ["grpc-timeout:100000u"]).ask(1)
    assert http2.header_block([("grpc-timeout", "100000u")]) in sent


def test_answers_may_come_in_pieces() -> None:
    one = calls()
    one.ask(5)
    ended = [number for byte in answer(1) for number in one.take(bytes((byte,)))[0]]
    assert ended == [(5, True)]


def test_a_wrong_answer_is_an_error() -> None:
    one = calls()
    one.ask(5)
    with pytest.raises(ClientFailed, match="an answer of 7 bytes is not the right one"):
        one.take(answer(1, b"\0\0\0\0\2no"))


def test_a_call_that_ends_without_a_body_was_refused() -> None:
    one = calls()
    one.ask(5)
    assert one.take(http2.frame(http2.HEADERS, 5, 1, b"t")) == ([(5, False)], b"")


def test_what_flow_control_holds_back_goes_with_the_next_window() -> None:
    one = calls(request_nbytes=40_000)
    assert one.ask(1)
    assert one.ask(2) == b""
    _, owed = one.take(http2.frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">I", 40_000)))
    assert owed.endswith(http2.frame(http2.DATA, http2.END_STREAM, 3, bytes(40_000)))


def test_settings_and_pings_are_answered() -> None:
    _, owed = calls().take(
        http2.frame(http2.SETTINGS, 0, 0, b"") + http2.frame(http2.PING, 0, 0, b"12345678")
    )
    acknowledged = http2.frame(http2.PING, http2.ACK, 0, b"12345678")
    assert owed == http2.frame(http2.SETTINGS, http2.ACK, 0, b"") + acknowledged


def test_a_call_that_is_reset_was_refused() -> None:
    one = calls()
    one.ask(5)
    assert one.take(http2.frame(http2.RESET, 0, 1, b"\0\0\0\7")) == ([(5, False)], b"")


def test_a_server_that_goes_away_is_an_error() -> None:
    with pytest.raises(ClientFailed, match="GOAWAY"):
        calls().take(http2.frame(http2.GOAWAY, 0, 0, bytes(8)))


# ---- deployments, report, command line ----------------------------------------------------


def cache(folder: Path) -> PeerCache:
    return PeerCache(folder, Path("/usr/bin/python3"))


def test_this_server_is_told_the_models_by_a_file(tmp_path: Path) -> None:
    server = DeployedGpuServe(cache(tmp_path), [SleepingModel("sleep", 0.005, 4)], tmp_path)
    words = server.command(Ports(1, 2, 3), ["sleep"])
    (entry,) = json.loads((tmp_path / "config.yaml").read_text())["models"]
    assert str(tmp_path / "config.yaml") in words
    assert (entry["instances"], entry["kwargs"]) == ([{"device": "cpu", "count": 4}], {"seconds": 0.005})


def test_this_server_is_told_of_fairness(tmp_path: Path) -> None:
    models = [SleepingModel("fair", 0.005, fairness_header="x-client"), SleepingModel("not", 0.005)]
    DeployedGpuServe(cache(tmp_path), models, tmp_path).command(Ports(1, 2, 3), [])
    fair, unfair = json.loads((tmp_path / "config.yaml").read_text())["models"]
    assert fair["queue"] == {"fairness": "client", "fairness_header": "x-client"}
    assert "queue" not in unfair


def test_triton_is_told_the_models_by_a_repository(tmp_path: Path) -> None:
    server = DeployedTriton(cache(tmp_path), [SleepingModel("sleep", 0.005, 4)], tmp_path)
    words = server.command(Ports(1, 2, 3), ["sleep"])
    config = (tmp_path / "repository/sleep/config.pbtxt").read_text()
    assert f"--model-repository={tmp_path / 'repository'}" in words
    assert "--load-model=sleep" in words
    assert "count: 4" in config
    assert 'string_value: "0.005"' in config
    assert (tmp_path / "repository/sleep/1/model.py").exists()


def report() -> ScenarioReport:
    scenario = command.SCENARIOS[0]
    figure = Figure("one case", "times the ideal", (1.1, 1.3, 1.2), Goal(1.15), {"p99 ms": (9.0, 11.0, 10.0)})
    found = {scenario.name: {"gpuserve": [figure]}}
    return ScenarioReport(
        {"CPU": "some"}, Effort(3, 10.0, 1), [scenario], found, skipped={"tail, triton": "no"}
    )


def test_the_table_has_the_median_its_range_and_whether_it_is_enough() -> None:
    text = markdown(report())
    assert "| one case (times the ideal) | 1.2 (1.1 to 1.3) | ≤ 1.15 | **no** | 10 |" in text
    assert "Skipped: tail, triton: no." in text


def test_the_document_has_every_sample(tmp_path: Path) -> None:
    write_json(report(), tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    (figure,) = document["scenarios"]["tail"]["servers"]["gpuserve"]
    assert figure["samples"] == [1.1, 1.3, 1.2]
    assert figure["reached"] is False


def test_the_command_line_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse(["tails"])
    assert ended.value.code == 2
    assert "'tails' is not one of tail, scaling" in capsys.readouterr().err


def test_all_scenarios_are_run_where_none_is_named() -> None:
    assert command.parse([]).scenarios == tuple(one.name for one in command.SCENARIOS)
    assert command.parse(["tail,endurance"]).scenarios == ("tail", "endurance")


def test_real_time_is_asked_for() -> None:
    assert not command.parse(["tail"]).real_time
    assert command.parse(["tail", "--real-time"]).real_time
