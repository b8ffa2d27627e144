"""The two log formats, a child's output in them, lines that are kept, and settings that clients change."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import LogSettings, RateLimitedLog
from gpuserve.core.errors import InvalidArgument, RequestError, Unavailable, Unimplemented
from gpuserve.front.requests import admin_codec
from gpuserve.front.service.control import LogControl
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_supervision import KEPT_LINES, KEPT_NBYTES, LogLine, LogLines

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


def test_output_of_a_child_as_text_and_as_json() -> None:
    configured("text")
    assert logs.relay_line(b"hello \xff\r", FIELDS) == "[linear/cpu#0] hello \N{REPLACEMENT CHARACTER}"
    assert logs.relay_line(b"up", {"model": "", "instance": "front"}) == "[front] up"
    configured("json")
    line = json.loads(logs.relay_line(b'say "hi"', FIELDS))
    assert {"msg": 'say "hi"', "level": "info", **FIELDS}.items() <= line.items()
    configured("json")
    line = b'{"ts": "2025-01-01T00:00:00Z",  "level": "info", "mine": 1}'
    assert logs.relay_line(line, FIELDS) == line.decode()


@pytest.mark.parametrize("line", [b'{"a": 1}', b"{", b"[" * 100_000, b'"ts level"', b"{" * 10])
def test_what_is_no_log_object_is_wrapped(line: bytes) -> None:
    configured("json")
    assert json.loads(logs.relay_line(line, FIELDS))["msg"] == line.decode()


# ---- lines that are kept ----


#: A program that has not configured any log, and what it logs while two servers keep lines.
UNCONFIGURED = """
import logging
from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_supervision import LogLines
both = [LogLines(Reactor()), LogLines(Reactor())]
for lines in both: lines.open()
log = logging.getLogger("gpuserve.supervisor.test")
log.info("nobody asked for that")
log.warning("something is wrong")
logging.basicConfig(format="configured: %(message)s")
log.warning("still wrong")
for lines in both: lines.close()
log.warning("over")
print([one.text.split(" ", 3)[-1] for one in both[1].of()])
"""


@pytest.fixture
def lines() -> Iterator[LogLines]:
    reactor = Reactor()
    yield LogLines(reactor, lambda: 12.3456)
    reactor.close()


def test_a_line_as_a_document(lines: LogLines) -> None:
    lines.add("it works", {"model": "m", "instance": "cpu#0"})
    (line,) = lines.of("m")
    assert line.document() == {
        "time": 12.346, "number": 1, "kind": "log", "model": "m", "instance": "cpu#0", "line": "it works",
    }  # fmt: skip
    assert lines.of("n") == []


def test_only_so_many_lines_and_bytes_are_kept(lines: LogLines) -> None:
    for number in range(KEPT_LINES + 10):
        lines.add(f"line {number}", {})
    assert [len(lines.of()), lines.of()[0].text] == [KEPT_LINES, "line 10"]
    for _ in range(20):
        lines.add("x" * 64 * 1024, {})
    assert sum(len(one.text) for one in lines.of()) <= KEPT_NBYTES
    lines.add("y" * 2 * KEPT_NBYTES, {})
    assert [one.text[0] for one in lines.of()] == ["y"]  # the last is there whatever it takes


def test_what_another_thread_logs_is_a_line_of_the_reactor(lines: LogLines) -> None:
    reactor, heard = lines._handler._reactor, list[tuple[LogLine, int]]()
    lines.subscriber = lambda line: (heard.append((line, threading.get_ident())), reactor.stop())
    lines.open()
    try:
        extra = {"model": "m", "instance": "0", "device": "cpu"}
        log = logging.getLogger("gpuserve.test")
        thread = threading.Thread(target=log.warning, args=("look",), kwargs={"extra": extra})
        thread.start()
        reactor.run()
        thread.join()
    finally:
        lines.close()
    ((line, thread_of),) = heard
    assert (line.model, line.level, thread_of) == ("m", "warning", threading.get_ident())
    assert line.text.endswith("[m/0] look")


def test_a_program_without_a_log_sees_its_warnings_in_our_format() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCONFIGURED], capture_output=True, text=True, check=True, timeout=60
    )
    first, rest = done.stderr.split("\n", 1)
    assert first.endswith(" WARNING something is wrong")
    assert rest == "configured: still wrong\nconfigured: over\n"
    assert done.stdout == "['something is wrong', 'still wrong']\n"


def test_one_line_in_ten_seconds_with_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = RateLimitedLog(logging.getLogger("test"), lambda: now)
    for number in range(1000):
        log.say("process %d", number)
    now += 10.0
    log.say("process %s%%", "x")
    log.say("process %s%%", "y")
    assert caplog.messages == ["process 0", "process x% (999 similar ones since the last line)"]


# ---- settings that clients change ----


INFO = LogSettings.of_level("info")
NO_FILE = "log file location can not be updated through network protocol"


@pytest.fixture
def stream() -> io.StringIO:
    """What the log of this test goes to."""
    return configured("text")


def logged(stream: io.StringIO) -> list[str]:
    """The levels that get through."""
    stream.seek(0)
    stream.truncate()
    logger = logging.getLogger("gpuserve.somewhere")
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, level)("said")
    return re.findall(r" (\w+) +said", stream.getvalue())


def test_the_settings_of_the_start() -> None:
    assert LogSettings.of_level("debug") == ("", True, True, True, 1, "default")
    assert LogSettings.of_level("info") == ("", True, True, True, 0, "default")
    assert LogSettings.of_level("warning") == ("", False, True, True, 0, "default")
    assert LogSettings.of_level("error") == ("", False, False, True, 0, "default")


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
    time = r"\d\d:\d\d:\d\d\.\d{3}"
    for form, expected in (
        ("ISO8601", rf"\d{{4}}-\d\d-\d\dT{time}Z"),
        ("default", rf"\d{{4}}-\d\d-\d\d {time}"),
    ):
        control.update({"log_format": form})
        logged(stream)
        assert re.match(f"{expected} INFO", stream.getvalue())


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
