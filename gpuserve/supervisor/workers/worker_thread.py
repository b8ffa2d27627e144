"""A worker in a thread of this process, for ``isolation="thread"``. It cannot be killed."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from gpuserve.core.errors import StartupError
from gpuserve.supervisor.control.reactor import channel_pair

if TYPE_CHECKING:
    from gpuserve_worker.execution.device_path import WorkerLoop
    from gpuserve_worker.protocol.link import Link

logger = logging.getLogger(__name__)

#: Time to wait for a thread whose sockets were shut down. It ends at once unless its callable runs.
JOIN_TIMEOUT_S: Final = 1.0


class WorkerThread:
    """A worker that is a thread of this process. ``pidfd`` is an eventfd that becomes readable when the
    thread ends, as the pidfd of a process does. No signal reaches a process through it.
    """

    #: None: stdout and stderr are those of this process.
    output: int | None = None
    #: False: a signal cannot end the thread without the process.
    killed = False
    can_be_killed = False
    #: None: only processes have an exit status.
    exit_status: int | None = None

    def __init__(
        self, name: str, source: Mapping[str, Any], boot: socket.socket, link: socket.socket
    ) -> None:
        self._source = dict(source)
        self._sockets = (boot, link)
        self._loaded = False
        self._reason = "its thread ended"
        self._name = name
        with contextlib.ExitStack() as opened:
            self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self.pidfd)
            ended = os.dup(self.pidfd)
            opened.callback(os.close, ended)
            self.stacks: int | None = os.memfd_create("gpuserve-stacks")
            opened.callback(os.close, self.stacks)
            self._thread = threading.Thread(
                target=self._run, args=(ended,), name=f"gpuserve-{name}", daemon=True
            )
            self._thread.start()  # the thread waits for ``Init``
            opened.pop_all()

    @property
    def pid(self) -> int:
        return os.getpid()

    def exit_reason(self) -> str:
        """Return why the thread ended, after ``kill()`` or its end. Join it if its callable returns."""
        self._thread.join(JOIN_TIMEOUT_S if self._loaded else 0.0)
        if self._thread.is_alive():
            logger.warning("%s: the callable has not returned; abandoned its thread", self._name)
        return self._reason

    def kill(self) -> None:
        """Shut down the sockets. A thread that still loads counts as ended, because it never got a batch."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if not self._loaded:
            os.eventfd_write(self.pidfd, 1)

    def ask_stacks(self, *, forced: bool = False) -> bool:
        """Write the stacks of all threads of this process. The calling thread holds the GIL."""
        assert self.stacks is not None
        faulthandler.dump_traceback(file=self.stacks, all_threads=True)
        return True

    def close(self) -> None:
        os.close(self.pidfd)
        if self.stacks is not None:
            os.close(self.stacks)

    def _run(self, ended: int) -> None:
        # Imported here, because a server without worker threads does not need numpy.
        from gpuserve_worker.execution.async_loop import event_loop_of_thread
        from gpuserve_worker.protocol.link import Link

        boot, link = map(Link, self._sockets)
        try:
            with event_loop_of_thread():
                self._serve(boot, link)
        except OSError:
            self._reason = "its sockets were closed"
        except (Exception, SystemExit) as error:  # SystemExit would end the user's process
            self._reason = f"its thread ended by {type(error).__name__}"
            logger.exception("%s: the worker thread failed", self._name)
        finally:
            boot.close()
            link.close()
            os.eventfd_write(ended, 1)
            os.close(ended)

    def _serve(self, boot: Link, link: Link) -> None:
        from gpuserve_worker.execution.lifecycle import Reporter
        from gpuserve_worker.inference.callable_loading import LoadError
        from gpuserve_worker.loading import load_model, new_loop, warm_up
        from gpuserve_worker.protocol.wire import Init, LoadFailed, Ready

        received = boot.receive()
        if received is None or not isinstance(received[0], Init):
            return
        init = received[0]._replace(source=self._source)
        report = Reporter(boot)
        started_s = time.monotonic()
        try:
            model = load_model(init, report)
        except LoadError as error:
            boot.send(LoadFailed(str(error), error.traceback))
            return
        loop = new_loop(link, model, report)
        warm_up(init, model, loop, report)
        self._loaded = True
        boot.send(Ready(time.monotonic() - started_s, model.slots))
        self._run_loop(loop, boot)

    def _run_loop(self, loop: WorkerLoop, boot: Link) -> None:
        """Run the loop until the front closes the link, or the supervisor stops the worker."""
        from gpuserve_worker.protocol.wire import Stop

        def wait_for_stop() -> None:
            """Stop the loop after the present batch, on ``Stop`` or at the end of the boot socket."""
            while (received := boot.receive()) is not None and not isinstance(received[0], Stop):
                pass
            loop.stop()

        listener = threading.Thread(target=wait_for_stop, daemon=True)
        listener.start()
        try:
            loop.run()
        finally:
            loop.close()
            boot.stop_receiving()
            listener.join()


def start_thread(name: str, source: Mapping[str, Any]) -> tuple[WorkerThread, list[socket.socket]]:
    """Start a worker thread, and return it with our ends of its two sockets."""
    with contextlib.ExitStack() as opened:
        try:
            pairs = [channel_pair(), channel_pair()]
            for sock in (one for pair in pairs for one in pair):
                opened.enter_context(sock)
            worker = WorkerThread(name, source, *(theirs for _, theirs in pairs))
        except (OSError, RuntimeError) as error:
            raise StartupError(f"cannot start a worker thread: {error}") from error
        opened.pop_all()
    return worker, [ours for ours, _ in pairs]
