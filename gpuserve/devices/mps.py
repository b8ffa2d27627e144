"""CUDA's Multi-Process Service (MPS), by which processes compute on a GPU together and not in turns: a
control daemon that runs already, or one that the server starts and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from gpuserve.core.errors import StartupError
from gpuserve.devices.names import AUTO, OFF, ON

logger = logging.getLogger(__name__)

_CONTROL: Final = "nvidia-cuda-mps-control"
PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
_PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
#: The directory of a daemon without the variable ``PIPES``.
_USUAL_PIPES: Final = "/tmp/nvidia-mps"
#: A command that changes nothing; a daemon answers with a number.
_QUESTION: Final = "get_default_active_thread_percentage\n"
_ANSWER_TIMEOUT_S: Final = 5.0
_START_TIMEOUT_S: Final = 10.0
#: Ends the daemon when this process closes its end of the pipe, or is dead.
_END_WITH_PIPE: Final = f'cat > /dev/null; echo quit | {_CONTROL}; rm -rf "${PIPES}"'


class MpsDaemon:
    """The MPS control daemon for the workers of one server. ``mode`` is the setting ``mps``: with "auto" the
    server starts a daemon only for instances with a share of a GPU.
    """

    def __init__(self, mode: str = AUTO) -> None:
        self._mode = mode
        #: The directory of the own daemon, and the process that ends the daemon.
        self._own: tuple[str, subprocess.Popen[bytes]] | None = None
        self._refused = False
        #: The answer of ``running_daemon`` since ``ask_again``. The server waits for the process that asks.
        self._running: str | None = None
        #: The daemon that workers use, as ``gpuserve status`` shows it.
        self.text = ""

    def variables(self, gpu_share: float) -> dict[str, str]:
        """Return the environment variables of a process on a GPU. Start a daemon if the process needs one and
        none answers. Raise ``StartupError`` with mode "on" if there can be none.
        """
        if self._mode == OFF:
            return {PIPES: os.devnull}  # where CUDA finds no daemon
        is_needed = self._mode == ON or bool(gpu_share and not self._refused)
        own = self._own[0] if is_needed and self._own is not None else ""
        if own:
            found = own if _is_alive(own) else ""
        else:
            if self._running is None:
                self._running = running_daemon()
            found = self._running
        if not found and is_needed:
            self.close()
            try:
                found = own = self._start()
            except StartupError as error:
                self.text = str(error)
                if self._mode == ON:
                    raise
                self._refused = True
                logger.warning("gpu_share of instances has no effect: %s", error)
        if not found:
            return {}
        self.text = f"own daemon in {own}" if own else f"daemon in {found}"
        share = {_PERCENTAGE: f"{100 * gpu_share:g}"} if gpu_share else {}
        return {**share, **(dict.fromkeys((PIPES, LOGS), own) if own else {})}

    def ask_again(self) -> None:
        """Ask before the next start of a process, because a process on a GPU has died."""
        self._running = None

    def close(self) -> None:
        """End the own daemon, if there is one, after its clients have ended."""
        if self._own is not None:
            (_, ending), self._own = self._own, None
            _end(ending)

    def _start(self) -> str:
        """Start a daemon and return its directory, or raise ``StartupError``."""
        import tempfile  # here, because most servers start no daemon

        if missing := missing_daemon():
            raise StartupError(f"cannot start MPS: {missing}")
        directory = tempfile.mkdtemp(prefix="gpuserve-mps-")
        environment = {**os.environ, PIPES: directory, LOGS: directory}
        ending = subprocess.Popen(
            ["/bin/sh", "-c", _END_WITH_PIPE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        output = Path(directory, "start.log")
        try:
            with output.open("wb") as file:  # not a pipe, whose end the daemon could keep open
                _run(["-d"], directory, _START_TIMEOUT_S, stdout=file)
            if not running_daemon(directory):
                raise OSError(0, "it does not answer")
        except (OSError, subprocess.SubprocessError) as error:
            told = output.read_text(errors="replace").strip().splitlines()
            why = told[-1] if told else getattr(error, "strerror", "") or str(error)
            _end(ending)
            raise StartupError(f"cannot start MPS: {_CONTROL} -d failed: {why}") from None
        self._own = directory, ending
        logger.info("started an MPS control daemon in %s", directory)
        return directory


def running_daemon(directory: str = "") -> str:
    """Return the directory of a control daemon that answers, by default of the one that CUDA would find, or
    "" if there is none. The pipes of a daemon outside the container count even without its program.
    """
    directory = directory or os.environ.get(PIPES) or _USUAL_PIPES
    if not Path(directory, "control").exists():
        return ""
    try:
        float(_run([], directory, _ANSWER_TIMEOUT_S, stdout=subprocess.PIPE, command=_QUESTION).stdout)
    except FileNotFoundError:
        return directory
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return directory


def _is_alive(directory: str) -> bool:
    file = Path(directory, f"{_CONTROL}.pid")
    if not file.exists():
        return bool(running_daemon(directory))
    try:
        pid = int(file.read_text())
        return _CONTROL.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except (OSError, ValueError):
        return False


def missing_daemon() -> str:
    """Return why a server cannot use MPS, or ""."""
    import shutil  # as above

    if shutil.which(_CONTROL) is not None or running_daemon():
        return ""
    place = os.environ.get(PIPES) or _USUAL_PIPES
    return f"{_CONTROL} is not on the PATH, and no control daemon has its pipes in {place}"


def _run(
    arguments: list[str], directory: str, timeout_s: float, *, stdout: Any, command: str = ""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [_CONTROL, *arguments],
        input=command.encode(),
        stdout=stdout,
        stderr=subprocess.STDOUT,
        env={**os.environ, PIPES: directory, LOGS: directory},
        timeout=timeout_s,
        check=True,
    )


def _end(ending: subprocess.Popen[bytes]) -> None:
    assert ending.stdin is not None
    ending.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on after this process
        ending.wait(_ANSWER_TIMEOUT_S)
