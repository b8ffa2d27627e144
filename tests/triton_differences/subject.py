"""A server under comparison: started, asked, and started again where a request has ended it."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.servers import Ports, Server, running
from triton_differences.answers import Answer, GrpcAnswer, NoAnswer
from triton_differences.steps import Case
from triton_differences.wire import CaseAnswers, Client

_PROBE_TIMEOUT_S = 5.0


class Subject:
    """Keeps one prepared server running between ``__enter__`` and ``__exit__``."""

    ports: Ports

    def __init__(self, server: Server, logs: Path, models: Sequence[str]) -> None:
        self._server = server
        self._logs = logs
        self._models = models
        self._stack = ExitStack()

    def __enter__(self) -> Subject:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, case: Case) -> CaseAnswers:
        """The answers to a case. Where one of its requests ended the server, that is the answer.

        Raises:
            ServerFailed: it did not come up again.
        """
        found = self._client.run(case)
        if any(map(_may_be_an_end, found.answers)) and self.restart_if_ended():
            return CaseAnswers((NoAnswer("the server ended"),), ())
        return found

    def restart_if_ended(self) -> bool:
        """Start the server again if it has ended; return whether it had.

        Raises:
            ServerFailed: it did not come up again.
        """
        if self._is_up():
            return False
        self._stack.close()
        self._start()
        return True

    def _start(self) -> None:
        self._stack = ExitStack()
        up = self._stack.enter_context(running(self._server, self._logs, self._models))
        self.ports = up.ports
        self._client = Client(up.ports)
        self._stack.callback(self._client.close)

    def _is_up(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports.http, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/v2/health/live")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _may_be_an_end(answer: Answer) -> bool:
    return isinstance(answer, NoAnswer) or (isinstance(answer, GrpcAnswer) and answer.code == "UNAVAILABLE")
