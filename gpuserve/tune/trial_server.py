"""A server with the settings of one trial: a process of its own on free ports of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Final

from gpuserve.bench.plan.errors import BenchError
from gpuserve.client.client_settings import ServerUrl
from gpuserve.config.load import Configuration, load_file
from gpuserve.config.precedence import Override
from gpuserve.config.problems import Origin
from gpuserve.config.yaml_document import Path

_END_TIMEOUT_S: Final = 30.0
_LABEL: Final = "gpuserve tune"
_ADDRESS = re.compile(r"(HTTP|gRPC) (?:https?://|grpcs?://)?([\w.:\[\]-]+)")
_TITLES: Final = {"http": "HTTP", "grpc": "gRPC"}
#: What a config may say of its listeners, and a server that only the load generator meets does not need.
_ON_THIS_MACHINE: Final[dict[str, Any]] = {
    "host": "127.0.0.1",
    "http_port": 0,
    "grpc_port": 0,
    "metrics_port": None,
    "health_port": None,
    "lame_duck_s": 0.0,
    "log_format": "json",
    "log_level": "info",
    "tls_certfile": None,
    "tls_keyfile": None,
    "tls_client_ca": None,
    "restricted_endpoints": [],
    "access_token": None,
    "access_rules": [],
}


class TrialFailed(BenchError):
    """The server does not start with these settings. The text is its last message."""


def overrides_of(values: Mapping[Path, Any]) -> list[tuple[Path, Any]]:
    """What a trial's server has in the place of the file's values."""
    return [*((("server", key), value) for key, value in _ON_THIS_MACHINE.items()), *values.items()]


def configuration_of(config: str, values: Iterable[tuple[Iterable[str | int], Any]]) -> Configuration:
    """The configuration of a file with other values at these paths; ConfigProblems: they do not fit."""
    overrides = [Override(tuple(path), value, _LABEL, Origin.FLAG) for path, value in values]
    return load_file(config, os.environ, overrides)


@contextlib.contextmanager
def trial_server(config: str, values: Mapping[Path, Any], protocol: str) -> Iterator[ServerUrl]:
    """A running server in its own session, until the end of the block; TrialFailed: it never was ready."""
    overrides = json.dumps(overrides_of(values))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpuserve.cli.verbs.trial_served", str(os.getpid()), config, overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    reader: threading.Thread | None = None
    try:
        address = _wait_until_ready(process.stderr, protocol)
        reader = threading.Thread(target=_read_all, args=(process.stderr,), daemon=True)
        reader.start()  # a full pipe would stop the server
        yield ServerUrl.parse(f"{protocol}://{address}")
    finally:
        _end(process)
        if reader is not None:
            reader.join(_END_TIMEOUT_S)
        process.stderr.close()


def _wait_until_ready(stderr: IO[str], protocol: str) -> str:
    last = "the server ended without a message"
    for line in stderr:
        said = _message(line)
        if said.startswith("ready: "):
            found: dict[str, str] = dict(_ADDRESS.findall(said))
            if _TITLES[protocol] not in found:
                raise TrialFailed(f"the server has no port for {_TITLES[protocol]}")
            return found[_TITLES[protocol]]
        last = said or last
    raise TrialFailed(last)


def _message(line: str) -> str:
    """The message in a log line, or the line itself where it is no JSON."""
    try:
        return str(json.loads(line)["msg"])
    except (KeyError, TypeError, ValueError):
        return line.strip()


def _read_all(stderr: IO[str]) -> None:
    for _ in stderr:
        pass


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
