"""A model that writes down its calls, and that dies, blocks or misbehaves where a test asks for it.

All orders come through one directory: ``journal`` is written, ``die`` (how, once) is taken, and while
``shut`` exists a call does not return.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gpuserve.decorators import batch

#: A request with this value in it kills whichever worker runs it.
POISON = -13.0


def die(how: str) -> None:
    match how:
        case "exit":
            os._exit(0)
        case "abort":
            os.abort()
        case "segfault":
            ctypes.string_at(0)
        case _:
            os.kill(os.getpid(), getattr(signal, how))


class Mortal:
    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.calls = 0
        self.kept: list[Any] = []

    @batch
    def __call__(self, x: Any) -> Any:
        self.calls += 1
        how = self.told_to_die()  # before the journal, by which a test knows that this call has begun
        self.note(x)
        self.act(x)
        if (x == POISON).any():
            die("SIGKILL")
        if how:
            self.die(how)
        while (self.directory / "shut").exists():
            time.sleep(0.002)
        rows = (len(x), 1)
        return {"y": x * 2, "calls": np.full(rows, self.calls), "pid": np.full(rows, os.getpid())}

    def note(self, x: Any) -> None:
        line = {"pid": os.getpid(), "rows": len(x), "first": float(x.flat[0]), "at": time.monotonic()}
        with open(self.directory / "journal", "a") as journal:
            journal.write(json.dumps(line) + "\n")

    def die(self, how: str) -> None:
        die(how)

    def told_to_die(self) -> str:
        order = self.directory / "die"
        try:
            how = order.read_text()
            order.unlink()
        except FileNotFoundError:
            return ""
        return how

    def act(self, x: Any) -> None:
        """Nothing out of the way."""


class Writer(Mortal):
    """Writes to its input before anything else."""

    def act(self, x: Any) -> None:
        x += 1000


class Keeper(Mortal):
    """Keeps a slice of every input until it is given a negative value."""

    def act(self, x: Any) -> None:
        if x.flat[0] < 0:
            self.kept.clear()
        else:
            self.kept.append(x[:, 1:])


class Rude(Mortal):
    """Does to its process whatever user code may do."""

    def act(self, x: Any) -> None:
        if self.calls > 1:
            return
        sys.stdout.write("a line of the user's\n")
        sys.stderr.write('{"ts": "not a log line"\n')
        warnings.warn("a warning of the user's", stacklevel=1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]


class Parent(Mortal):
    """Starts a child that would outlive it; the child's pid and the kinds of its descriptors are noted."""

    own_session = False
    _CHILD = (
        "import os, sys, time, pathlib\n"
        "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in map(int, os.listdir('/proc/self/fd'))"
        " if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "pathlib.Path(sys.argv[1], 'child.new').write_text('\\n'.join([str(os.getpid()), *links]))\n"
        "os.rename(sys.argv[1] + '/child.new', sys.argv[1] + '/child')\n"
        "time.sleep(60)\n"
    )

    def act(self, x: Any) -> None:
        if self.calls == 1 and not (self.directory / "child").exists():
            command = [sys.executable, "-S", "-c", self._CHILD, str(self.directory)]
            subprocess.Popen(command, close_fds=False, start_new_session=self.own_session)
            while not (self.directory / "child").exists():
                time.sleep(0.002)


class Releaser(Parent):
    """Starts a child in a session of its own, because it is to outlive it."""

    own_session = True


class Printer(Mortal):
    """Prints 20,000 lines of 1000 bytes in its first call."""

    def act(self, x: Any) -> None:
        if self.calls == 1:
            for _ in range(20):
                sys.stdout.write(("x" * 999 + "\n") * 1000)
            sys.stdout.flush()


class Forker(Mortal):
    """Forks a child without exec that would outlive it."""

    def act(self, x: Any) -> None:
        if self.calls == 1 and not (self.directory / "child").exists():
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            (self.directory / "child").write_text(str(pid))


def load_fails(directory: str) -> Any:
    raise RuntimeError("there are no weights")


def load_slowly(directory: str) -> Any:
    """Loads for as long as ``shut`` exists."""
    loading = Path(directory, "loading")
    loading.touch()
    while Path(directory, "shut").exists():
        time.sleep(0.002)
    return Mortal(directory)


def load_while_there_are_tokens(directory: str) -> Any:
    """Every load takes a file ``token…``, and fails where there is none."""
    for token in sorted(Path(directory).glob("token*")):
        try:
            token.unlink()
        except FileNotFoundError:  # another load was faster
            continue
        return Mortal(directory)
    raise RuntimeError("there are no tokens")


def load_once(directory: str) -> Any:
    """Loads the first time, and never again."""
    token = Path(directory, "loaded")
    if token.exists():
        raise RuntimeError("it loads only once")
    token.touch()
    return Mortal(directory)
