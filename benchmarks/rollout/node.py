"""The shell around ``pod.py``: processes, signals, probes and timers of pods on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from benchmarks import processes
from benchmarks.rollout.container_files import Laid, lay_out
from benchmarks.rollout.endpoints import Endpoint
from benchmarks.rollout.journal import Event, Journal, What
from benchmarks.rollout.pod import Order, Pod, PodState, ProbeKind
from benchmarks.rollout.probes import Probe
from benchmarks.rollout.probing import Target, is_good

_LAUNCHER: Final = str(Path(__file__).with_name("container.py"))
#: A kubelet looks for containers that have ended once a second.
_NOTICED_S: Final = 1.0


class RunningPod:
    """A pod with an address and a folder. ``run()`` returns when it is gone."""

    def __init__(
        self,
        pod: Pod,
        address: str,
        folder: Path,
        journal: Journal,
        random: Random,
        changed: Callable[[], None],
    ) -> None:
        self.pod = pod
        self.address = address
        self.log = folder / "logs" / f"{pod.name}.log"
        self._root = folder / "pods" / pod.name
        self._journal = journal
        self._random = random
        self._changed = changed
        self._news = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._laid: Laid | None = None
        self._group: asyncio.TaskGroup
        self._asking: set[asyncio.Task[None]] = set()
        self._was_ready = False

    @property
    def endpoint(self) -> Endpoint:
        ports = self.pod.template.container.ports
        return Endpoint(self.pod.name, self.address, ports["http"], ports["grpc"])

    async def run(self) -> None:
        """Do what is due, until it is gone. Nothing of it outlives this call, however it ends."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._laid = lay_out(self.pod.template.container, self._root, self.address)
        self._note(What.CREATED)
        try:
            async with asyncio.TaskGroup() as self._group:
                while self.pod.state is not PodState.GONE:
                    await self._step()
                for asking in self._asking:
                    asking.cancel()
        finally:
            self._kill()
            if self._process is not None:
                await self._process.wait()
        self._note(What.GONE)
        shutil.rmtree(self._root)
        self._changed()

    def delete(self) -> None:
        """Delete a pod, as ``kubectl delete pod`` does."""
        self._note(What.DELETED)
        self.pod.delete(time.monotonic())
        self._news.set()

    def crash(self) -> None:
        """``kill -9`` of all its processes at once."""
        self._note(What.CRASHED)
        self._kill()

    # ---- what is due ------------------------------------------------------------------------

    async def _step(self) -> None:
        now = time.monotonic()
        for order in self.pod.orders(now):
            await self._obey(order)
        for kind in self.pod.questions(now):
            asking = self._group.create_task(self._ask(kind, self.pod.n_starts))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
        self._tell()
        with contextlib.suppress(TimeoutError):
            wait_s = max(0.0, self.pod.due - time.monotonic())
            await asyncio.wait_for(self._news.wait(), min(wait_s, 3600.0))
        self._news.clear()

    async def _obey(self, order: Order) -> None:
        match order:
            case Order.START:
                await self._start()
                self._note(What.STARTED)
            case Order.TERM:
                self._note(What.TERM)
                if self._process is not None and self._process.returncode is None:
                    self._process.send_signal(signal.SIGTERM)
            case Order.KILL:
                self._note(What.OUTLIVED_GRACE)
                self._kill()

    async def _start(self) -> None:
        assert self._laid is not None
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                _LAUNCHER,
                str(os.getpid()),
                *self._laid.command,
                cwd=self._laid.folder,
                env=dict(self._laid.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._group.create_task(self._wait(self._process))

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._note(What.EXITED, f"status {status}")
        if self.pod.state is not PodState.ENDING:
            await asyncio.sleep(self._random.uniform(0.0, _NOTICED_S))
        self.pod.exited(time.monotonic())
        self._news.set()

    async def _ask(self, kind: ProbeKind, n_start: int) -> None:
        assert self._laid is not None
        probe = self._probe(kind)
        target = Target(self.address, self._laid.folder, self._laid.environment)
        good = await is_good(probe.action, target, probe.timeout_s)
        self.pod.answered(kind, n_start, good, time.monotonic())
        self._news.set()

    def _probe(self, kind: ProbeKind) -> Probe:
        container = self.pod.template.container
        by_kind = {
            ProbeKind.STARTUP: container.startup,
            ProbeKind.READINESS: container.readiness,
            ProbeKind.LIVENESS: container.liveness,
        }
        probe = by_kind[kind]
        assert probe is not None
        return probe

    def _kill(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        for one in processes.tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def _tell(self) -> None:
        if self.pod.ready is not self._was_ready:
            self._was_ready = self.pod.ready
            self._note(What.READY if self._was_ready else What.NOT_READY)
        self._changed()

    def _note(self, what: What, detail: str = "") -> None:
        self._journal.note(Event(time.monotonic(), self.pod.name, self.address, what, detail))
