"""The two log formats, and a child's output within them."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator

import pytest

from gpuserve.config.settings import logs

FIELDS = {"model": "linear", "instance": "cpu#0", "device": "cpu"}


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("gpuserve", "py.warnings")]
    before = [(one.level, one.propagate, list(one.handlers)) for one in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


def configured(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(log_format, logs.LogSettings.of_level(level), stream)
    return stream


def test_a_json_line_has_every_field() -> None:
    stream = configured("json")
    logging.getLogger("gpuserve.part").warning("two %s", "words", extra=FIELDS)
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert isinstance(line.pop("pid"), int)
    assert line == {"level": "warning", "logger": "gpuserve.part", "msg": "two words", **FIELDS}


def test_a_traceback_is_one_escaped_field() -> None:
    stream = configured("json")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("gpuserve").exception("it failed")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["exc"].endswith("ValueError: first\nsecond")


def test_a_text_line_names_the_instance() -> None:
    stream = configured("text")
    logging.getLogger("gpuserve.part").info("loaded", extra=FIELDS)
    logging.getLogger("gpuserve.part").info("alone")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"[-\d]{10} [:\d]{8}\.\d{3} INFO    \[linear/cpu#0\] loaded", first)
    assert second.endswith("INFO    alone")


def test_levels_and_configuring_again() -> None:
    configured("text")
    stream = configured("text", "warning")
    logging.getLogger("gpuserve").info("unseen")
    logging.getLogger("gpuserve").warning("seen")
    assert stream.getvalue().count("\n") == 1


def test_other_loggers_are_left_alone() -> None:
    root = list(logging.getLogger().handlers)
    stream = configured("json")
    logging.getLogger("somebody").warning("not ours")
    assert stream.getvalue() == ""
    assert logging.getLogger().handlers == root


def test_warnings_become_log_lines() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        stream = configured("json")
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "old name" in json.loads(stream.getvalue())["msg"]


def test_lines_follow_sys_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("text", logs.LogSettings.of_level("info"))
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger("gpuserve").info("above the table")
    assert "above the table" in stream.getvalue()


def test_output_of_a_child_as_text() -> None:
    configured("text")
    assert logs.relay_line(b"hello \xff\r", FIELDS) == "[linear/cpu#0] hello \N{REPLACEMENT CHARACTER}"
    assert logs.relay_line(b"up", {"model": "", "instance": "front"}) == "[front] up"


def test_output_of_a_child_as_json_is_wrapped() -> None:
    configured("json")
    line = json.loads(logs.relay_line(b'say "hi"', FIELDS))
    assert {"msg": 'say "hi"', "level": "info", **FIELDS}.items() <= line.items()


@pytest.mark.parametrize("line", [b'{"a": 1}', b"{", b"[" * 100_000, b'"ts level"', b"{" * 10])
def test_what_is_no_log_object_is_wrapped(line: bytes) -> None:
    configured("json")
    assert json.loads(logs.relay_line(line, FIELDS))["msg"] == line.decode()


def test_a_log_object_passes_unchanged() -> None:
    configured("json")
    line = b'{"ts": "2025-01-01T00:00:00Z",  "level": "info", "mine": 1}'
    assert logs.relay_line(line, FIELDS) == line.decode()
