"""Log lines that others can cause as often as they like."""

from __future__ import annotations

import logging

import pytest

from gpuserve.config.settings.logs import RateLimitedLog


def test_one_line_in_ten_seconds_with_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = RateLimitedLog(logging.getLogger("test"), lambda: now)
    for number in range(1000):
        log.say("process %d", number)
    now += 10.0
    log.say("process %s%%", "x")
    log.say("process %s%%", "y")
    assert caplog.messages == ["process 0", "process x% (999 similar ones since the last line)"]
