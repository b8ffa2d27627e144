"""``gpuserve serve`` in the hands of an operator: its processes, its log, its signals, its clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from ingress import with_ingress
from processes import children, command_line, wait_ended, wait_until
from serving import FREE_PORTS, GPUSERVE

TIMEOUT_S = 20.0
#: Larger than anything that is sent inside a message: such a body lies in the arena.
LARGE = 1 << 20
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Answer:
    """A status, and the body as it came."""

    status: int
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])

    def output(self, name: str) -> list[Any]:
        assert self.status == 200, self.body
        return next(list(one["data"]) for one in json.loads(self.body)["outputs"] if one["name"] == name)


class Client:
    """One keep-alive HTTP connection."""

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def get(self, path: str) -> Answer:
        return self._call("GET", path, None, {})

    def post(self, path: str, document: Any) -> Answer:
        return self._call("POST", path, json.dumps(document).encode(), {})

    def infer(self, model: str, *rows: float, width: int = 1) -> Answer:
        """One request; each row is a value, ``width`` times. A large one goes as binary data."""
        array = np.repeat(np.array(rows, np.float32)[:, None], width, axis=1)
        tensor = {"name": "x", "datatype": "FP32", "shape": array.shape}
        if width == 1:
            body = json.dumps({"inputs": [{**tensor, "data": array.ravel().tolist()}]}).encode()
            return self._call("POST", f"/v2/models/{model}/infer", body, {})
        tensor["parameters"] = {"binary_data_size": array.nbytes}
        head = json.dumps({"inputs": [tensor], "outputs": [{"name": "pid"}, {"name": "calls"}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return self._call("POST", f"/v2/models/{model}/infer", head + array.tobytes(), headers)

    def _call(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        self.connection.request(method, path, body, headers)
        response = self.connection.getresponse()
        return Answer(response.status, response.read())


class InBackground:
    """A call in a thread; ``result()`` waits for it and gives its answer, or raises what it raised."""

    def __init__(self, call: Any, *arguments: Any, **named: Any) -> None:
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, arguments, named))
        self._thread.start()

    def _run(self, call: Any, arguments: Any, named: Any) -> None:
        try:
            self._answer = call(*arguments, **named)
        except BaseException as error:
            self._error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "no answer came"
        if self._error is not None:
            raise self._error
        return self._answer


class OperatedServer:
    """A server process of its own session, with a JSON log of which every line is checked at the end."""

    def __init__(
        self, config: Path, *flags: str, command: tuple[str, ...] = (), log_format: str = "json"
    ) -> None:
        ports = () if "--http-port" in flags else FREE_PORTS
        self._command = command or (
            GPUSERVE,
            "serve",
            str(config),
            *ports,
            "--log-format",
            log_format,
            *flags,
        )
        self._is_json = log_format == "json"
        self.log: list[str] = []
        self.addresses: dict[str, str] = {}
        self._news = threading.Condition()
        self._log_ended = False

    def __enter__(self) -> OperatedServer:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = [self.process.pid, *children(self.process.pid)]
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert not wait_ended(family, TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        if kind is not None:
            sys.stderr.writelines(self.log)  # pytest shows it with the failure
        elif self._is_json:
            for line in self.log:
                assert isinstance(json.loads(line), dict)

    @contextlib.contextmanager
    def until_killed(self) -> Iterator[Self]:
        """The server from ready on; at the end of the block it is killed."""
        with self:
            self.wait_ready()
            yield self

    @contextlib.contextmanager
    def until_ended(self) -> Iterator[Self]:
        """The server from ready on; at the end of the block it ends, with the status 0."""
        with self.until_killed():
            yield self
            assert self.end() == 0

    # ---- its log --------------------------------------------------------------------------

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log.append(line)
                self._news.notify_all()
        with self._news:
            self._log_ended = True
            self._news.notify_all()

    def messages(self) -> list[dict[str, Any]]:
        """The records of the log; of a server that has ended, its last ones as well."""
        if self.process.poll() is not None:
            self._reader.join(1.0)  # not longer: a process that outlives the server has its log
        return [json.loads(line) for line in list(self.log) if self._is_json or line.startswith("{")]

    def wait_log(self, text: str, times: int = 1) -> None:
        """Wait until so many log lines hold the text."""
        with self._news:
            enough = self._news.wait_for(
                lambda: sum(text in line for line in self.log) >= times or self._log_ended, TIMEOUT_S
            )
            assert enough, f"the log does not say {text!r} within {TIMEOUT_S:g} s"
            assert sum(text in line for line in self.log) >= times, f"the log ended without {text!r}"

    def wait_ready(self) -> OperatedServer:
        self.wait_log('"ready: ')
        line = next(one["msg"] for one in self.messages() if one["msg"].startswith("ready: "))
        for part in line.removeprefix("ready: ").split(", "):
            role, where = part.split(" ")
            self.addresses[role] = where.removeprefix("http://").removesuffix("/metrics")
        return self

    # ---- its processes --------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def front(self) -> int:
        (pid,) = self._children("gpuserve.front.process") or (0,)
        return pid

    @property
    def workers(self) -> list[int]:
        return sorted(self._children("gpuserve_worker"))

    def _children(self, module: str) -> list[int]:
        return [pid for pid in children(self.pid) if f"-m {module} " in command_line(pid)]

    def family(self) -> list[int]:
        """Every process of ours."""
        return [self.pid, self.front, *self.workers]

    def n_sockets(self) -> int:
        """How many sockets the front has open: each connection is one."""
        count = 0
        for one in Path(f"/proc/{self.front}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += os.readlink(one).startswith("socket:")
        return count

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def replace_front(self) -> float:
        """Kill the front; the seconds until the next one is ready."""
        front = self.front
        os.kill(front, signal.SIGKILL)
        wait_until(lambda: self.front not in {0, front}, "another front is started")
        return wait_until(lambda: self.status("/v2/health/ready") == 200, "the new front is ready")

    # ---- its clients ----------------------------------------------------------------------

    def client(self, timeout_s: float = TIMEOUT_S) -> Client:
        return Client(self.addresses["HTTP"], timeout_s)

    def infer(self, model: str, *rows: float, width: int = 1) -> Answer:
        with self.client() as client:
            return client.infer(model, *rows, width=width)

    def status(self, path: str) -> int:
        """The status of a GET; 0 where nobody answers."""
        try:
            with self.client() as client:
                return client.get(path).status
        except (OSError, http.client.HTTPException):
            return 0

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, arenas of ingress processes included."""
        with self.client() as client:
            text = client.get("/metrics").body.decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        names = with_ingress(name)
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(names)]
        found = [(key, float(value)) for key, _, value in lines if key.partition("{")[0] in names]
        return sum(value for key, value in found if "_door_" in key or all(one in key for one in wanted))

    def wait_model_ready(self, model: str) -> float:
        path = f"/v2/models/{model}/ready"
        return wait_until(lambda: self.status(path) == 200, f"model {model} is ready")


class Orders:
    """The directory through which a model of ``models/mortal.py`` is told what to do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def die(self, how: str) -> None:
        """Die in the next call."""
        new = self.directory / "die.new"
        new.write_text(how)
        new.rename(self.directory / "die")

    def shut(self) -> None:
        (self.directory / "shut").touch()

    def open(self) -> None:
        (self.directory / "shut").unlink()

    def hold(self, server: OperatedServer, value: float = 1.0) -> InBackground:
        """A request that the model "m" runs until ``open``."""
        self.shut()
        n_before = len(self.calls())
        held = InBackground(server.infer, "m", value)
        self.wait_calls(n_before + 1)
        return held

    def calls(self) -> list[dict[str, Any]]:
        journal = self.directory / "journal"
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    def wait_calls(self, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.calls()) >= count, f"{count} calls")
        return self.calls()

    def child(self) -> int:
        """The process that the model started."""
        return int((self.directory / "child").read_text().split("\n")[0])


def model(name: str, orders: Orders, target: str = "Mortal", **keys: Any) -> dict[str, Any]:
    """A model of ``models/mortal.py`` as an entry of a config file."""
    outputs = [("y", "float32"), ("calls", "int64"), ("pid", "int64")]
    return {
        "name": name,
        "callable": f"{MODELS / 'mortal.py'}:{target}",
        "kwargs": {"directory": str(orders.directory)},
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": one, "dtype": dtype, "shape": [-1]} for one, dtype in outputs],
        "max_batch_size": 64,
        **keys,
    }


def config(directory: Path, *models: dict[str, Any], **server: Any) -> Path:
    """A config file of these models, for a server that ends quickly."""
    path = directory / "config.yaml"
    path.write_text(json.dumps({"server": {"lame_duck_s": 0, **server}, "models": models}))
    return path
