"""A config file of ``models/generations.py`` that changes while a server runs, and clients of both protocols
that load from it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from operated import MODELS
from processes import wait_until
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 30.0


def entry(name: str, tag: float = 1.0, version: int = 1, **keys: Any) -> dict[str, Any]:
    """An entry of ``models``; what is no key of one goes to the model."""
    arguments = {key: keys.pop(key) for key in ("load_fifo", "run_fifo", "broken") if key in keys}
    outputs = [("tag", "float32"), ("pid", "int64"), ("sum", "float32")]
    return {
        "name": name,
        "version": version,
        "callable": f"{MODELS / 'generations.py'}:Tagged",
        "kwargs": {"tag": tag, **arguments},
        "max_batch_size": 8,
        "inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}],
        "outputs": [{"name": one, "dtype": dtype, "shape": [1]} for one, dtype in outputs],
        **keys,
    }


def write(path: Path, *models: dict[str, Any], **server: Any) -> Path:
    """Put a config file there, in one step."""
    new = path.with_suffix(".new")
    server = {"model_control": "explicit", "lame_duck_s": 0, **server}
    new.write_text(json.dumps({"server": server, "models": models}))
    new.rename(path)
    return path


class Told(NamedTuple):
    """An answer of a ``Tagged``."""

    tag: float
    pid: int
    version: str


_opened: list[Any] = []


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    """Close every client of the test; for the modules that import it."""
    yield
    while _opened:
        _opened.pop().close()


class Client:
    """tritonclient, of either protocol, without its differences. See ``clients_are_closed``."""

    def __init__(self, protocol: str, address: str) -> None:
        self.module: ModuleType = {"grpc": tritonclient.grpc, "http": tritonclient.http}[protocol]
        timeouts = {"network_timeout": TIMEOUT_S} if protocol == "http" else {}
        self.asked = self.module.InferenceServerClient(address, **timeouts)
        _opened.append(self.asked)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.close()

    def infer(self, model: str, version: str = "", width: int = 2) -> Told:
        x = np.ones((1, width), np.float32)
        tensor = self.module.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        answer = self.asked.infer(model, [tensor], version)
        response = answer.get_response()
        given = response["model_version"] if isinstance(response, dict) else response.model_version
        assert answer.as_numpy("sum").tolist() == [[width]]
        return Told(answer.as_numpy("tag").item(), answer.as_numpy("pid").item(), given)

    def index(self) -> list[tuple[str, str, str, str]]:
        found = self.asked.get_model_repository_index()
        if isinstance(found, list):
            keys = ("name", "version", "state", "reason")
            return [tuple(one.get(key, "") for key in keys) for one in found]
        return [(one.name, one.version, one.state, one.reason) for one in found.models]

    def states(self, model: str) -> dict[str, str]:
        return {version: state for name, version, state, _ in self.index() if name == model}

    def versions(self, model: str, version: str = "") -> list[str]:
        found = self.asked.get_model_metadata(model, version)
        return list(found["versions"] if isinstance(found, dict) else found.versions)

    def max_batch_size(self, model: str) -> int:
        found = self.asked.get_model_config(model)
        return int(found["max_batch_size"] if isinstance(found, dict) else found.config.max_batch_size)


class Traffic:
    """Requests one after another, small and large, until it is told to stop."""

    def __init__(self, asked: Client, model: str) -> None:
        self.told: list[Any] = []
        self.errors: list[str] = []
        self._asked = asked
        self._model = model
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        wait_until(lambda: bool(self.told or self.errors), "the first answer")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for width in (2, 1 << 17):
                try:
                    self.told.append(self._asked.infer(self._model, width=width))
                except Exception as error:
                    self.errors.append(str(error))

    def wait_for(self, tag: float) -> None:
        wait_until(lambda: self.told[-1].tag == tag, f"an answer of {tag}")


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[str, str]:
    """The status and the text of what tritonclient raises."""
    with pytest.raises(InferenceServerException) as raised:
        call(*arguments, **named)
    return str(raised.value.status()).removeprefix("StatusCode."), str(raised.value.message())


def either(client: Client, code: str, status: int) -> str:
    """The status of an error over the client's protocol."""
    return str(status) if client.module.__name__.endswith("http") else code
