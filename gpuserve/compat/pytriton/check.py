"""Helpers that tests of PyTriton's programs import. Two classes need psutil, as PyTriton's do."""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import importlib
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, Self

DEFAULT_LOG_FORMAT: Final = (
    "%(asctime)s - %(levelname)8s - %(process)8d - %(threadName)s - %(name)s: %(message)s"
)
_TOO_VERBOSE: Final = re.compile(
    r"Triton Inference Server is running with enabled verbose logs.*It may affect inference performance."
)
_CONTAINERS: Final = ("NVIDIA_PYTORCH_VERSION", "NVIDIA_TENSORFLOW_VERSION")


def find_free_port() -> int:
    """Return a TCP port that is free at this moment."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def search_warning_on_too_verbose_log_level(logs: str) -> re.Match[str] | None:
    return _TOO_VERBOSE.search(logs)


def get_current_container_version() -> str | None:
    """Return the version of the NVIDIA container around this process, or None."""
    found = next((os.environ[name] for name in _CONTAINERS if os.environ.get(name)), None)
    return found and found.partition("-")[0]


def verify_docker_image_in_readme_same_as_tested(readme_path: str, image_name_with_version: str) -> None:
    """Raise AssertionError if a text names an image by another version."""
    framework = image_name_with_version.partition(":")[0].rpartition("/")[2]
    for named in re.finditer(rf"[\w/.\-:]+/{framework}:[\w.-]+", Path(readme_path).read_text()):
        if named[0] != image_name_with_version:
            raise AssertionError(f"{named[0]} != {image_name_with_version}")


class ScriptThread(threading.Thread):
    """A thread that runs a command, during a ``with`` block or to the command's end. ``output`` is the text
    that the command has printed. ``process`` is a ``psutil.Popen`` while the command runs.
    """

    def __init__(self, cmd: Sequence[str], workdir: str | None = None, name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self.cmd = cmd
        self.workdir = workdir
        self.process: Any = None
        self.returncode: int | None = None
        self._lines: list[str] = []
        self._started_or_failed = threading.Event()
        self._logger = logging.getLogger(self.name)

    def __enter__(self) -> Self:
        self.start()
        self._started_or_failed.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    def run(self) -> None:
        try:
            self.process = importlib.import_module("psutil").Popen(
                self.cmd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self.workdir,
                text=True,
                env={"PYTHONUNBUFFERED": "1", **os.environ},
            )
        finally:
            self._started_or_failed.set()
        with self.process as process:
            for line in process.stdout:
                self._logger.info("%s", line.rstrip())
                self._lines.append(line.rstrip())
            self.returncode = process.wait()
        self.process = None


class TestMonitoringContext:
    """A context that logs to stderr and to a file that rotates, as the options of ``extend_args`` say, and
    logs the state of the process at intervals.
    """

    __test__ = False  # pytest does not collect the class

    @staticmethod
    def extend_args(parser: argparse.ArgumentParser) -> None:
        for flag in ("--verbose", "--compress-logs", "--enable-fault-handler"):
            parser.add_argument(flag, action="store_true")
        parser.add_argument("--log-path")
        parser.add_argument("--maximum-log-file", type=int, default=10 << 20)
        for flag in ("--faulthandler-interval", "--process-monitoring-interval"):
            parser.add_argument(flag, type=float, help="seconds")

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        args, log = self._args, logging.getLogger()
        logging.basicConfig(level=logging.DEBUG, format=DEFAULT_LOG_FORMAT)
        log.handlers[0].setLevel(logging.DEBUG if args.verbose else logging.INFO)
        if args.log_path is not None:
            file = RotatingFileHandler(args.log_path, maxBytes=args.maximum_log_file, backupCount=500)
            file.setFormatter(logging.Formatter(DEFAULT_LOG_FORMAT))
            if args.compress_logs:
                file.namer = "{}.gz".format
                file.rotator = _compress
            log.addHandler(file)
        if args.enable_fault_handler:
            faulthandler.enable()
        if args.faulthandler_interval is not None:
            faulthandler.dump_traceback_later(args.faulthandler_interval, repeat=True)
        if args.process_monitoring_interval is not None:
            threading.Thread(target=self._monitor, name="monitoring", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _monitor(self) -> None:
        monitoring = ProcessMonitoring(os.getpid(), logging.getLogger(), logging.DEBUG)
        while not self._ended.wait(self._args.process_monitoring_interval):
            monitoring.dump_state()


def _compress(source: str, target: str) -> None:
    with open(source, "rb") as plain, gzip.open(target, "wb") as packed:
        shutil.copyfileobj(plain, packed)
    os.remove(source)


class ProcessMonitoring:
    """A logger of the state of a process and its children."""

    def __init__(
        self,
        pid: int,
        logger: logging.Logger | None = None,
        loglevel: int = logging.INFO,
        remove_color: bool = False,
    ) -> None:
        self._process = importlib.import_module("psutil").Process(pid)
        self._logger = logger or logging.getLogger("monitoring")
        self._level = loglevel
        self._monitors: list[Callable[[int], None]] = []

    def register_custom_monitor(self, custom_monitor: Callable[[int], None]) -> None:
        """Call a function with the process id of each process whenever the state is logged."""
        self._monitors.append(custom_monitor)

    @property
    def children(self) -> list[Any]:
        return list(self._process.children(recursive=True)) if self._process.is_running() else []

    def dump_state(self) -> None:
        for process in [self._process, *self.children]:
            self._logger.log(self._level, "%s", process)
            for monitor in self._monitors:
                monitor(process.pid)
