"""The search, the front, the limits, the axes, and the text of the config."""

from __future__ import annotations

import io
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.cli.bench.level_results import LatencySummary
from gpuserve.cli.bench.load_plan import BenchOptionError
from gpuserve.cli.bench.tune.settings_search import (
    Axis,
    LatencyLimit,
    MeasuredPoint,
    Position,
    best_point,
    coordinate_search,
    is_better,
    pareto_front,
    parse_limit,
    parse_requested,
    score_of,
    tunable_axes,
)
from gpuserve.cli.bench.tune.tune_output import config_with_values, print_front
from gpuserve.config.load import load_data
from gpuserve.config.yaml_document import parse

POINTS = st.lists(
    st.builds(MeasuredPoint, st.just(()), st.just(1), st.floats(1, 100), st.floats(1, 100)),
    min_size=1,
    max_size=40,
)


def searched(sizes: list[int], start: Position, hill: Position) -> tuple[Position, list[Position]]:
    """The end of a search over one hill, and what was tried on the way."""
    search = coordinate_search(sizes, start)
    tried = [next(search)]
    try:
        while True:
            distance = sum(abs(at - top) for at, top in zip(tried[-1], hill, strict=True))
            tried.append(search.send(1000.0 * 0.5**distance))
    except StopIteration as end:
        return end.value, tried


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_the_search_finds_a_hill(data: st.DataObject, sizes: list[int]) -> None:
    start = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    hill = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    found, tried = searched(sizes, start, hill)
    assert found == hill
    assert tried[0] == start
    assert len(tried) == len(set(tried))
    assert all(0 <= at < size for one in tried for at, size in zip(one, sizes, strict=True))


def test_noise_is_no_step() -> None:
    nothing = -float("inf")
    steps = [(104.0, 100.0), (1.0, -50.0), (-40.0, -50.0), (-50.0, nothing)]
    noise = [(102.0, 100.0), (-49.5, -50.0), (nothing, nothing)]
    assert all(is_better(new, old) for new, old in steps)
    assert not any(is_better(new, old) for new, old in noise)


@given(POINTS)
def test_the_front_has_what_no_other_beats(points: list[MeasuredPoint]) -> None:
    found = pareto_front(points)
    for one in points:
        beaten = any(
            other.throughput >= one.throughput
            and other.latency_ms <= one.latency_ms
            and (other.throughput, other.latency_ms) != (one.throughput, one.latency_ms)
            for other in points
        )
        same = [(other.throughput, other.latency_ms) == (one.throughput, one.latency_ms) for other in found]
        assert sum(same) == (not beaten)
    assert found == sorted(found, key=lambda one: one.throughput)


@given(POINTS, st.floats(1, 100))
def test_the_best_is_under_the_limit(points: list[MeasuredPoint], most_ms: float) -> None:
    limit = LatencyLimit("p99", most_ms)
    found = best_point(points, limit)
    within = [one.throughput for one in points if one.latency_ms <= most_ms]
    if found is None:
        assert not within
        assert score_of(points, limit) == -min(one.latency_ms for one in points)
    else:
        assert found.throughput == max(within) == score_of(points, limit)
        assert found.latency_ms <= most_ms


def test_limits() -> None:
    summary = LatencySummary(9, 1, 2, 3, 4, 5, 6, 7)
    assert parse_limit("p99=50ms") == LatencyLimit("p99", 50.0)
    assert parse_limit("p99.9=1.5s") == LatencyLimit("p99.9", 1500.0)
    assert parse_limit("mean=200us").figure_of(summary) == 1
    assert [parse_limit(one).is_met(summary) for one in ("p99.9=6ms", "max=6ms")] == [True, False]
    assert LatencyLimit().is_met(summary)
    for text in ("", "p99", "p99=50", "p98=5ms", "p99=-1ms", "50ms"):
        with pytest.raises(BenchOptionError, match="such as p99=50ms, given"):
            parse_limit(text)


def axes_of(
    requested: dict[str, str], counts: list[int], most: int, n_devices: int = 1, **more: Any
) -> dict[str, Axis]:
    """The axes of a model with these options, by their flags."""
    entry = {"name": "m", "callable": "pkg.mod:f", "inputs": [], "outputs": [], **more}
    (model,) = load_data({"models": [entry]}, "config", ".", {}).models
    axes = tunable_axes(model, counts, most, n_devices, parse_requested(requested))
    return {one.option: one for one in axes}


def test_ragged_inputs_have_axes_for_elements_and_one_boundary() -> None:
    tensors = [{"name": "x", "dtype": "float32", "shape": [-1], "ragged": True}]
    ragged = {"inputs": tensors, "outputs": tensors, "batching": {"max_batch_elements": 400}}
    axes = axes_of({}, [1], 1, max_batch_size=8, **ragged)
    assert axes["--batch-elements"].values == (100, 200, 400, 800, 1600)
    boundaries = axes["--bucket-boundaries"]
    assert [boundaries.setting(one) for one in boundaries.values[:3]] == [[], [32], [64]]
    requested = {"bucket_boundaries": "7,70"}
    assert axes_of(requested, [1], 1, max_batch_size=8, **ragged)["--bucket-boundaries"].values == (7, 70)
    assert "--batch-elements" not in axes_of(requested, [1], 1, max_batch_size=8)


def test_axes_are_around_the_files_values_unless_they_are_named() -> None:
    axes = axes_of({}, [3], 4, max_batch_size=8, batching={"max_queue_delay_us": 300})
    assert {name: one.values for name, one in axes.items()} == {
        "--max-batch-sizes": (2, 4, 8, 16, 32),
        "--delays-us": (0, 100, 300, 500, 1000, 2000, 5000),
        "--instances": (1, 2, 3, 4),
        "--prefetch": (0, 1, 2),
    }
    assert axes["--delays-us"].start == 300
    named = {"max_batch_sizes": "16,2,1", "delays_us": "0", "instances": "2", "prefetch": "0"}
    axes = axes_of(named, [1], 4, 2, max_batch_size=8)
    found = {name: (one.values, one.start) for name, one in axes.items()}
    assert found == {"--max-batch-sizes": ((2, 16), 8), "--instances": ((2,), 1)}
    assert [*axes_of({}, [1, 1], 2)] == ["--prefetch"], "no batches, and several devices"
    for text in ("", "a", "1,-2", "1.5"):
        with pytest.raises(BenchOptionError, match="--delays-us: expected whole numbers") as raised:
            parse_requested({"delays_us": text})
        assert raised.value.option == "--delays-us"


CONFIG = """\
# head
server: {http_port: 8000}
models:
  # the model
  - name: m   # its name
    callable: "pkg.mod:f"
    max_batch_size: 8  # rows
    inputs: [{name: x, dtype: FP32, shape: [-1]}]
"""


def test_comments_stay() -> None:
    path = ("models", 0)
    assert config_with_values(CONFIG, {}) == CONFIG
    changed = config_with_values(CONFIG, {(*path, "max_batch_size"): 4})
    assert changed == CONFIG.replace("max_batch_size: 8", "max_batch_size: 4")
    values = {(*path, "batching", "max_queue_delay_us"): 5, (*path, "instances", 0, "count"): 2}
    added = config_with_values(CONFIG, values)
    assert added.startswith(CONFIG)
    entry = parse(added).data["models"][0]
    assert (entry["batching"], entry["instances"]) == ({"max_queue_delay_us": 5}, [{"count": 2}])


def test_json_is_changed_too_and_a_number_of_instances_becomes_a_list() -> None:
    text = '{"models": [{"name": "m", "max_batch_size": 8}]}'
    assert '"max_batch_size": 4' in config_with_values(text, {("models", 0, "max_batch_size"): 4})
    text = "models:\n  - name: m\n    instances: 2  # on the CPU\n"
    changed = config_with_values(text, {("models", 0, "instances", 0, "count"): 4})
    assert yaml.safe_load(changed) == {"models": [{"name": "m", "instances": [{"count": 4}]}]}


def test_each_trial_has_a_row_in_the_last_table() -> None:
    axes = [Axis("--prefetch", ("prefetch",), (0, 1, 2), 0)]
    figures = ((100.0, 5.0), (90.0, 6.0), (80.0, 99.0))
    points = [MeasuredPoint((number,), 1, *one) for number, one in enumerate(figures)]
    stream = io.StringIO()
    print_front("m", axes, points, LatencyLimit("p99", 50.0), stream)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in stream.getvalue().splitlines()[4:]]
    assert [(row[0], row[-1]) for row in rows] == [("0", "best"), ("1", ""), ("2", "over the limit")]
