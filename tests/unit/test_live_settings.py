"""Which settings may change while a server runs, and what is said of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpuserve.config.settings.checks import compare_settings, describe_change
from gpuserve.config.settings.logs import ISO8601, LogSettings
from gpuserve.config.settings.server import (
    LogOptions,
    ServerSettings,
    TraceSettings,
    live_settings,
    with_changed_settings,
)
from gpuserve.config.settings.values import AccessRule
from gpuserve.front.process.front import ADJUSTED_HERE

NAMES = {field.name for field in dataclasses.fields(ServerSettings)}
BEFORE = ServerSettings()


def test_what_may_change_does_and_the_rest_stays() -> None:
    assert compare_settings(BEFORE, ServerSettings()) == (BEFORE, (), ())
    given = dataclasses.replace(BEFORE, http_port=9000, log_level="debug", drain_timeout_s=5.0)
    found = compare_settings(BEFORE, given)
    assert found.settings == dataclasses.replace(BEFORE, log_level="debug", drain_timeout_s=5.0)
    assert set(found.changed) == {"log_level", "drain_timeout_s"}
    ((key, text),) = found.refused
    refusal = "cannot change while the server runs: 8000 stays, the file says 9000"
    assert (key, text) == ("server.http_port", f"server.http_port: {refusal}")


def test_what_is_refused_is_refused_again_until_the_file_is_as_it_was() -> None:
    given = dataclasses.replace(BEFORE, grpc_port=None)
    once = compare_settings(BEFORE, given)
    assert once.refused[0].text.endswith("8001 stays, the file says null")
    assert compare_settings(once.settings, given).refused == once.refused
    assert compare_settings(once.settings, BEFORE).refused == ()


@pytest.mark.parametrize("name", ["access_token", "access_rules"])
def test_no_token_is_told(name: str) -> None:
    secret = AccessRule(("health",), "s3cret")
    value: Any = "s3cret" if name == "access_token" else (secret,)
    (refusal,) = compare_settings(BEFORE, dataclasses.replace(BEFORE, **{name: value})).refused
    assert refusal.text == f"server.{name}: cannot change while the server runs"


def test_a_transport_that_cannot_is_named() -> None:
    before = dataclasses.replace(BEFORE, transport="grpcio")
    (refusal,) = compare_settings(before, dataclasses.replace(before, max_connection_age_s=9.0)).refused
    assert "while the server runs with transport grpcio: 0.0 stays, the file says 9.0" in refusal.text
    assert compare_settings(BEFORE, dataclasses.replace(BEFORE, max_connection_age_s=9.0)).refused == ()


def test_the_tables_name_settings() -> None:
    assert set(live_settings()) <= NAMES
    # What is not the front's is the supervisor's.
    supervisors = {"drain_timeout_s", "lame_duck_s", "load_at_start", "load_timeout_s", "log_level"}
    supervisors |= {"max_output_lines_per_s", "max_output_nbytes_per_s", "shared_memory_locked_nbytes"}
    supervisors |= {"gpu_locked_nbytes", "memory", "repository_poll_s"}
    assert set(ADJUSTED_HERE) == set(live_settings()) - supervisors


def test_a_change_is_told_in_a_line_and_reaches_the_front_as_plain_data() -> None:
    now = dataclasses.replace(BEFORE, log_level="debug", trace=TraceSettings(rate=1))
    assert describe_change("log_level", BEFORE, now) == 'server.log_level is "debug" now, it was "info"'
    assert describe_change("trace", BEFORE, now) == "server.trace is as the file says now"
    now = dataclasses.replace(BEFORE, trace=TraceSettings(rate=1), min_ready_instances=2)
    wire = now.to_wire()
    changes = {name: wire[name] for name in ("trace", "min_ready_instances")}
    assert with_changed_settings(BEFORE, changes) == now


def test_parts_of_the_log_settings_hold_over_the_level() -> None:
    log = LogOptions(file="a", info=True, verbose_level=3, time_format=ISO8601)
    settings = dataclasses.replace(BEFORE, log_level="error", log=log)
    assert settings.log_settings() == LogSettings("a", True, False, True, 3, ISO8601)
