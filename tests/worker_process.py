"""A real worker process for tests, which play the supervisor and the front on its two sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gpuserve_worker.memory.arena import Arena, Mapping
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import close_all
from gpuserve_worker.protocol.link import Link

MODELS = Path(__file__).parent / "models"
TIMEOUT_S = 30.0
#: A parent that runs the command in its arguments, says its process id, and waits for it.
_PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], close_fds=False, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


#: More than a message takes.
LARGE = 3 * wire.INLINE_NBYTES


def raised(fault: BaseException) -> None:
    """What ends the loop of a worker, where there is no loop."""
    raise fault


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
        preferred_batch_sizes=(),
        decoupled=False,
        concurrency=0,
        strict=True,
        exact=False,
        read_only_inputs=False,
        warmup=(),
    )
    return init._replace(**changes)


class WorkerProcess:
    """The process, and both roles of its peers.

    With ``under_a_parent`` the worker is a child of another process, ``process``, that holds nothing.
    ``environ`` is added to its environment.
    """

    def __init__(
        self,
        init: wire.Init,
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        under_a_parent: bool = False,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.init = init
        self._launcher = [sys.executable, "-c", _PARENT] if under_a_parent else []
        self._stdout = subprocess.PIPE if under_a_parent else stdout
        self._stderr = stderr
        self._environ = {**os.environ, **(environ or {})}
        self._front_is_alive = True
        self.arena = Arena(1 << 30, self._send_segment, self._send_drop)
        self.outputs = Mapping()
        self._views: dict[Any, memoryview] = {}

    def __enter__(self) -> WorkerProcess:
        self.boot_socket, boot = socket_pair()
        self.link_socket, link = socket_pair()
        with boot, link:
            fds = (boot.fileno(), link.fileno())
            self.process = subprocess.Popen(
                [*self._launcher, sys.executable, "-m", "gpuserve_worker", *map(str, fds)],
                pass_fds=fds,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                env=self._environ,
            )
        self.boot, self.link = Link(self.boot_socket), Link(self.link_socket)
        self.boot.send(self.init)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
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
        message: wire.Message | None = None
        while message != wire.Attached(epoch):
            received = self.link.receive()
            assert received is not None, "the worker ended before it was attached"
            message, fds = received  # what comes before belongs to the front before
            close_all(fds)
        return self

    def new_front(self, epoch: int) -> None:
        """The front dies with its memory, and its successor attaches."""
        self._front_is_alive = False
        self.arena.close()
        self.outputs.close()
        self._front_is_alive = True
        self.arena = Arena(1 << 30, self._send_segment, self._send_drop)
        self.outputs = Mapping()
        self.attach(epoch)

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
        self._views[block.segment, block.offset] = block.view
        return wire.WireTensor(name, datatype, shape, wire.Ref(block.segment, block.offset, len(data)))

    def read(self, payload: Any) -> bytes:
        """The bytes of an output."""
        at = wire.payload(payload)
        return at if isinstance(at, bytes) else bytes(self.outputs.view(*at))

    def hear(self, end: Link) -> wire.Message | None:
        """The next message that is not about segments, which are obeyed, or memory. None at the end."""
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
                case wire.DeviceMemory():
                    pass
                case _:
                    return message

    def arena_bytes(self, tensor: wire.WireTensor) -> bytes:
        """What lies in our arena where ``in_arena`` put this tensor."""
        assert isinstance(tensor.payload, wire.Ref)
        return bytes(self._views[tensor.payload[:2]])

    def overwrite(self, tensor: wire.WireTensor) -> None:
        """Put something else where ``in_arena`` put this tensor, as the front does with a free block."""
        assert isinstance(tensor.payload, wire.Ref)
        self._views[tensor.payload[:2]][:] = bytes(tensor.payload.nbytes)

    def is_deaf(self) -> bool:
        """Whether the worker has shut its link for receiving."""
        self.link_socket.settimeout(None)  # or else Python itself waits for room in the buffer
        try:
            self.link_socket.send(wire.WORKER.encode(wire.Free(())), socket.MSG_DONTWAIT)
        except BrokenPipeError:
            return True
        except BlockingIOError:
            return False
        finally:
            self.link_socket.settimeout(TIMEOUT_S)
        return False

    def worker_pid(self) -> int:
        """The worker's process id, which a parent in between prints."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def error_text(self) -> str:
        """What the process wrote to its stderr, once it has ended."""
        assert self.process.stderr is not None
        return str(self.process.stderr.read(), "utf-8")

    def exit_status(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def descriptors(self) -> int:
        """How many descriptors the worker has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _send_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self.link.send(wire.Segment(segment, nbytes), (fd,))

    def _send_drop(self, segment: int) -> None:
        if self._front_is_alive and self.process.returncode is None:
            self.link.send(wire.DropSegment(segment))


@contextmanager
def loaded(init: wire.Init, **options: Any) -> Iterator[WorkerProcess]:
    """A worker with its model loaded and a front attached."""
    with WorkerProcess(init, **options) as worker:
        yield worker.load()


def floats(name: str, *rows: Sequence[float]) -> wire.WireTensor:
    """A small FP32 tensor."""
    array = np.array(rows, np.float32)
    return wire.WireTensor(name, "FP32", array.shape, array.tobytes())


def values(worker: WorkerProcess, tensor: Any, dtype: Any = np.float32) -> Any:
    """The array in an output tensor."""
    _, _, shape, payload = tensor
    return np.frombuffer(worker.read(payload), dtype).reshape(shape)


def output(worker: WorkerProcess, done: Any) -> Any:
    """The only output of a batch that was answered as a whole."""
    assert isinstance(done, wire.Done), done
    assert done.outputs is not None
    (tensor,) = done.outputs
    return values(worker, tensor)


def large(worker: WorkerProcess, *, first: float = 1.0) -> tuple[Any, wire.WireTensor]:
    """Two rows that are too large for a message, in our arena; the first element is ``first``."""
    array = np.arange(1, 1 + LARGE // 4, dtype=np.float32).reshape(2, -1)
    array[0, 0] = first
    return array, worker.in_arena("x", "FP32", array.shape, array.tobytes())
