"""The load generators: one run of h2load, wrk or a client of ours against one server, as a ``LoadResult``.

The first two are C programs on one thread, faster than any server here. A run in which any request failed is
no result: it raises. h2load does not read grpc-status, and an error over gRPC is an HTTP 200 without a body,
so the bytes that came back are checked against the size of the right answer.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.figures import percentile
from benchmarks.payloads import EchoInStreamPayload, Payload, framed
from benchmarks.servers.server import Api, Option, RunningServer, Server

_WRK_SCRIPT = Path(__file__).parent / "wrk.lua"
_MIN_S = 2.0  # in which 64 streams at once end on a busy machine
_START_S = 0.5  # until the load beside a timed one has its requests in flight
_GRACE_S = 30.0  # for a generator to end after its time


class LoadFailed(Exception):
    """A run had failed requests, wrong answers, or did not run at all."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run. ``answers`` are the messages that came back: one a request, or as many as its stream has.

    Latencies are None where the generator was not asked for them.
    """

    answers: int
    answers_per_s: float
    median_latency_s: float | None = None
    p99_latency_s: float | None = None

    @classmethod
    def of_times(cls, answers: int, answers_per_s: float, times_s: list[float]) -> LoadResult:
        """With the latencies of these times, of which there is at least one."""
        return cls(answers, answers_per_s, statistics.median(times_s), percentile(times_s, 99))


class Load:
    """A way of loading a server. ``program`` is needed on PATH; Debian and Ubuntu have it in ``package``.

    A server is asked in the first of ``apis`` that it has, and started with ``option`` if there is one.
    """

    __slots__ = ()
    program: ClassVar[str] = sys.executable
    package: ClassVar[str] = "python3"
    apis: ClassVar[tuple[Api, ...]]
    payload: Payload
    option: Option | None = None

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        """Load the server for this long; ``answer`` is the body of a right gRPC answer. Raises LoadFailed:
        not every request was answered right.
        """
        raise NotImplementedError


def api_between(load: Load, server: Server) -> Api | None:
    """How this load asks this server; None where it cannot."""
    payload = load.payload
    if payload.model not in server.models or payload.nbytes > server.largest_nbytes:
        return None
    if load.option is not None and load.option not in server.options:
        return None
    return next((api for api in load.apis if api in server.apis), None)


def missing(load: Load) -> str | None:
    if shutil.which(load.program):
        return None
    return f"{load.program} is not on PATH (apt install {load.package})"


@dataclass(frozen=True, slots=True)
class GrpcLoad(Load):
    """h2load: ``streams`` requests in flight on each of ``connections``. ``latency`` times every request."""

    payload: Payload
    connections: int
    streams: int
    latency: bool = False
    option: Option | None = None
    program: ClassVar[str] = "h2load"
    package: ClassVar[str] = "nghttp2-client"
    apis: ClassVar[tuple[Api, ...]] = (Api.GRPC, Api.BODY_ECHO)

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            log = Path(folder) / "requests.log"
            body = Path(folder) / "body.bin"
            body.write_bytes(framed(self.payload.grpc_message()))
            headers = [("content-type", "application/grpc"), ("te", "trailers")]
            headers += () if self.option is None else self.option.headers
            scheme = "http" if one.server.tls is None else "https"
            words = [
                *("-d", str(body)),
                *(word for name, value in headers for word in ("-H", f"{name}: {value}")),
                f"{scheme}://127.0.0.1:{one.ports.grpc}{self.payload.path}",
            ]
            answer_nbytes = len(answer)
            if self.option is Option.COMPRESSED:  # it comes to what one answer does
                answer_nbytes = _data_nbytes(_output([self.program, "-n", "1", *words], seconds))
            command = [
                *(self.program, "-t", "1", "-c", str(self.connections), "-m", str(self.streams)),
                *("-D", f"{round(seconds * 1000)}ms"),
                *(("--log-file", str(log)) if self.latency else ()),
            ]
            output = _output([*command, *words], seconds)
            in_flight = self.connections * self.streams
            parsed = parse_h2load(output, answer_nbytes, in_flight, self.payload.messages)
            if not self.latency:
                return parsed
            times_s = [int(line.split("\t")[2]) / 1e6 for line in log.read_text().splitlines()]
        return LoadResult.of_times(parsed.answers, parsed.answers_per_s, times_s)


@dataclass(frozen=True, slots=True)
class BesideLoad(GrpcLoad):
    """One timed request in flight while the load ``other`` runs on another model of the server."""

    connections: int = 1
    streams: int = 1
    latency: bool = True
    other: Load = field(kw_only=True)

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        api = api_between(self.other, one.server)
        if api is None:
            raise LoadFailed(f"{one.server.title} cannot run the load beside the timed requests")
        others_answer = self.other.payload.check(one, api)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.other.run, one, seconds + _START_S, others_answer)
            time.sleep(_START_S)
            result = super(BesideLoad, self).run(one, seconds, answer)
            running.result()
        return result


@dataclass(frozen=True, slots=True)
class GrpcStreamLoad(GrpcLoad):
    """h2load with calls whose answer is a stream: half-closed, and done when the stream has ended."""

    apis: ClassVar[tuple[Api, ...]] = (Api.STREAM,)


@dataclass(frozen=True, slots=True)
class HttpLoad(Load):
    """wrk: one request in flight on each of ``connections``, HTTP/1.1, in the server's own API. With
    ``close`` each request has a connection of its own.
    """

    payload: Payload
    connections: int
    close: bool = field(default=False, kw_only=True)
    program: ClassVar[str] = "wrk"
    package: ClassVar[str] = "wrk"
    apis: ClassVar[tuple[Api, ...]] = (Api.HTTP_BINARY, Api.HTTP_JSON, Api.BYTES, Api.PLAIN_JSON)

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        """One wrk run; see ``Load``. wrk counts whole seconds, so the time is rounded up."""
        del answer  # an error over HTTP has a status of its own
        api = api_between(self, one.server)
        assert api is not None, f"{one.server.title} cannot be asked over HTTP"
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            request = self.payload.http_request(api)
            body = Path(folder) / "http.bin"
            body.write_bytes(request.body)
            headers = [word for header in request.headers.items() for word in header]
            headers += ["Connection", "close"] if self.close else []
            command = [
                *(self.program, "-t", "1", "-c", str(self.connections), "-d", f"{-int(-seconds // 1)}s"),
                *("-s", str(_WRK_SCRIPT), f"http://127.0.0.1:{one.ports.http}{request.path}"),
                *("--", str(body), *headers),
            ]
            return parse_wrk(_output(command, seconds))


@dataclass(frozen=True, slots=True)
class JsonLoad(HttpLoad):
    """The same in JSON, also where a server has a binary form."""

    apis: ClassVar[tuple[Api, ...]] = (Api.HTTP_JSON, Api.PLAIN_JSON)


@dataclass(frozen=True, slots=True)
class BenchLoad(Load):
    """``gpuserve bench`` in a closed loop on one connection."""

    payload: Payload
    in_flight: int = 1
    apis: ClassVar[tuple[Api, ...]]
    #: The latency in the report.
    latency: ClassVar[str] = "latency"

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        del answer  # the payload has checked it; here each response is counted and each status read
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            report = Path(folder) / "report.json"
            command = [
                *(sys.executable, "-m", "gpuserve", "bench", self.payload.model, *self.content(Path(folder))),
                *("--url", f"grpc://127.0.0.1:{one.ports.grpc}", "--concurrency", str(self.in_flight)),
                *("--connections", "1", "--processes", "1", "--warmup", "0.1s"),
                *("--duration", f"{max(seconds, _MIN_S)}s"),
                *("--output", str(report)),
            ]
            _output(command, seconds)
            (level,) = json.loads(report.read_text())["levels"]
        if level["failures"] or not level["completed"]:
            raise LoadFailed(f"of {level['completed']} requests these failed: {level['failures']}")
        answers, per_s = (level[key] * self.payload.messages for key in ("completed", "throughput"))
        median_s, p99_s = (level[self.latency][key] / 1e3 for key in ("p50_ms", "p99_ms"))
        return LoadResult(answers, per_s, median_s, p99_s)

    def content(self, folder: Path) -> list[str]:
        """Return the words of the command line for the content of the requests."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FirstResponseLoad(BenchLoad):
    """Streams, each followed by the next. The latencies are those of the first message of each."""

    apis: ClassVar[tuple[Api, ...]] = (Api.STREAM,)
    latency: ClassVar[str] = "first"

    def content(self, folder: Path) -> list[str]:
        data = folder / "data.json"
        data.write_text(json.dumps({"data": [{"count": [[self.payload.messages]]}]}))
        return ["--data", str(data)]


@dataclass(frozen=True, slots=True)
class SharedMemoryLoad(BenchLoad):
    """Requests whose tensors are in system shared memory, one in flight."""

    apis: ClassVar[tuple[Api, ...]] = (Api.SHARED_MEMORY,)

    def content(self, folder: Path) -> list[str]:
        return ["--shape", f"x:{self.payload.nbytes // 4}", "--shared-memory", "system"]


@dataclass(frozen=True, slots=True)
class InStreamLoad(Load):
    """The in-stream client: one stream on one connection, with so many requests in flight inside it."""

    payload: EchoInStreamPayload
    in_flight: int
    apis: ClassVar[tuple[Api, ...]] = (Api.STREAM,)

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            request_file, answer_file = Path(folder) / "request.bin", Path(folder) / "answer.bin"
            request_file.write_bytes(framed(self.payload.grpc_message()))
            answer_file.write_bytes(answer)
            command = [
                *(sys.executable, "-m", "benchmarks.stream_client", str(one.ports.grpc), self.payload.path),
                *(str(self.in_flight), str(seconds), str(request_file), str(answer_file)),
            ]
            result = json.loads(_output(command, seconds))
        return LoadResult(result["answers"], result["answers"] / result["took_s"])


def parse_h2load(output: str, answer_nbytes: int, in_flight: int, messages: int = 1) -> LoadResult:
    """What h2load printed. An answer of several ``messages``, all of one size, is counted by them: of those
    still under way when the time was over, the part that has come counts as well. Raises LoadFailed: a
    request failed, or the answers together have not the size of right ones.
    """
    finished_in, unit, rate = _words(r"finished in ([\d.]+)(m?s), ([\d.]+) req/s", output)
    counts = _words(
        r"requests: (\d+) total, \d+ started, (\d+) done, (\d+) succeeded, "
        r"(\d+) failed, (\d+) errored, (\d+) timeout",
        output,
    )
    done, succeeded, failed, errored, timed_out = map(int, counts[1:])
    if failed or errored or timed_out or succeeded != done:
        raise LoadFailed(
            f"of {done} requests {failed} failed, {errored} had errors and {timed_out} timed out:\n{output}"
        )
    nbytes = _data_nbytes(output)
    # Answers that were still on their way when the time was over may be counted in part.
    if not done * answer_nbytes <= nbytes <= (done + in_flight) * answer_nbytes:
        raise LoadFailed(
            f"{done} answers have {nbytes} bytes together; right ones have {answer_nbytes} each:\n{output}"
        )
    answers = nbytes * messages // answer_nbytes if messages > 1 else done
    if not answers:
        raise LoadFailed("no request was answered before the time was over")
    took_s = done / float(rate) if done else float(finished_in) * (1e-3 if unit == "ms" else 1.0)
    return LoadResult(answers, answers / took_s)


def _data_nbytes(output: str) -> int:
    return int(_words(r"\((\d+)\) data", output)[0])


def parse_wrk(output: str) -> LoadResult:
    """What wrk.lua printed as its last line. Raises LoadFailed: a request failed."""
    summary = json.loads(output.strip().rpartition("\n")[2])
    failures = {kind: count for kind, count in summary["errors"].items() if count}
    if failures or not summary["requests"]:
        raise LoadFailed(f"of {summary['requests']} requests these failed: {failures}:\n{output}")
    return LoadResult(
        summary["requests"],
        summary["requests"] / summary["duration_us"] * 1e6,
        summary["median_us"] / 1e6,
        summary["p99_us"] / 1e6,
    )


def _output(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + _GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"{command[0]} did not end {_GRACE_S:.0f} s after its time") from None
    if done.returncode != 0:
        raise LoadFailed(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _words(pattern: str, output: str) -> tuple[str, ...]:
    found = re.search(pattern, output)
    if found is None:
        raise LoadFailed(f"h2load printed no {pattern!r}:\n{output}")
    return found.groups()
