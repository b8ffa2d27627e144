"""A real worker process for tests, which play the supervisor and the front on its two sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from gpuserve_worker import wire
from gpuserve_worker.link import Link
from gpuserve_worker.memory import Arena, Mapping

MODELS = Path(__file__).parent / "models"
TIMEOUT_S = 30.0
M = TypeVar("M")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(TIMEOUT_S)
    return ours, theirs


def model(path: str, **changes: Any) -> wire.Init:
    """The ``Init`` of a model in tests/models: FP32 in, FP32 out, any width, batches of up to 32."""
    kwargs = changes.pop("kwargs", {})
    source = {"path": path, "base_dir": str(MODELS), "kwargs": kwargs}
    float_tensor = ("FP32", (-1,), False)
    init = wire.Init(
        protocol=wire.PROTOCOL,
        model="tested",
        version=1,
        instance="cpu#0",
        device="cpu",
        source=source,
        inputs=(("x", *float_tensor),),
        outputs=(("y", *float_tensor),),
        max_batch_size=32,
        strict=False,
        read_only_inputs=False,
    )
    return init._replace(**changes)


class WorkerProcess:
    """The process, and both roles of its peers. ``epoch`` 1 is attached once the model is loaded."""

    def __init__(self, init: wire.Init, *, stdout: int | None = None) -> None:
        self.init = init
        self._stdout = stdout
        self.arena = Arena(1 << 30, self._send_segment, self._send_drop)
        self.outputs = Mapping()

    def __enter__(self) -> WorkerProcess:
        self.boot_socket, boot = socket_pair()
        self.link_socket, link = socket_pair()
        with boot, link:
            fds = (boot.fileno(), link.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpuserve_worker", *map(str, fds)],
                pass_fds=fds,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
            )
        self.boot, self.link = Link(self.boot_socket), Link(self.link_socket)
        self.boot.send(self.init)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.boot.close()
        self.link.close()
        self.outputs.close()
        self.arena.close()

    def load(self) -> WorkerProcess:
        """Wait until the model is loaded, and attach as its first front."""
        while not isinstance(message := self.hear(self.boot), wire.Ready):
            assert isinstance(message, wire.Phase), message
        return self.attach(1)

    def attach(self, epoch: int) -> WorkerProcess:
        self.link.send(wire.Attach(epoch))
        while self.hear(self.link) != wire.Attached(epoch):
            pass
        return self

    def load_failure(self) -> wire.LoadFailed:
        while not isinstance(message := self.hear(self.boot), wire.LoadFailed):
            assert isinstance(message, wire.Phase), message
        return message

    def log_record(self) -> wire.Log:
        message = self.hear(self.boot)
        assert isinstance(message, wire.Log), message
        return message

    def run(
        self,
        inputs: Sequence[wire.WireTensor],
        rows: Sequence[int] = (1,),
        batch_id: int = 1,
        requested: Sequence[tuple[str, ...]] | None = None,
    ) -> Any:
        """Run a batch; its ``Done`` or ``Failed``. Whatever else comes before is kept to itself."""
        self.start(inputs, rows, batch_id, requested)
        return self.answer()

    def start(
        self,
        inputs: Sequence[wire.WireTensor],
        rows: Sequence[int] = (1,),
        batch_id: int = 1,
        requested: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        asked = requested or [()] * len(rows)
        requests = tuple(wire.WireRequest(count, {}, names) for count, names in zip(rows, asked, strict=True))
        self.link.send(wire.Run(batch_id, requests, tuple(inputs)))

    def answer(self) -> Any:
        message = self.hear(self.link)
        assert isinstance(message, wire.Done | wire.Failed), message
        return message

    def in_arena(self, name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> wire.WireTensor:
        """A tensor in a block of our arena."""
        block = self.arena.allocate(len(data))
        block.view[:] = data
        return wire.WireTensor(name, datatype, shape, wire.Ref(block.segment, block.offset, len(data)))

    def read(self, payload: Any) -> bytes:
        """The bytes of an output."""
        at = wire.payload(payload)
        return at if isinstance(at, bytes) else bytes(self.outputs.view(*at))

    def hear(self, end: Link) -> wire.Message | None:
        """The next message that is not about segments; those are obeyed. None at the end."""
        while True:
            received = end.receive()
            if received is None:
                return None
            message, fds = received
            match message:
                case wire.Segment(segment, nbytes):
                    self.outputs.attach(segment, fds[0], nbytes)
                    os.close(fds[0])
                case wire.DropSegment(segment):
                    self.outputs.detach(segment)
                case _:
                    return message

    def exit_status(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def descriptors(self) -> int:
        """How many descriptors the worker has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _send_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self.link.send(wire.Segment(segment, nbytes), (fd,))

    def _send_drop(self, segment: int) -> None:
        if self.process.returncode is None:
            self.link.send(wire.DropSegment(segment))


def floats(name: str, *rows: Sequence[float]) -> wire.WireTensor:
    """A small FP32 tensor."""
    import numpy as np

    array = np.array(rows, np.float32)
    return wire.WireTensor(name, "FP32", array.shape, array.tobytes())
