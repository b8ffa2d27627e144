"""A client with device memory of its own, in a process of its own, as CUDA wants it: ``Exporter`` in a test,
and the program that it runs. The program takes one JSON object a line, and answers with one.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

TIMEOUT_S = 30.0
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


class Exporter:
    """One such process; a context manager. ``environ`` is what it needs besides to see the GPUs."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **environ},
        )

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def make(self, nbytes: int, device: int = 0) -> DeviceMemory:
        """New memory of a device, all zeros, and its handle."""
        answer = self._ask(do="make", nbytes=nbytes, device=device)
        return DeviceMemory(self, answer["address"], base64.b64decode(answer["handle"]), nbytes)

    def put(self, address: int, data: bytes) -> None:
        """Write to memory; it is there when this returns."""
        self._ask(do="put", address=address, data=base64.b64encode(data).decode())

    def get(self, address: int, nbytes: int) -> bytes:
        """Read memory."""
        return base64.b64decode(self._ask(do="get", address=address, nbytes=nbytes)["data"])

    def free(self, address: int) -> None:
        """Give memory back, whoever else has it open."""
        self._ask(do="free", address=address)

    def end(self) -> None:
        """The process ends, and does not say goodbye to CUDA."""
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "problem" not in answer, answer["problem"]
        return answer


class DeviceMemory:
    """One allocation of an exporter."""

    def __init__(self, exporter: Exporter, address: int, handle: bytes, nbytes: int) -> None:
        self._exporter = exporter
        self._address = address
        self.handle = handle
        self.nbytes = nbytes

    @property
    def handle_base64(self) -> bytes:
        """As tritonclient takes it."""
        return base64.b64encode(self.handle)

    def put(self, data: bytes, offset: int = 0) -> None:
        """Write to it."""
        self._exporter.put(self._address + offset, data)

    def get(self, nbytes: int, offset: int = 0) -> bytes:
        """Read from it."""
        return self._exporter.get(self._address + offset, nbytes)

    def free(self) -> None:
        """Give it back."""
        self._exporter.free(self._address)


# ---- the program --------------------------------------------------------------------------------


def _obey(cuda: Any, command: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    match command.pop("do"):
        case "make":
            cuda.setDevice(command["device"])
            address = cuda.malloc(command["nbytes"])
            cuda.memset(address, 0, command["nbytes"])
            cuda.deviceSynchronize()
            handle = base64.b64encode(cuda.ipcGetMemHandle(address)).decode()
            return {"address": address, "handle": handle}
        case "put":
            data = np.frombuffer(base64.b64decode(command["data"]), np.uint8)
            cuda.memcpy(command["address"], data.ctypes.data, len(data), _HOST_TO_DEVICE)
            cuda.deviceSynchronize()
        case "get":
            found = np.empty(command["nbytes"], np.uint8)
            cuda.memcpy(found.ctypes.data, command["address"], len(found), _DEVICE_TO_HOST)
            return {"data": base64.b64encode(found.tobytes()).decode()}
        case "free":
            cuda.free(command["address"])
    return {}


def _main() -> None:
    from cupy.cuda import runtime

    for line in sys.stdin:
        try:
            answer = _obey(runtime, json.loads(line))
        except RuntimeError as error:
            answer = {"problem": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
