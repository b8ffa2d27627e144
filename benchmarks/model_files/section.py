"""The section of model files: requests of 32 rows, four in flight, and the bare loop with batches of 32."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from benchmarks import load, payloads
from benchmarks.load import GrpcLoad, LoadFailed, LoadResult
from benchmarks.model_files.files import FILES, ROWS, ModelFile, call_of
from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.report import Plan, Section
from benchmarks.request_section import RequestPart
from benchmarks.rounds import Clocks, Comparison, LoadedServer, Sample, Samples, Subject, measure, sample_of
from benchmarks.rows import Goals, Measure, Row, Target
from benchmarks.servers import GpuServe, MLServer
from benchmarks.servers.server import MODELS_FOLDER, Api, Kind, Ports, RunningServer, ServerFailed, running


class FileServer(GpuServe):
    """``gpuserve serve FILE``."""

    def __init__(self, cache: PeerCache, file: ModelFile, path: Path) -> None:
        super().__init__(cache)
        self._path = path
        self._file = file
        self.models = frozenset({file.name})  # type: ignore[misc]  # of one server, not of the class

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        del models
        return self._serve(self._path, ports)

    def environment(self) -> dict[str, str]:
        variable = f"GPUSERVE_MODELS__{self._file.name.upper()}__KWARGS".replace("-", "_")
        said = {"trust": True} if self._path.suffix == ".pt2" else {"trusted": self._file.trusted}
        return super().environment() | ({variable: json.dumps(said)} if any(said.values()) else {})


class MLServerFile(MLServer):
    """MLServer has no runtime of its own for these files, so it is given the few lines that call one."""

    def __init__(self, cache: PeerCache, file: ModelFile, path: Path) -> None:
        super().__init__(cache)
        self._path = path
        self._name = file.name
        self.models = frozenset({file.name})  # type: ignore[misc]  # as above
        self.largest_nbytes = 1 << 31  # type: ignore[misc]  # the file is run with what it takes

    def prepare(self) -> None:
        super().prepare()
        self.cache.add_to_mlserver("onnxruntime")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        folder = self._path.parent / f"mlserver-{self._name}"
        folder.mkdir(exist_ok=True)
        settings = {
            "name": self._name,
            "implementation": "mlserver_files.OnnxFile",
            "parameters": {"uri": str(self._path)},
        }
        (folder / "model-settings.json").write_text(json.dumps(settings))
        return [*super().command(ports, models)[:-1], str(folder)]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(MODELS_FOLDER), "ORT_DISABLE_TELEMETRY": "1"}


_BARE = "bare"
_GOALS = Goals(None, ((_BARE, Target(0.95)),))
_GRACE_S = 60.0
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class FilePayload(payloads.Payload):
    """The rows of a file as one request. ``at`` is where the file is."""

    file: ModelFile
    at: Path

    @property
    def model(self) -> str:
        return self.file.name

    @property
    def nbytes(self) -> int:
        rows = self.file.rows
        return sum(len(one) for one in rows.flat) if rows.dtype == object else int(rows.nbytes)

    def grpc_message(self) -> bytes:
        rows = self.file.rows
        request = service_pb2.ModelInferRequest(model_name=self.model)
        request.inputs.add(name=self.file.input, datatype=self.file.datatype, shape=rows.shape)
        request.outputs.add(name=self.file.output)
        is_text = rows.dtype == object
        request.raw_input_contents.append(serialize_byte_tensor(rows).item() if is_text else rows.tobytes())
        return bytes(request.SerializeToString())

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        """Whether the server answers what the runtime does; see ``Payload``."""
        del api
        rows = self.file.rows
        tensor = InferInput(self.file.input, list(rows.shape), self.file.datatype)
        tensor.set_data_from_numpy(rows)
        try:
            with InferenceServerClient(f"127.0.0.1:{running.ports.grpc}") as client:
                answer = client.infer(self.model, [tensor]).as_numpy(self.file.output)
        except InferenceServerException as error:
            raise ServerFailed(f"{running.server.title}: {error}") from None
        expected = call_of(self.file, str(self.at))(rows)
        if answer is None or not np.allclose(answer, expected, _TOLERANCE, _TOLERANCE * abs(expected).max()):
            raise ServerFailed(f"{running.server.title} answers otherwise than {self.file.runtime}")
        return b"".join(map(payloads.framed, payloads.messages_of(running, self)))


class BareLoop(Subject):
    """The runtime alone, in a process of its own, as the subject of rows."""

    name = _BARE
    title = "the runtime in a loop"

    def can_run(self, row: Row) -> bool:
        return isinstance(row.load.payload, FilePayload)

    def run(self, row: Row, seconds: float) -> Sample:
        payload = row.load.payload
        assert isinstance(payload, FilePayload)
        command = [sys.executable, "-m", f"{__package__}.files", payload.model, str(payload.at), str(seconds)]
        before = Clocks.read(None)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds + _GRACE_S
        )
        if done.returncode:
            raise LoadFailed(f"the loop ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout)
        result = LoadResult(found["batches"], found["batches"] / found["took_s"])
        sample = sample_of(row, result, {}, before, Clocks.read(None))
        cpu_s = found["cpu_s"] / found["batches"]
        return dataclasses.replace(sample, cpu_s_per_answer=cpu_s, cpu_s_by_role={"loop": cpu_s})


class ModelFiles(Section):
    """The section with a row for each kind of model file."""

    names = tuple(file.name for file in FILES)
    is_default = False

    def missing(self, name: str) -> str | None:
        """The load generator, the runtime, or what writes its file."""
        file = next(one for one in FILES if one.name == name)
        needed = [file.runtime, *(["onnx"] if file.suffix == ".onnx" else [])]
        absent = [one for one in needed if importlib.util.find_spec(one) is None]
        if absent:
            return f"the package {absent[0]} is not installed"
        return load.missing(_row(file, Path()).load)

    def measure(self, plan: Plan) -> RequestPart | None:
        """Each file by itself, with a server of its own beside the loop."""
        files = [one for one in FILES if one.name in plan.names]
        if not files or not plan.servers:
            return None
        kinds = {_BARE: Kind.PEER}
        titles, whole, rows = {_BARE: BareLoop.title}, Samples(), []
        for file in files:
            row, samples = _measured(file, plan, titles, kinds)
            rows.append(row)
            whole.by_pair |= samples.by_pair
            whole.failures |= samples.failures
            whole.not_up |= samples.not_up
        return RequestPart(rows, titles, Comparison(kinds, whole), "model_files")


def _row(file: ModelFile, at: Path) -> Row:
    one = GrpcLoad(FilePayload(file, at), connections=2, streams=2)
    title = f"{file.title}, requests of {ROWS} rows, 4 in flight"
    return Row(file.name, title, one, Measure.THROUGHPUT, _GOALS, file.least_s)


def _measured(
    file: ModelFile, plan: Plan, titles: dict[str, str], kinds: dict[str, Kind]
) -> tuple[Row, Samples]:
    """The samples of one file; what was measured is added to ``titles`` and ``kinds``."""
    path = file.made(plan.logs.parent / "model_files")
    row, subjects, not_up = _row(file, path), list[Subject]([BareLoop()]), {}
    with ExitStack() as stack:
        for server in _servers(file, path, plan):
            try:
                server.prepare()
                one = stack.enter_context(running(server, plan.logs, [file.name]))
            except (ServerMissing, ServerFailed) as error:
                not_up[server.name] = str(error)
                plan.say(f"not measured: {server.name} did not come up")
                continue
            subjects.insert(0, LoadedServer(server, {None: one}))
            titles[server.name], kinds[server.name] = server.title, server.kind
        samples = measure([row], subjects, plan.rounds, plan.seconds, plan.say)
    samples.not_up.update(not_up)
    return row, samples


def _servers(file: ModelFile, path: Path, plan: Plan) -> Iterator[FileServer | MLServerFile]:
    chosen = {one.name for one in plan.servers}
    cache = partial(PeerCache, plan.logs.parent)
    if MLServerFile.name in chosen and file.runtime == "onnxruntime":
        yield MLServerFile(cache(), file, path)
    if FileServer.name in chosen:
        yield FileServer(cache(), file, path)
