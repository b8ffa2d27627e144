"""``gpuserve dev`` at a terminal: what it shows, the keys that are pressed, and requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import termios
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from processes import descendants, wait_ended
from serving import FREE_PORTS, GPUSERVE

TIMEOUT_S = 30.0
_ADDRESS = re.compile(r"HTTP +(http://\S+)")


def put(path: Path, text: str) -> None:
    """Save a file as most editors do: a new one takes the place of the old."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)


class Terminal:
    """A terminal whose session is a command. ``with`` kills what is left of it."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._ours, self._theirs = os.openpty()
        self.mode = termios.tcgetattr(self._theirs)
        self._text = ""
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            cwd=folder,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
        )
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Terminal:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        self._reader.join(TIMEOUT_S)
        os.close(self._ours)
        assert wait_ended(left, TIMEOUT_S) == []

    @property
    def text(self) -> str:
        return self._text

    @property
    def current_mode(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def fileno(self) -> int:
        """The terminal as the command has it."""
        return self._theirs

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self, text: str, times: int = 1) -> None:
        """Wait until a text has been shown so often in all."""
        shown = self.shows(text, times, TIMEOUT_S)
        assert shown, f"{text!r} was not shown {times} times: {self._text}"

    def shows(self, text: str, times: int, timeout_s: float) -> bool:
        """Whether a text has been shown so often within a time."""
        with self._news:
            return self._news.wait_for(lambda: self._text.count(text) >= times, timeout_s)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # nobody has the other end open
                return
            with self._news:
                self._text += data.decode(errors="replace").replace("\r\n", "\n")
                self._news.notify_all()


class DevTerminal(Terminal):
    """``gpuserve dev`` at work."""

    def __init__(self, folder: Path, target: str) -> None:
        super().__init__(folder, GPUSERVE, "dev", target, *FREE_PORTS)

    def __enter__(self) -> DevTerminal:
        super().__enter__()
        return self

    def ready(self) -> None:
        self.wait("Keys: r reload")

    @property
    def address(self) -> str:
        return _ADDRESS.findall(self.text)[-1]

    def infer(self, model: str, value: float = 1.0) -> float:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}
        url = f"{self.address}/v2/models/{model}/infer"
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return float(json.load(answer)["outputs"][0]["data"][0])

    def wait_answer(self, model: str, expected: float) -> float:
        """Wait until a model answers so, without an error in between: the seconds that it took."""
        began = time.monotonic()
        while self.infer(model) != expected:
            assert time.monotonic() - began < TIMEOUT_S, self.text
        return time.monotonic() - began
