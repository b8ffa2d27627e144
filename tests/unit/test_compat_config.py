"""PyTriton's options: where they are read from, and what becomes of each."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve.compat.pytriton.exceptions import PyTritonValidationError
from gpuserve.compat.pytriton.triton import Triton, bound_spec
from gpuserve.compat.pytriton.triton_config import (
    DEFAULT_PROTECTED_ENDPOINTS,
    TritonConfig,
    TritonSecurityConfig,
    flag_of,
    ineffective_options,
    merged_configs,
    server_settings,
)
from gpuserve.compat.pytriton.utils import Workspace, pytriton_home
from gpuserve.compat.tritonserver.flags import FlagFate
from gpuserve.config.settings.server import LogOptions, ServerSettings, TraceSettings
from gpuserve.core.errors import BadModelConfig
from gpuserve.model.declaration import ModelConfig, ModelWarmup, Tensor, WarmupInput
from gpuserve.model.spec import ModelSpec

OPEN = TritonSecurityConfig(restricted_endpoints=[])
PREFIX = "PYTRITON_TRITON_CONFIG_"


def settings(**options: Any) -> ServerSettings:
    return server_settings(TritonConfig(**options), OPEN)


def test_the_defaults_are_the_same() -> None:
    assert settings() == ServerSettings(
        host="0.0.0.0",
        http_port=8000,
        grpc_port=8001,
        metrics_port=8002,
        compat_name="triton",
        drain_timeout_s=30.0,
        model_control="explicit",
    )


PORTS = {"http_port": 1, "grpc_port": 2, "metrics_port": 3}
CERT = {"grpc_server_cert": Path("c"), "grpc_server_key": Path("k")}
TLS = {"tls_certfile": "c", "tls_keyfile": "k", "tls_ports": ("grpc",)}
WITH_TRITON = ["triton,file=t.json", "triton,log-frequency=5", "level=TIMESTAMPS", "rate=1"]
WITH_OPENTELEMETRY = ["mode=opentelemetry", "opentelemetry,url=http://c", "opentelemetry,resource=a=b"]
RESOURCE = {"service.name": "gpuserve", "a": "b"}


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"id": "mine"}, {"name": "mine"}),
        ({"exit_timeout_secs": 5}, {"drain_timeout_s": 5}),
        (PORTS, PORTS),
        ({"allow_http": False, "http_port": 1}, {"http_port": None}),
        ({"allow_grpc": False}, {"grpc_port": None}),
        ({"allow_metrics": False}, {"metrics_port": None}),
        ({"http_address": "127.0.0.1"}, {"host": "127.0.0.1"}),
        ({"http_address": "127.0.0.1", "grpc_address": "::1"}, {"host": "127.0.0.1", "grpc_host": "::1"}),
        ({"metrics_address": "127.0.0.2"}, {"metrics_host": "127.0.0.2"}),
        ({"log_verbose": 3}, {"log": LogOptions(verbose_level=3)}),
        ({"http_header_forward_pattern": "a.*"}, {"http_header_forward_pattern": "a.*"}),
        ({"grpc_header_forward_pattern": "b"}, {"grpc_header_forward_pattern": "b"}),
        ({"cache_config": ["local,size=1048576"]}, {"response_cache_nbytes": 1 << 20}),
        (
            {"trace_config": WITH_TRITON},
            {"trace": TraceSettings(("TIMESTAMPS",), rate=1, log_frequency=5, file="t.json")},
        ),
        ({"trace_config": ["level=OFF", "count=7"]}, {"trace": TraceSettings(count=7)}),
        (
            {"trace_config": WITH_OPENTELEMETRY},
            {"trace": TraceSettings(mode="opentelemetry", url="http://c", resource=RESOURCE)},
        ),
        ({"grpc_use_ssl": False, "allow_sagemaker": False, "trace_config": []}, {}),
        ({"grpc_server_cert": "c", "grpc_server_key": "k", "grpc_root_cert": "r"}, {}),
        ({"grpc_use_ssl": True, **CERT}, TLS),
        ({"grpc_use_ssl_mutual": True, **CERT, "grpc_root_cert": Path("r")}, {**TLS, "tls_client_ca": "r"}),
    ],
)
def test_what_options_mean(options: dict[str, Any], meant: dict[str, Any]) -> None:
    named = {} if "id" in options else {"compat_name": "triton"}
    assert settings(**options) == replace(ServerSettings(model_control="explicit"), **named, **meant)


REFUSED = {
    "http_restricted_api": "health:a=b",
    "grpc_restricted_protocol": "health:a=b",
    "allow_sagemaker": True,
    "allow_vertex_ai": True,
}


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_options_that_would_change_more_are_refused_by_name(name: str, value: Any) -> None:
    text = rf"TritonConfig\.{name}: not supported by gpuserve: \w"
    with pytest.raises(PyTritonValidationError, match=text):
        settings(**{name: value})


def test_every_option_has_a_meaning() -> None:
    fates = {field.name: flag_of(field.name).fate for field in dataclasses.fields(TritonConfig)}
    assert {name for name, fate in fates.items() if fate is FlagFate.REFUSED} == set(REFUSED)
    named = [flag_of(name).text for name, fate in fates.items() if fate is FlagFate.SETTING]
    settings = {field.name for field in dataclasses.fields(ServerSettings)}
    assert set(named) <= settings | {"log.verbose_level"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_config": ["redis,host=h"]}, "redis.*local,size="),
        ({"grpc_use_ssl": True}, "grpc_use_ssl: needs grpc_server_cert and grpc_server_key"),
        (
            {"grpc_use_ssl_mutual": True, "grpc_server_cert": "c", "grpc_server_key": "k"},
            "grpc_use_ssl_mutual: needs grpc_root_cert",
        ),
        ({"trace_config": ["level=TIMESTAMPS"]}, "needs a file"),
        ({"trace_config": ["level=ALL", "triton,file=t"]}, "any of 'TIMESTAMPS', 'TENSORS'"),
        ({"trace_config": ["rate=often"]}, "expected an integer in 'rate=often'"),
        ({"trace_config": ["opentelemetry,bsp_schedule_delay=1"]}, "bsp_schedule_delay.*expected one of"),
        ({"cache_config": ["local,size=big"]}, "expected 'local,size=<bytes>', given 'local,size=big'"),
    ],
)
def test_values_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PyTritonValidationError, match=words):
        settings(**options)


def test_one_of_the_protocols_has_to_be_allowed_and_options_are_keywords() -> None:
    with pytest.raises(PyTritonValidationError, match="The `http` or `grpc` endpoint has to be allowed"):
        TritonConfig(allow_http=False, allow_grpc=False)
    with pytest.raises(TypeError, match="positional argument"):
        TritonConfig(Path("/models"))  # type: ignore[misc]


def test_options_from_the_environment() -> None:
    config = TritonConfig.from_env(
        {
            f"{PREFIX}HTTP_PORT": "9000",
            f"{PREFIX}ALLOW_METRICS": "false",
            f"{PREFIX}ALLOW_GRPC": "True",
            f"{PREFIX}LOG_FILE": "/var/log",
            f"{PREFIX}TRACE_CONFIG_2": "rate=1",
            f"{PREFIX}TRACE_CONFIG_10": "mode=opentelemetry",
            f"{PREFIX}CACHE_CONFIG": "local,size=1",
            "OTHER": "1",
        }
    )
    assert config == TritonConfig(
        http_port=9000,
        allow_metrics=False,
        allow_grpc=True,
        log_file=Path("/var/log"),
        trace_config=["rate=1", "mode=opentelemetry"],
        cache_config=["local,size=1"],
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("ALLOW_METRICS", "maybe", "true or false"), ("HTTP_PORT", "http", "an integer")],
)
def test_variables_that_cannot_be_read(name: str, value: str, expected: str) -> None:
    text = f"TritonConfig.{name.lower()}: expected {expected}, given '{value}'"
    with pytest.raises(PyTritonValidationError, match=text):
        TritonConfig.from_env({f"{PREFIX}{name}": value})


def test_unknown_options_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert TritonConfig.from_dict({"log_verbosity": 4, "log_verbose": "4"}) == TritonConfig(log_verbose=4)
    assert "No such option of TritonConfig: log_verbosity. Known: allow_cpu_metrics" in caplog.text


def test_explicit_options_go_before_those_of_the_environment() -> None:
    both = merged_configs(TritonConfig(http_port=1, grpc_port=2), TritonConfig(http_port=3), None)
    assert (both.http_port, both.grpc_port) == (3, 2)
    assert both.to_dict()["metrics_port"] is None


def test_what_has_no_effect_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    config = TritonConfig(http_thread_count=4, grpc_keepalive_time=7, metrics_interval_ms=9)
    assert ineffective_options(config) == ["http_thread_count", "grpc_keepalive_time", "metrics_interval_ms"]
    Triton(config=config)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "have no effect with gpuserve: http_thread_count, grpc_keepalive_time" in record.getMessage()


def test_by_default_what_changes_the_server_needs_a_random_token() -> None:
    one, other = TritonSecurityConfig(), TritonSecurityConfig()
    assert one.restricted_endpoints == list(DEFAULT_PROTECTED_ENDPOINTS)
    assert one.access_token != other.access_token
    assert len(one.access_token or "") == 43
    made = server_settings(TritonConfig(), one)
    assert (made.restricted_endpoints, made.access_token) == (DEFAULT_PROTECTED_ENDPOINTS, one.access_token)
    assert Triton(security_config=one).get_access_token() == one.access_token


def test_endpoints_and_token_may_be_chosen() -> None:
    assert (OPEN.access_token, settings().restricted_endpoints) == (None, ())
    chosen = TritonSecurityConfig("mine", ["health"])
    made = server_settings(TritonConfig(), chosen)
    assert (made.restricted_endpoints, made.access_token) == (("health",), "mine")
    with pytest.raises(PyTritonValidationError, match=r"Invalid endpoint names: doors\. .*health, inference"):
        TritonSecurityConfig(restricted_endpoints=["doors"])


def test_a_workspace_is_only_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path / "home"))
    workspace = Workspace()
    assert workspace.path.parent == pytriton_home() == tmp_path / "home"
    assert not workspace.exists()
    assert workspace.is_empty()
    workspace.clean()
    assert not (tmp_path / "home").exists()
    given = Workspace(tmp_path / "given")
    given.model_store_path.mkdir(parents=True)
    assert (given.exists(), given.is_empty()) == (True, False)
    given.clean()
    given.clean()
    assert not given.exists()


def test_every_option_is_on_the_migration_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text()
    section = page.partition("## `TritonConfig`")[2].partition("\n# ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    told = {name.partition("=")[0]: row[2] for row in rows for name in row[1].replace("`", "").split()}
    told = {name.rstrip(","): text for name, text in told.items()}
    for field in dataclasses.fields(TritonConfig):
        text = told[field.name].strip()
        fate = flag_of(field.name).fate
        assert text.startswith("refused") == (fate is FlagFate.REFUSED), field.name
        assert (text == "no effect") == (fate is FlagFate.NO_EFFECT), field.name


# ---- compat bound ----------------------------------------------------------------------------


X = Tensor(name="x", dtype=np.float32, shape=(-1,))
Y = Tensor(name="y", dtype=np.float32, shape=(-1,))
ZEROS = WarmupInput(np.float32, (3,), zero_data=True)
GOOD = ModelWarmup("good", 2, {"x": ZEROS})


async def double(requests: list[Any]) -> list[Any]:
    return [{"y": 2 * request["x"]} for request in requests]


async def triple(requests: list[Any]) -> list[Any]:
    return [{"y": 3 * request["x"]} for request in requests]


def one_at_last(requests: list[Any]) -> Any:
    yield [{"y": request["x"]} for request in requests]


def plain(requests: list[Any]) -> list[Any]:
    return requests


def bound(infer: Callable[..., Any], config: ModelConfig | None = None) -> ModelSpec:
    return bound_spec("m", infer, [X], [Y], 1, config, strict=False, isolation="thread")


@pytest.mark.parametrize("infer", [double, one_at_last])
def test_one_batch_is_under_way_at_once(infer: Callable[..., Any]) -> None:
    assert bound(infer).concurrency == 1
    assert bound(infer, ModelConfig(decoupled=True)).concurrency == 0, "by the kind of the callable"
    assert bound(plain).concurrency == 0


def test_a_callable_asks_for_more() -> None:
    triple.concurrency = 4  # type: ignore[attr-defined]
    assert bound(triple).concurrency == 0, "the worker reads it from the callable"


@pytest.mark.parametrize(
    ("inputs", "batch_size", "meant"),
    [
        ({}, 1, ("bad", 1, 1, ())),
        ({"x": ZEROS}, 5, ("bad", 5, 1, (("x", "FP32", (3,), "zero", ""),))),
        (
            {"x": WarmupInput(np.int32, (3,), zero_data=True)},
            1,
            ("bad", 1, 1, (("x", "INT32", (3,), "zero", ""),)),
        ),
        ({"z": ZEROS}, 1, ("bad", 1, 1, (("z", "FP32", (3,), "zero", ""),))),
        (
            {"x": WarmupInput(np.float32, (3,), input_data_file="/nowhere/x.npy")},
            1,
            ("bad", 1, 1, (("x", "FP32", (3,), "file", "/nowhere/x.npy"),)),
        ),
    ],
    ids=["input left out", "too large", "wrong dtype", "no input of the model", "file missing"],
)
def test_warmups_run_with_what_they_name(inputs: dict[str, Any], batch_size: int, meant: Any) -> None:
    bad = ModelWarmup("bad", batch_size, inputs)
    spec = bound(plain, ModelConfig(max_batch_size=4, model_warmup=[bad, GOOD]))
    assert (spec.warmup[0], spec.warmup[1][0]) == (meant, "good")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (WarmupInput(np.float32, (3,)), "must be provided"),
        (WarmupInput("float33", (3,), zero_data=True), "float33"),
    ],
    ids=["no data", "no dtype"],
)
def test_impossible_warmups_are_logged(
    given: WarmupInput, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ModelWarmup("bad", 1, {"x": given})
    spec = bound(plain, ModelConfig(max_batch_size=4, model_warmup=[bad, GOOD]))
    assert [one[0] for one in spec.warmup] == ["good"]
    (record,) = caplog.records
    assert named in record.getMessage()


def test_other_values_of_the_config_still_stop_it() -> None:
    with pytest.raises(BadModelConfig, match="max_batch_size"):
        bound(plain, ModelConfig(max_batch_size=-1, model_warmup=[GOOD]))


def test_the_config_of_the_program_stays_as_it_is(tmp_path: Path) -> None:
    config = ModelConfig(max_batch_size=4, model_warmup=[GOOD])
    before = replace(config)
    bound(plain, config)
    assert config == before
