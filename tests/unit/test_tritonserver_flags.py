"""The flags of Triton's server: that all are known, how they are read, and what they come to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpuserve.compat.tritonserver.command_line import (
    FlagProblem,
    described,
    help_text,
    read_command_line,
    spelled,
)
from gpuserve.compat.tritonserver.flags import BY_NAME, FLAGS, FlagFate, FlagKind
from gpuserve.compat.tritonserver.option_settings import (
    ConvertedOptions,
    OptionProblem,
    TritonOptions,
    convert_options,
)
from gpuserve.config.settings.server import LogOptions, ServerSettings, TraceSettings

LISTED = Path(__file__).parent / "data" / "tritonserver_2.51_flags.txt"
KINDS = {
    "<integer>": FlagKind.INTEGER,
    "<boolean>": FlagKind.BOOLEAN,
    "<float>": FlagKind.NUMBER,
    "": FlagKind.BARE,
}


def listed() -> dict[str, str]:
    lines = [line for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    found = {name: kind for name, _, kind in (line.partition(" ") for line in lines)}
    del found["help"]
    return found


def meaning(*arguments: str) -> ConvertedOptions:
    line = read_command_line(arguments)
    assert line.problems == []
    return convert_options(TritonOptions(line.given, spelled))


def settings(*arguments: str) -> dict[str, Any]:
    return {".".join(one.path): one.value for one in meaning(*arguments).settings}


def test_the_table_has_every_flag_of_the_binary_with_its_kind_and_settings_that_there_are() -> None:
    assert [flag.name for flag in FLAGS] == list(dict.fromkeys(flag.name for flag in FLAGS))
    assert set(BY_NAME) == set(listed())
    own = {name: flag.kind for name, flag in BY_NAME.items() if flag.kind is not FlagKind.LEVEL}
    assert own == {name: KINDS.get(listed()[name], FlagKind.TEXT) for name in own}
    names = {field.name for field in dataclasses.fields(ServerSettings)}
    names |= {f"log.{field.name}" for field in dataclasses.fields(LogOptions)}
    assert {flag.text for flag in FLAGS if flag.fate is FlagFate.SETTING} <= names


def test_every_flag_is_on_the_migration_page_and_in_the_help() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text()
    rows = [f"| `{spelled(flag.name)}` | {described(flag)} |" for flag in FLAGS]
    assert [row for row in rows if row not in page] == []
    text = help_text()
    assert all(f"  {spelled(flag.name)}\n" in text for flag in FLAGS)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("--http-port=1", {"http-port": 1}),
        ("--http-port 1", {"http-port": 1}),
        ("--http-por=1", {"http-port": 1}),
        ("--http-port=1 --http-port=2", {"http-port": 2}),
        ("--id=", {"id": ""}),
        ("--id=a=b", {"id": "a=b"}),
        ("--id --http-port=1", {"id": "--http-port=1"}),
        ("--allow-http=false", {"allow-http": False}),
        ("--allow-http OFF", {"allow-http": False}),
        ("--allow-http=0 --allow-grpc=1", {"allow-http": False, "allow-grpc": True}),
        ("--allow-http --allow-grpc", {"allow-http": True, "allow-grpc": True}),
        ("--log-verbose true", {"log-verbose": 1}),
        ("--log-verbose=1", {"log-verbose": 1}),
        ("--metrics-interval-ms=0.5", {"metrics-interval-ms": 0.5}),
        ("--disable-auto-complete-config", {"disable-auto-complete-config": True}),
        ("--rate-limit=OFF", {"rate-limit": "off"}),
        ("--log-format=iso8601", {"log-format": "ISO8601"}),
        ("--load-model=a --load-model b", {"load-model": ["a", "b"]}),
    ],
)
def test_how_flags_are_given(arguments: str, given: dict[str, Any]) -> None:
    line = read_command_line(arguments.split())
    assert line.problems == []
    assert {flag.name: value for flag, value in line.given} == given


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--http-ports=1", "tritonserver has no such flag; did you mean 'http-port'?"),
        ("--http=1", "it could be any of --http-address, --http-port, --http-header-f"),
        ("models", "expected a flag such as --model-repository=DIR"),
        ("--http-port", "expected an integer behind it, given nothing"),
        ("--http-port=http", "expected an integer, given 'http'"),
        ("--allow-http=maybe", "expected true or false, given 'maybe'"),
        ("--log-verbose=much", "expected an integer, or true or false, given 'much'"),
        ("--model-control-mode=all", "expected one of none, poll, explicit, given"),
        ("--disable-auto-complete-config=1", "expected no value, given"),
    ],
)
def test_a_wrong_flag_is_told_in_a_sentence(argument: str, text: str) -> None:
    (found,) = read_command_line([argument]).problems
    assert (found.label, found.text[: len(text)]) == (argument.partition("=")[0], text)


def test_all_wrong_flags_are_told_at_once() -> None:
    line = read_command_line(["--bogus", "value", "--http-port=a", "--id=mine"])
    assert line.problems == [
        FlagProblem("--bogus", "tritonserver has no such flag"),
        FlagProblem("--http-port", "expected an integer, given 'a'"),
    ]
    assert [(flag.name, value) for flag, value in line.given] == [("id", "mine")]


#: As with Triton, where any client may load models.
ANY_CLIENT = {"model_control": "explicit", "remote_control": ["model-repository"]}
RULE = {"groups": ["health", "trace"], "header": "key", "token": "v=1"}


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("--exit-timeout-secs=5 --id=a", {"drain_timeout_s": 5, "name": "a"}),
        ("--log-info=false --log-verbose=2", {"log.info": False, "log.verbose_level": 2}),
        ("--log-format=iso8601 --log-file=a", {"log.time_format": "ISO8601", "log.file": "a"}),
        ("--strict-readiness=false", {"min_ready_instances": 0}),
        ("--strict-readiness", {"min_ready_instances": 1}),
        ("--exit-on-error=false", {"exit_on_error": False}),
        (
            "--model-control-mode=poll --repository-poll-secs=2",
            {"model_control": "poll", "repository_poll_s": 2},
        ),
        ("--model-control-mode=explicit", {**ANY_CLIENT, "load_at_start": []}),
        ("--model-control-mode=explicit --load-model=*", ANY_CLIENT),
        (
            "--load-model=b --load-model=a --load-model=b --model-control-mode=EXPLICIT",
            {**ANY_CLIENT, "load_at_start": ["b", "a"]},
        ),
        ("--allow-metrics=false --metrics-port=3", {"metrics_port": None}),
        ("--http-address=::1 --grpc-address=::2", {"host": "::1", "grpc_host": "::2"}),
        ("--metrics-address=::3", {"metrics_host": "::3"}),
        ("--grpc-max-connection-age=1500", {"max_connection_age_s": 1.5}),
        ("--response-cache-byte-size=7", {"response_cache_nbytes": 7}),
        ("--cache-config=local,size=7", {"response_cache_nbytes": 7}),
        ("--grpc-infer-response-compression-level=HIGH", {"grpc_response_compression": "high"}),
        (
            "--rate-limit=execution_count --rate-limit-resource=R:4:0 --rate-limit-resource=S:1",
            {"rate_limit": "execution_count", "rate_limit_resources": ["R:4:0", "S:1"]},
        ),
        ("--metrics-config=summary_latencies=true", {"metrics_summaries": True}),
        ("--metrics-config=counter_latencies=false", {}),
        (
            "--trace-level=TIMESTAMPS --trace-level=tensors --trace-file=a --trace-rate=3",
            {"trace.level": ("TIMESTAMPS", "TENSORS"), "trace.file": "a", "trace.rate": 3},
        ),
        ("--trace-file=a --trace-config=triton,file=b", {"trace.file": "b"}),
        ("--trace-level=max --trace-config=level=OFF", {"trace.level": ()}),
        (
            "--trace-config=opentelemetry,url=http://c --trace-config=mode=opentelemetry",
            {"trace.url": "http://c", "trace.mode": "opentelemetry"},
        ),
        (
            "--trace-config=opentelemetry,resource=a=b --trace-config=opentelemetry,resource=c=d",
            {"trace.resource": TraceSettings().resource | {"a": "b", "c": "d"}},
        ),
        (
            "--http-restricted-api=health,trace:key=v=1 --grpc-restricted-protocol=health,trace:key=v=1",
            {"access_rules": [RULE]},
        ),
        ("--allow-sagemaker=false --model-namespacing=0 --reuse-http-port off", {}),
    ],
)
def test_what_flags_come_to(arguments: str, meant: dict[str, Any]) -> None:
    assert settings(*arguments.split()) == meant


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        ("--http-restricted-api=health:key=v", "holds for the grpc port as well: access_rules are for both"),
        ("--http-restricted-api=health:key=v --allow-grpc=false", None),
        ("--http-thread-count=8 --id=a", f"makes no difference: {BY_NAME['http-thread-count'].text}"),
    ],
)
def test_what_holds_for_more_or_makes_no_difference_is_noted(arguments: str, notes: str | None) -> None:
    name = arguments[2:].partition("=")[0]
    assert meaning(*arguments.split()).notes == ([(name, notes)] if notes else [])


REFUSED = {FlagKind.TEXT: "something", FlagKind.INTEGER: "1", FlagKind.BOOLEAN: "true"}


@pytest.mark.parametrize("name", [flag.name for flag in FLAGS if flag.fate is FlagFate.REFUSED])
def test_what_is_refused_is_refused_by_name_with_what_to_use_instead(name: str) -> None:
    with pytest.raises(OptionProblem, match=r"^not supported by gpuserve: ") as caught:
        settings(f"--{name}={REFUSED[BY_NAME[name].kind]}")
    assert caught.value.option == name


@pytest.mark.parametrize(
    ("arguments", "option", "text"),
    [
        ("--load-model=a", "load-model", "needs --model-control-mode=explicit"),
        (
            "--load-model=a --load-model=* --model-control-mode=explicit",
            "load-model",
            r"\* stands for every model",
        ),
        ("--grpc-use-ssl", "grpc-use-ssl", "needs --grpc-server-cert and --grpc-server-key"),
        (
            "--grpc-use-ssl-mutual=1 --grpc-server-cert=c",
            "grpc-use-ssl-mutual",
            "needs --grpc-server-key and --grp",
        ),
        (
            "--cache-config=local,size=1 --response-cache-byte-size=1",
            "response-cache-byte-size",
            "does not go with --cache-config",
        ),
        ("--cache-config=redis,host=h", "cache-config", "'redis,host=h' is not supported"),
        ("--cache-config=local,size=big", "cache-config", "expected 'local,size=<bytes>', given"),
        ("--http-restricted-api=health", "http-restricted-api", "expected '<group>,<group>:<header>=<"),
        ("--metrics-config=on", "metrics-config", "expected '<setting>=<value>', given 'on'"),
        ("--metrics-config=summary_latencies=2", "metrics-config", "expected 'summary_latencies=true' or"),
        ("--trace-config=rate=often", "trace-config", "expected an integer in 'rate=often'"),
        ("--trace-config=triton,colour=red", "trace-config", "'triton,colour=red' is not supported"),
    ],
)
def test_values_that_cannot_be(arguments: str, option: str, text: str) -> None:
    with pytest.raises(OptionProblem, match=text) as caught:
        settings(*arguments.split())
    assert caught.value.option == option
