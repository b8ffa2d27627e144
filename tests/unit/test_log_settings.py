"""Log settings: what a client may change, with Triton's texts, and what that does to the log."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import LogSettings
from gpuserve.core.errors import InvalidArgument, RequestError, Unavailable, Unimplemented
from gpuserve.front.requests import admin_codec
from gpuserve.front.service.control import LogControl
from gpuserve.supervisor.control import front_messages as messages

INFO = LogSettings.of_level("info")
NO_FILE = "log file location can not be updated through network protocol"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the log of this test goes to; afterwards all is as it was."""
    names = (logs.ROOT, "py.warnings")
    loggers = [logging.getLogger(name) for name in names]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    written = io.StringIO()
    logs.configure("text", INFO, written)
    yield written
    logging.captureWarnings(False)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def logged(stream: io.StringIO) -> list[str]:
    """The levels that get through."""
    stream.seek(0)
    stream.truncate()
    logger = logging.getLogger("gpuserve.somewhere")
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, level)("said")
    return re.findall(r" (\w+) +said", stream.getvalue())


@pytest.mark.parametrize(
    ("level", "settings"),
    [
        ("debug", ("", True, True, True, 1, "default")),
        ("info", ("", True, True, True, 0, "default")),
        ("warning", ("", False, True, True, 0, "default")),
        ("error", ("", False, False, True, 0, "default")),
    ],
)
def test_the_settings_of_the_start(level: str, settings: tuple[Any, ...]) -> None:
    assert LogSettings.of_level(level) == settings


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({}, "INFO WARNING ERROR CRITICAL"),
        ({"log_verbose_level": 1}, "DEBUG INFO WARNING ERROR CRITICAL"),
        ({"log_info": False}, "WARNING ERROR CRITICAL"),
        ({"log_warning": False}, "INFO ERROR CRITICAL"),
        ({"log_info": False, "log_verbose_level": 2}, "DEBUG WARNING ERROR CRITICAL"),
        ({"log_info": False, "log_warning": False, "log_error": False}, "CRITICAL"),
    ],
)
def test_what_is_logged(stream: io.StringIO, changes: dict[str, Any], levels: str) -> None:
    control = LogControl(INFO, lambda _: None)
    assert control.update(changes) == INFO._replace(**changes)
    assert logged(stream) == levels.split()
    control.update(INFO._asdict())
    assert logged(stream) == ["INFO", "WARNING", "ERROR", "CRITICAL"]


def test_the_form_of_the_time(stream: io.StringIO) -> None:
    control = LogControl(INFO, lambda _: None)
    control.update({"log_format": "ISO8601"})
    logged(stream)
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO", stream.getvalue())
    control.update({"log_format": "default"})
    logged(stream)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO", stream.getvalue())


def test_the_log_of_a_host_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (logs.ROOT, "py.warnings"):  # a command that another test ran here has configured them
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    before = logging.getLogger(logs.ROOT).level
    logs.adjust(LogSettings.of_level("error"))
    assert logging.getLogger(logs.ROOT).level == before


def test_changes_are_told_and_a_mere_look_is_none() -> None:
    told: list[Any] = []
    control = LogControl(LogSettings.of_level("warning"), told.append)
    control.update({})
    control.update({"log_info": True})
    assert told == [messages.Changed("log", INFO._asdict())]


def test_json_of_the_settings() -> None:
    assert admin_codec.log_json(INFO) == (
        b'{"log_file":"","log_info":true,"log_warning":true,"log_error":true,"log_verbose_level":0,'
        b'"log_format":"default"}'
    )
    body = b'{"log_info":false,"log_error":null,"log_file":null,"unknown":1,"log_verbose_level":4294967295}'
    assert admin_codec.parse_log_json(body) == {"log_info": False, "log_verbose_level": 4294967295}


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (b'{"log_file":"x"}', Unimplemented, NO_FILE),
        (b'{"log_format":"x"}', Unavailable, "invalid argument for --log_format, got: x"),
        (b'{"log_info":1}', InvalidArgument, "Unable to parse 'log_info': expected a boolean, got: 1"),
        (b'{"log_verbose_level":-1}', InvalidArgument, "expected an integer from 0"),
        (b'{"log_verbose_level":true}', InvalidArgument, "expected an integer from 0"),
        (b'{"log_format":1}', InvalidArgument, "expected a string, got: 1"),
        (b"[]", InvalidArgument, "must be a JSON object"),
        (b"", InvalidArgument, "failed to parse"),
    ],
)
def test_json_that_is_no_update(body: bytes, error: type[RequestError], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        admin_codec.parse_log_json(body)


def message(**settings: Any) -> Any:
    request = service_pb2.LogSettingsRequest()
    fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    for name, value in settings.items():
        if value is None:
            request.settings[name]  # a look makes it, without a value
        else:
            setattr(request.settings[name], fields[type(value)], value)
    return request


def test_messages() -> None:
    given = message(log_info=False, log_error=None, unknown=1, log_format="ISO8601")
    assert admin_codec.parse_log_message(given) == {"log_info": False, "log_format": "ISO8601"}
    answer = admin_codec.log_message(INFO).settings
    assert answer["log_file"].string_param == ""
    assert answer["log_warning"].bool_param is True
    assert answer["log_verbose_level"].WhichOneof("parameter_choice") == "uint32_param"


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"log_file": "x"}, Unimplemented, NO_FILE),
        ({"log_info": 1}, InvalidArgument, "expect boolean for 'log_info'"),
        ({"log_verbose_level": "1"}, InvalidArgument, "expect int32 for 'log_verbose_level'"),
        ({"log_format": True}, InvalidArgument, "expect string for 'log_format'"),
        ({"log_format": "x"}, InvalidArgument, "invalid argument for log_format, got: x"),
    ],
)
def test_messages_that_are_no_update(settings: dict[str, Any], error: type[RequestError], text: str) -> None:
    with pytest.raises(error) as raised:
        admin_codec.parse_log_message(message(**settings))
    assert str(raised.value) == text
