"""A server under closed loops: load clients that stay up for many of them, and what they have seen.

``python -m benchmarks.gpu.served.load`` is such a client. A line of JSON on stdin asks for one: ``{"port",
"seconds", "files"}``, each file a ModelInferRequest with a connection and a thread of its own. Once all have
been answered once, ``{"answered": true}`` goes to stdout; after a line ``go`` each is sent again as soon as
it is answered, until the time is over, and what was seen follows in one line. A call that fails is answered
by ``{"problem"}``. The end of stdin ends the program.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc

from benchmarks.gpu.running.section import Findings, SectionFailed
from benchmarks.processes import machine_busy_s
from benchmarks.servers.server import RunningServer

_GRACE_S: Final = 90.0
#: CUDA's contexts take long to open, and a load client needs none.
_NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": ""}
#: The others are for the server; more than these have never been of use.
_CPUS_PER_CLIENT: Final = 2
_MOST_CLIENTS: Final = 8
#: A client is a Python program, which has one CPU; the machine has all of them.
_BUSY: Final = 0.85


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a closed loop has seen. ``client_busy`` is the part of one CPU that the busiest client used,
    ``machine_busy`` that of all CPUs which all programs did.
    """

    answers_per_s: float
    median_latency_s: float
    client_busy: float
    machine_busy: float

    @property
    def limit(self) -> str | None:
        if self.client_busy >= _BUSY:
            return f"a load client was busy for {self.client_busy:.0%} of the time"
        if self.machine_busy >= _BUSY:
            return f"the CPUs of the machine were busy for {self.machine_busy:.0%} of the time"
        return None


class LoadClients:
    """Processes that ask when they are told to, and sleep otherwise. Made by ``load_clients``."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], findings: Findings, folder: Path) -> None:
        self._processes = processes
        self._findings = findings
        self._folder = folder
        self._limited: set[str] = set()

    def load(self, one: RunningServer, messages: Sequence[bytes], seconds: float, case: str) -> Loaded:
        """Keep each message under way for this long. A note says where the server was not the limit. Raises
        SectionFailed: a call failed.
        """
        # Messages that are the same share a file.
        file_of = {message: self._folder / f"{index}.request" for index, message in enumerate(messages)}
        for message, file in file_of.items():
            file.write_bytes(message)
        files = [str(file_of[message]) for message in messages]
        asking = self._processes[: len(files)]
        for index, process in enumerate(asking):
            share = files[index :: len(asking)]
            _say(process, json.dumps({"port": one.ports.grpc, "seconds": seconds, "files": share}))
        for process in asking:
            _heard(process, seconds)
        began_at, before_s = time.perf_counter(), machine_busy_s()
        for process in asking:
            _say(process, "go")
        seen = [_heard(process, seconds) for process in asking]
        cpu_s = machine_busy_s() - before_s
        cpus = cpu_s / (time.perf_counter() - began_at)
        loaded = Loaded(
            sum(one["answers_per_s"] for one in seen),
            median(latency_s for one in seen for latency_s in one["latencies_s"]),
            max(one["busy"] for one in seen),
            min(1.0, cpus / (os.cpu_count() or 1)),
        )
        if loaded.limit is not None and case not in self._limited:
            self._limited.add(case)
            self._findings.note(f"{case}: {loaded.limit}, which may have been the limit")
        return loaded


@contextmanager
def load_clients(findings: Findings, count: int | None = None) -> Iterator[LoadClients]:
    """While the context lasts; as many as the machine has CPUs for unless their number is given."""
    count = count or max(1, min(len(os.sched_getaffinity(0)) // _CPUS_PER_CLIENT, _MOST_CLIENTS))
    with tempfile.TemporaryDirectory(prefix="gpu-load-") as folder:
        processes = [_start() for _ in range(count)]
        try:
            yield LoadClients(processes, findings, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.served.load"],
        env={**os.environ, **_NO_GPU},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _heard(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Its next line; it never says two without being asked."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], seconds + _GRACE_S)[0]:
        raise SectionFailed(f"a load client did not answer in {seconds + _GRACE_S:.0f} s")
    if not (line := process.stdout.readline()):
        raise SectionFailed(f"a load client ended with status {process.wait()}")
    told: dict[str, Any] = json.loads(line)
    if "problem" in told:
        raise SectionFailed(f"the load failed: {told['problem']}")
    return told


# ---- the client -----------------------------------------------------------------------------------

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection each
)
_TIMEOUT_S: Final = 60.0


class Loop(threading.Thread):
    """One request, again and again, until the time is over. ``gate`` is passed when it is answered, and
    when all are to go.
    """

    def __init__(self, port: int, message: bytes, seconds: float, gate: threading.Barrier) -> None:
        super().__init__()
        self._port, self._message, self._seconds, self._gate = port, message, seconds, gate
        self.latencies_s: list[float] = []
        self.took_s = 0.0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._port}", options=_OPTIONS) as channel:
                self._loop(channel)
        except grpc.RpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"
            self._gate.abort()
        except threading.BrokenBarrierError:
            pass  # another one failed

    def _loop(self, channel: grpc.Channel) -> None:
        call = channel.unary_unary(_METHOD)
        call(self._message, timeout=_TIMEOUT_S)
        self._gate.wait()
        self._gate.wait()
        now = began_at = time.perf_counter()
        while now - began_at < self._seconds:
            call(self._message, timeout=_TIMEOUT_S)
            ended_at = time.perf_counter()
            self.latencies_s.append(ended_at - now)
            now = ended_at
        self.took_s = now - began_at


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        contents = {file: Path(file).read_bytes() for file in asked["files"]}
        _print(_seen(asked["port"], asked["seconds"], [contents[file] for file in asked["files"]]))


def _seen(port: int, seconds: float, messages: Sequence[bytes]) -> dict[str, Any]:
    gate = threading.Barrier(len(messages) + 1)
    loops = [Loop(port, message, seconds, gate) for message in messages]
    for loop in loops:
        loop.start()
    used_s = 0.0
    try:
        gate.wait()
        _print({"answered": True})
        sys.stdin.readline()
        used_s = -time.process_time()
        gate.wait()
    except threading.BrokenBarrierError:
        pass  # a loop has the problem
    for loop in loops:
        loop.join()
    used_s += time.process_time()
    if problems := [loop.problem for loop in loops if loop.problem]:
        return {"problem": problems[0]}
    return {
        "answers_per_s": sum(len(loop.latencies_s) / loop.took_s for loop in loops),
        "latencies_s": [s for loop in loops for s in loop.latencies_s],
        "busy": used_s / max(loop.took_s for loop in loops),
    }


def _print(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
