"""Questions about callables, each answered by a child process of its own, several of which run side by side.
No user code runs in the process that asks: a callable that crashes is an answer as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from gpuserve.settings.processors import n_processors

#: Children that run at once where there are fewer processors: each may load a whole framework.
_LEAST_CHILDREN: Final = 2
#: A module may import a framework from a cold disk, and not wait for something for ever.
ANSWER_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class Question:
    """A callable by its path, and what is known of the model that it is for.

    ``decoupled`` None: the callable decides itself in how many responses it answers. ``python`` is the
    environment that its workers run in, "" for the server's own. ``by_types``: what it does not say
    otherwise is asked of its types. A path without an attribute means the only callable of a file.
    """

    path: str
    base_dir: str
    kwargs: Mapping[str, Any]
    decoupled: bool | None = None
    python: str = ""
    by_types: bool = True


@dataclass(frozen=True)
class Answer:
    """What a callable says of itself, in the form of a config file's entry, or the ``problem`` with it.
    ``path`` leads to it, also where only its file was known.
    """

    declared: Mapping[str, Any]
    problem: str | None = None
    path: str = ""


def ask(questions: Iterable[Question], timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
    """Answer every question, in their order. What user code prints goes to stderr. Nobody is waited for
    longer than ``timeout_s``.
    """
    at_once = max(_LEAST_CHILDREN, int(n_processors()))
    answers: list[Answer] = []
    running: deque[tuple[Question, subprocess.Popen[bytes]]] = deque()
    try:
        for question in questions:
            if len(running) == at_once:
                answers.append(_answer(*running.popleft(), timeout_s))
            running.append((question, _start(question)))
        while running:
            answers.append(_answer(*running.popleft(), timeout_s))
    finally:
        for _, child in running:
            child.kill()
            child.communicate()
    return answers


def _start(question: Question) -> subprocess.Popen[bytes]:
    said = vars(question).copy()
    python = said.pop("python")
    said["asker"] = os.getpid()
    program = ["gpuserve.describe.elsewhere", python] if python else ["gpuserve.describe.child"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for who asks
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert child.stdin is not None
    try:
        child.stdin.write(msgpack.packb(said))
        child.stdin.close()
    except BrokenPipeError:  # it is gone already; its answer says so
        pass
    child.stdin = None  # said all: ``communicate`` is not to close it once more
    return child


def _answer(question: Question, child: subprocess.Popen[bytes], timeout_s: float) -> Answer:
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()  # what it has started may hold the other end
        return Answer({}, f"{question.path!r} did not say within {timeout_s:g} s what it is")
    try:
        answer = msgpack.unpackb(output)
    except ValueError:
        manner = _manner(child.returncode)
        return Answer({}, f"importing {question.path!r} ended the process {manner}")
    return Answer(answer.get("declared", {}), answer.get("error"), answer.get("path", question.path))


def _manner(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit status {returncode}"
    try:
        return f"by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"
