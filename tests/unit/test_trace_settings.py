"""Trace settings of a file and of clients: read, merged, taken back and refused; what is sampled by them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.cli.exit_codes import ExitCode
from gpuserve.config.load import load_file
from gpuserve.config.precedence import from_text
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.settings.checks import check_trace
from gpuserve.config.settings.server import ServerSettings, TraceSettings
from gpuserve.core.errors import ConfigError, InvalidArgument, Unimplemented
from gpuserve.front.observability.tracing.request_trace import TraceParent
from gpuserve.front.observability.tracing.trace_settings import (
    Sampler,
    TraceScopes,
    TraceValues,
    described,
    read_changes,
)
from gpuserve.front.requests import admin_codec
from gpuserve.front.service.inference_service import inference_service

START = TraceSettings(file="t.json")
INITIAL = {"trace_level": ["OFF"], "trace_rate": ["1000"], "trace_count": ["-1"], "log_frequency": ["0"]}
INITIAL |= {"trace_file": ["t.json"], "trace_mode": ["triton"]}


class Settings:
    """Scopes, as a client sees them."""

    def __init__(self, start: TraceSettings = START) -> None:
        self.scopes = TraceScopes(start)

    def update(self, model: str = "", **changes: Any) -> dict[str, list[str]]:
        self.scopes.update(model, read_changes(changes))
        return self.of(model)

    def of(self, model: str = "") -> dict[str, list[str]]:
        return described(self.scopes.values(model), self.scopes.start)


def test_the_settings_of_the_start_in_their_order() -> None:
    assert list(Settings().of().items()) == list(INITIAL.items())
    assert Settings().of("m") == INITIAL
    start = TraceSettings(mode="opentelemetry", url="http://c", resource={"a": "b", "c": "d"})
    own = [("trace_mode", ["opentelemetry"]), ("url", ["http://c"]), ("resource", ["a=b,c=d"])]
    assert list(Settings(start).of().items())[3:] == own


def test_what_is_not_named_stays_and_what_is_taken_back_falls_to_the_left() -> None:
    settings = Settings()
    settings.update(trace_rate=["5"], log_frequency=["7"])
    assert settings.of() == INITIAL | {"trace_rate": ["5"], "log_frequency": ["7"]}
    settings.update("m", trace_level=["TIMESTAMPS", "TENSORS"], trace_rate=["2"])
    assert settings.of("m") == settings.of() | {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["2"]}
    settings.update(log_frequency=["9"])  # of the server, and so of the model
    assert settings.of("m")["log_frequency"] == ["9"]
    settings.update("m", trace_rate=None)
    assert settings.of("m")["trace_rate"] == ["5"]
    settings.update("m", trace_level=None)
    assert not settings.scopes.is_own("m")
    settings.update(trace_rate=None, log_frequency=None)
    assert settings.of("m") == settings.of() == INITIAL


UNREADABLE = "Unable to parse 'trace_{}', "
RANGE = UNREADABLE + "value is out of range [ {}, {} ], got: {}"
FILE = "trace file location can not be updated through network protocol"
INVALID = "Attempting to set invalid trace setting :sample rate must be non-zero"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trace_file": ["x"]}, FILE),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": ["often"]}, UNREADABLE.format("rate") + "got: often"),
        ({"trace_rate": ["4294967296"]}, RANGE.format("rate", 0, 4294967295, 4294967296)),
        ({"trace_rate": ["1", "2"]}, "expect only 1 value for 'trace_rate'"),
        ({"trace_count": ["-2"]}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_count": ["2147483648"]}, RANGE.format("count", -1, 2147483647, 2147483648)),
        ({"trace_rate": ["3"], "trace_count": ["x"]}, UNREADABLE.format("count") + "got: x"),
        ({"log_frequency": [""]}, "Unable to parse 'log_frequency', got: "),
        ({"trace_level": ["TIMESTAMPS"], "trace_rate": ["0"]}, INVALID),
    ],
)
def test_what_cannot_be_set_changes_nothing(changes: dict[str, Any], text: str) -> None:
    settings = Settings()
    with pytest.raises(Unimplemented if text == FILE else InvalidArgument) as raised:
        settings.update("m", **changes)
    assert str(raised.value) == text
    assert settings.of("m") == settings.of() == INITIAL


def test_nothing_is_traced_without_a_file() -> None:
    settings = Settings(TraceSettings())
    with pytest.raises(InvalidArgument, match="invalid trace setting :trace file name is not given"):
        settings.update(trace_level=["TIMESTAMPS"])
    assert settings.update(trace_rate=["1"])["trace_rate"] == ["1"]  # nothing is to be traced


def test_unknown_levels_and_names_do_not_count() -> None:
    settings = Settings()
    settings.update(trace_level=["MIN", "TIMESTAMPS"], unknown=["x"])
    assert settings.of()["trace_level"] == ["TIMESTAMPS"]
    assert settings.update(trace_level=["MAX"])["trace_level"] == ["TIMESTAMPS"]
    assert settings.update(trace_level=["OFF"])["trace_level"] == ["OFF"]


@given(st.text() | st.integers().map(str))
def test_any_text_is_a_number_or_refused(text: str) -> None:
    settings = Settings()
    with contextlib.suppress(InvalidArgument):
        settings.update(trace_rate=[text])
        assert settings.of()["trace_rate"] == [str(int(text))]
        return
    assert settings.of() == INITIAL


# ---- what is sampled ----------------------------------------------------------------------------


def samples(values: TraceValues, requests: int) -> list[int]:
    sampler = Sampler(values)
    return [number for number in range(1, requests + 1) if sampler.sample()]


@given(st.integers(1, 9), st.integers(-1, 9), st.integers(0, 60))
def test_one_in_so_many_and_no_more_than_so_many(rate: int, count: int, requests: int) -> None:
    chosen = samples(TraceValues(1, rate, count, 0), requests)
    due = [number for number in range(1, requests + 1) if number % rate == 0]
    assert chosen == due[: None if count < 0 else count]


def test_nothing_is_sampled_when_tracing_is_off_and_what_a_caller_traces_does_not_wait() -> None:
    assert samples(TraceValues(0, 1, -1, 0), 5) == samples(TraceValues(1, 0, -1, 0), 5) == []
    sampler = Sampler(TraceValues(1, 1000, 1, 0))
    assert sampler.sample(forced=True)
    assert not sampler.sample(forced=True), "it counts"


def test_the_count_that_is_left_is_the_setting() -> None:
    settings = Settings()
    settings.update(trace_level=["TIMESTAMPS"], trace_rate=["1"], trace_count=["3"])
    assert settings.scopes.sampler("m").sample()
    assert settings.of("m")["trace_count"] == ["2"]
    assert settings.update(log_frequency=["1"])["trace_count"] == ["2"]
    assert settings.update(trace_count=None)["trace_count"] == ["-1"]


def test_a_successor_has_the_same_settings() -> None:
    settings, successor = Settings(), Settings()
    settings.update(trace_level=["TENSORS"], trace_rate=["1"], trace_count=["5"])
    settings.update("m", trace_rate=["2"], trace_count=["9"])
    assert settings.scopes.sampler().sample()
    successor.scopes.restore(settings.scopes.to_wire())
    assert (successor.of(), successor.of("m")) == (settings.of(), settings.of("m"))
    assert successor.of()["trace_count"] == ["4"]


# ---- as JSON ------------------------------------------------------------------------------------


def test_json_of_the_settings() -> None:
    assert admin_codec.trace_json(INITIAL) == (
        b'{"trace_level":["OFF"],"trace_rate":"1000","trace_count":"-1","log_frequency":"0",'
        b'"trace_file":"t.json","trace_mode":"triton"}'
    )
    changes = admin_codec.parse_trace_json(b'{"trace_level":["TENSORS"],"trace_rate":"1","trace_count":null}')
    assert changes == {"trace_level": ["TENSORS"], "trace_rate": ["1"], "trace_count": None}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"trace_rate":1}', b'{"trace_level":"OFF"}', b'{"trace_level":[1]}', b"{" * 200]
)
def test_json_that_is_no_update(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        admin_codec.parse_trace_json(body)


# ---- of the start -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "by_program", "by_file"),
    [
        ({"level": ("TIMESTAMPS",)}, "trace: a trace level needs a file", "needs a file"),
        (
            {"level": ("ALL",), "file": "t"},
            "trace.level must be a list of any of 'TIMESTAMPS', 'TENSORS'",
            "trace.level",
        ),
        (
            {"mode": "zipkin"},
            "trace.mode must be one of 'triton' or 'opentelemetry', got 'zipkin'",
            "trace.mode",
        ),
        ({"rate": 0}, "trace.rate must be an integer from 1 to 4294967295, got 0", "server.trace.rate"),
        ({"url": "collector:4318"}, "trace.url: expected a URL", "server.trace.url"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, trace: dict[str, Any], by_program: str, by_file: str
) -> None:
    with pytest.raises(ConfigError, match=by_program):
        check_trace(TraceSettings(**trace))
    with pytest.raises(ConfigProblems, match=by_file):
        load_file(written(tmp_path, **trace), {})


def test_what_is_no_trace_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace must be a TraceSettings, got an object of type dict"):
        check_trace({"rate": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigProblems, match="did you mean 'file'"):
        load_file(written(tmp_path, fille="x"), {})


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_whether_a_caller_traces(flags: str, sampled: bool) -> None:
    assert TraceParent(f"00-{'a' * 32}-{'b' * 16}-{flags}", "").sampled is sampled


def test_other_settings_of_the_start_leave_what_clients_have_changed() -> None:
    start = TraceSettings(rate=2, count=3, file="a")
    control = inference_service(ServerSettings(trace=start)).control.trace
    control.update("", {"trace_rate": ["5"]})
    control.restart(TraceSettings(rate=7, count=9, file="b"))
    now = control.settings()
    assert (now["trace_rate"], now["trace_count"], now["trace_file"]) == (["5"], ["9"], ["b"])
    control.update("", {"trace_rate": None})
    assert control.settings()["trace_rate"] == ["7"]


# ---- the block of a config file ----


MODEL = {"name": "m", "callable": "model.py:predict"}
MODEL |= {name: [{"name": name, "dtype": "FP32", "shape": [1]}] for name in ("inputs", "outputs")}  # type: ignore[misc]


def written(folder: Path, **trace: object) -> str:
    (folder / "model.py").write_text("def predict(requests):\n    return requests\n")
    path = folder / "config.yaml"
    path.write_text(json.dumps({"server": {"trace": trace}, "models": [MODEL]}))
    return str(path)


def test_file_variable_and_flag(tmp_path: Path) -> None:
    path = written(tmp_path, level=["TIMESTAMPS"], file="t.json", rate=5)
    flag = from_text(("server", "trace", "count"), "7", "--trace-count", Origin.FLAG)
    settings = load_file(path, {"GPUSERVE_SERVER__TRACE__RATE": "9"}, [flag]).settings
    assert settings.trace == TraceSettings(("TIMESTAMPS",), rate=9, count=7, file="t.json")
    assert ServerSettings.from_wire(settings.to_wire()) == settings


def test_a_package_that_is_missing_is_told_in_one_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, mode="opentelemetry")
    program = (
        "import sys; sys.modules['opentelemetry.exporter'] = None; "
        f"from gpuserve.cli.app import run; sys.exit(run(['serve', {path!r}]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "which are not installed: pip install 'gpuserve[otel]'" in done.stderr
    assert "Traceback" not in done.stderr
