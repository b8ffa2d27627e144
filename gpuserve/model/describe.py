"""Questions about callables, each answered by a child process, several of which run concurrently.

The asking process runs no user code: the crash of a callable is an answer too. ``python -m
gpuserve.model.describe ENVIRONMENT`` answers one question in another Python environment.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from gpuserve.devices.placement import n_processors

logger = logging.getLogger(__name__)

#: Least number of concurrent children. Each child may load a whole framework, so more run only on more
#: processors.
_LEAST_CHILDREN: Final = 2
#: Long enough to import a framework from a cold disk; a module that blocks is not waited for any longer.
ANSWER_TIMEOUT_S: Final = 300.0
#: A child that takes longer is logged, once. Without a configured log the line goes to stderr as it is.
_SLOW_S: Final = 3.0
#: The time at which a child writes its stacks, as a part of the timeout.
_STACKS_AT: Final = 0.8


@dataclass(frozen=True)
class CallableQuestion:
    """A callable by its path, without an attribute the only one of a file, and the known part of its model's
    declaration, of which None is not declared. ``by_types``: its types may declare the rest.
    """

    path: str
    base_dir: str
    kwargs: Mapping[str, Any]
    decoupled: bool | None = None
    python: str = ""
    by_types: bool = True
    inputs: tuple[str, ...] | None = None
    openai: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class CallableAnswer:
    """A callable's declaration in the form of a config file, or the ``problem``; ``path`` leads to it."""

    declared: Mapping[str, Any]
    problem: str | None = None
    path: str = ""


def ask_callables(
    questions: Iterable[CallableQuestion], timeout_s: float = ANSWER_TIMEOUT_S
) -> list[CallableAnswer]:
    """Return the answers in the order of the questions. Output of user code goes to stderr. Each child has
    ``timeout_s`` seconds once the answers before it are there, and then writes its stacks.
    """
    at_once = max(_LEAST_CHILDREN, int(n_processors()))
    answers: list[CallableAnswer] = []
    running: deque[tuple[CallableQuestion, subprocess.Popen[bytes]]] = deque()
    try:
        for question in questions:
            if len(running) == at_once:
                answers.append(_answer(*running.popleft(), timeout_s))
            running.append((question, _start(question, timeout_s)))
        while running:
            answers.append(_answer(*running.popleft(), timeout_s))
    finally:
        for _, child in running:
            child.kill()
            child.communicate()
    return answers


def _start(question: CallableQuestion, timeout_s: float) -> subprocess.Popen[bytes]:
    message = vars(question).copy()
    python = message.pop("python")
    message |= {"asker": os.getpid(), "stacks_at": time.monotonic() + _STACKS_AT * timeout_s}
    program = ["gpuserve.model.describe", python] if python else ["gpuserve.model.describe_child"]
    # Only the asking process handles Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        command = [sys.executable, "-P", "-m", *program]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert child.stdin is not None
    try:
        child.stdin.write(msgpack.packb(message))
        child.stdin.close()
    except BrokenPipeError:  # the child has ended already, and its answer says so
        pass
    child.stdin = None  # the question is sent: ``communicate`` must not close the pipe again
    return child


def _answer(question: CallableQuestion, child: subprocess.Popen[bytes], timeout_s: float) -> CallableAnswer:
    try:
        try:
            output, _ = child.communicate(timeout=min(_SLOW_S, timeout_s))
        except subprocess.TimeoutExpired:
            if timeout_s <= _SLOW_S:
                raise
            if sys.stderr.isatty() or logging.getLogger().handlers:  # else a JSON log may follow on stderr
                logger.warning("importing %s to learn the tensors of its model …", question.path)
            output, _ = child.communicate(timeout=timeout_s - _SLOW_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()  # a process that the child started may hold the other end
        return CallableAnswer({}, f"{question.path!r} did not return its declaration within {timeout_s:g} s")
    try:
        answer = msgpack.unpackb(output)
    except ValueError:
        code = child.returncode
        names = {-one.value: one.name for one in signal.Signals}
        manner = f"by {names.get(code, f'signal {-code}')}" if code < 0 else f"with exit status {code}"
        return CallableAnswer({}, f"importing {question.path!r} ended the process {manner}")
    return CallableAnswer(answer.get("declared", {}), answer.get("error"), answer.get("path", question.path))


def main() -> None:
    # Only a process in another environment needs both.
    from gpuserve.backends.environments import EnvironmentProblem, exec_in_environment

    try:
        exec_in_environment(sys.argv[1], "gpuserve.model.describe_child", ())
    except EnvironmentProblem as problem:
        sys.stdout.buffer.write(msgpack.packb({"error": str(problem)}))


if __name__ == "__main__":
    main()
