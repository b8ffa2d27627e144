"""Runs a server as its own process, the way a user does, and ends it the way an operator does.

For the end-to-end tests. What a server prints when it is ready is known here and nowhere else in them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parent.parent
GPUSERVE = str(Path(sys.executable).with_name("gpuserve"))
END_TIMEOUT_S = 30.0
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
JSON_LOG = ("--log-format", "json")
_ADDRESS = re.compile(r"(HTTP|gRPC|metrics) (?:(?:https?|grpcs)://)?([\w.:\[\]-]+)")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a server listens, each as ``host:port``."""

    http: str
    grpc: str
    metrics: str


def wait_until_ready(stderr: TextIO, log: list[str]) -> Addresses:
    """The addresses, once the server has said that it is ready. What is read goes into ``log``.

    Raises:
        AssertionError: the server ended before it was ready.
    """
    for line in stderr:
        log.append(line)
        message = json.loads(line)["msg"] if line.startswith("{") else line
        if message.startswith("ready: "):
            found = dict(_ADDRESS.findall(message))
            return Addresses(found["HTTP"], found["gRPC"], found["metrics"])
    raise AssertionError("the server ended before it was ready")


@contextlib.contextmanager
def serving(*command: str) -> Iterator[Addresses]:
    """The command's server, on free ports, from ready until the end of the block.

    Raises:
        AssertionError: the server ended before it was ready, or did not end with 0 after SIGINT.
    """
    log: list[str] = []
    process = subprocess.Popen(
        [*command, *FREE_PORTS], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    reader = threading.Thread(target=log.extend, args=(process.stderr,))
    try:
        addresses = wait_until_ready(process.stderr, log)
        reader.start()  # a full pipe would stop the server
        yield addresses
        process.send_signal(signal.SIGINT)  # it waits for no lame duck
        code = process.wait(END_TIMEOUT_S)
        assert code == 0, f"the server ended with {code}"
    except BaseException:
        sys.stderr.writelines(log)  # pytest shows it with the failure
        raise
    finally:
        process.kill()  # does nothing to a process that has ended
        process.wait()
        if reader.ident is not None:
            reader.join(END_TIMEOUT_S)
        process.stderr.close()


def answered(
    address: str, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of an HTTP answer. A body that is not bytes goes as JSON."""
    connection = http.client.HTTPConnection(address, timeout=END_TIMEOUT_S)
    try:
        given = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, given, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def unlikely_port() -> int:
    """A free port for a program that has to be told one: below those that the kernel gives to clients, so
    that none of them takes it before the program does.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port
