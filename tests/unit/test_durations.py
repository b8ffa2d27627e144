"""Lengths of time: in a file, in a variable, by a program and on a command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.cli.app import run
from gpuserve.config.load import load_data
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.options import (
    DURATION_PATTERN,
    MICROSECONDS,
    NBYTES,
    declared,
    parse_duration,
    quantity_pattern,
)

MODEL = {"name": "m", "callable": "pkg.mod:f", "inputs": [], "outputs": [], "max_batch_size": 4}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("90", 90), ("1.5", 1.5), ("10s", 10), ("10m", 600), ("10min", 600), ("2h", 7200), ("1d", 86400)],
        *[("500ms", 0.5), ("200us", 0.0002), ("1m30s", 90), ("1h 30m", 5400), ("0", 0), ("0.5 s", 0.5)],
    ],
)
def test_forms(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
    assert parse_duration(text, MICROSECONDS) == pytest.approx(
        seconds if text[-1].isdigit() else seconds * 1e6
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), ("7B", 7), ("500MB", 500_000_000), ("1.5 GiB", 3 << 29), ("20GiB", 20 << 30), ("2kB", 2000)],
)
def test_sizes_have_units_as_well(text: str, nbytes: int) -> None:
    data = {"server": {"max_arena_nbytes": text, "memory": {"host": text}}, "models": [MODEL]}
    settings = load_data(data, "c.yaml", ".", {}).settings
    assert settings.max_arena_nbytes == settings.memory.host == nbytes
    assert re.search(quantity_pattern(NBYTES), text)


@pytest.mark.parametrize("text", ["", "GiB", "-1B", "1 gib", "1GB 2", "many"])
def test_other_sizes_are_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigProblems, match="a whole number of bytes or a size such as 500MB or 20GiB"):
        load_data({"server": {"memory": {"cuda": text}}, "models": [MODEL]}, "c.yaml", ".", {})
    assert re.search(quantity_pattern(NBYTES), text) is None


def test_a_model_on_demand_that_is_larger_than_the_budget_is_refused() -> None:
    tensors = [{"name": "x", "dtype": "float32", "shape": [1]}]
    model = {**MODEL, "inputs": tensors, "outputs": tensors, "on_demand": True, "memory_nbytes": "3GiB"}
    data = {"server": {"memory": {"host": "2GiB"}}, "models": [model]}
    idle = {**model, "on_demand": False, "idle_timeout_s": 9}
    with pytest.raises(ConfigProblems, match="idle_timeout_s has no effect without on_demand: true"):
        load_data({"models": [idle]}, "c.yaml", ".", {})
    with pytest.raises(ConfigProblems, match=r"'m' takes 3221225472 bytes on cpu .* allows 2147483648"):
        load_data(data, "c.yaml", ".", {})


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "10 minutes", "soon", "1e3", "10s 5", "1..5s", "\u0662s", "inf"]
)
def test_other_forms_are_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"such as 500ms, 10s, 1m30s or 2h, given {text!r}")):
        parse_duration(text)


@given(st.text(alphabet="0123456789. smhdinu", max_size=12))
def test_the_schema_knows_just_what_is_read(text: str) -> None:
    try:
        parse_duration(text)
    except ValueError:
        assert re.search(DURATION_PATTERN, text) is None
    else:
        assert re.search(DURATION_PATTERN, text)


def test_a_file_and_a_variable_have_them_for_seconds_and_for_microseconds() -> None:
    data = {
        "server": {"drain_timeout_s": "10m", "lame_duck_s": 3},
        "models": [{**MODEL, "batching": {"max_queue_delay_us": "2ms"}}],
    }
    made = load_data(data, "c.yaml", ".", {"GPUSERVE_SERVER__IDLE_TIMEOUT_S": "2h"})
    assert (made.settings.drain_timeout_s, made.settings.lame_duck_s) == (600, 3)
    assert (made.settings.idle_timeout_s, made.models[0].batching.max_queue_delay_us) == (7200, 2000)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("drain_timeout_s", "10 minutes", "expected a number of seconds or a time such as 500ms, 10s"),
        ("body_grace_s", "500ms", "expected a number of at least 1, given the string '500ms'"),
        ("max_output_lines_per_s", "10s", "expected an integer of at least 0, given the string '10s'"),
    ],
)
def test_what_is_wrong_is_said_as_it_was_written(key: str, value: str, told: str) -> None:
    with pytest.raises(ConfigProblems, match=re.escape(told)):
        load_data({"server": {key: value}, "models": [MODEL]}, "c.yaml", ".", {})


def test_a_program_may_say_them_too() -> None:
    settings = declared(ServerSettings, {"drain_timeout_s": "10m"})
    assert settings.drain_timeout_s == 600
    with pytest.raises(ValueError, match="drain_timeout_s must be a number of seconds or a time such"):
        declared(ServerSettings, {"drain_timeout_s": "soon"})


@pytest.mark.parametrize(
    "line",
    [
        ["bench", "m", "--duration", "soon"],
        ["bench", "m", "--timeout", "soon"],
        ["drain", "--timeout", "soon"],
        ["tune", "c.yaml", "--time-budget", "soon"],
    ],
)
def test_flags_say_what_they_take(line: list[str], capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(line) == 2
    assert "expected a number of seconds or a time such as 500ms, 10s, 1m30s or 2h, given 'soon'" in (
        capsys.readouterr().err
    )
