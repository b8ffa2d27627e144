"""The lines of a server's log that are kept, and that keeping them changes nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpuserve.supervisor.control.reactor import Reactor
from gpuserve.supervisor.processes.child_supervision import KEPT_LINES, KEPT_NBYTES, LogLine, LogLines

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
