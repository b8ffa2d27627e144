"""The memory of models: the budgets, and what each model takes, declared or measured.

Measured memory is that of the last report, and is remembered while a model is cold.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpuserve.devices.names import CPU
from gpuserve.supervisor.models.generations import Generation, GenerationTable, Residence
from gpuserve.supervisor.models.memory_policy import Nbytes
from gpuserve.supervisor.processes.lifecycle import InstanceState, LiveSettings
from gpuserve.supervisor.workers.worker_monitor import WorkerMonitor

#: The memory of a GPU that a sleeping process has left, a CUDA context, before it was measured.
CONTEXT_NBYTES: Final = 512 << 20


class ModelMemory:
    """The memory of the models in ``table``."""

    def __init__(self, settings: LiveSettings, table: GenerationTable) -> None:
        self._settings = settings
        self._table = table
        #: The measured memory of an instance of each version of a model, awake and asleep.
        self._measured: dict[tuple[str, int], Nbytes] = {}
        self._asleep: dict[tuple[str, int], Nbytes] = {}
        #: The memory that all instances share on GPUs, which is not in that of an instance.
        self._shared: dict[tuple[str, int], Nbytes] = {}
        #: The memory of the largest instance that was measured awake, by device.
        self._largest = Counter[str]()

    def limits(self) -> dict[str, int]:
        devices = {one for spec in self._table.specs() for each in spec.instances for one in each.devices}
        return self._settings.current.memory.limits(devices)

    def free(self, limits: Nbytes) -> dict[str, int]:
        """Return the bytes that the workers of all models leave of the limits."""
        taken: Counter[str] = Counter()
        for one in self._table if limits else ():
            if not one.is_cold:
                taken.update(self.taken(one, limits))
        return {device: limit - taken[device] for device, limit in limits.items()}

    def taken(self, generation: Generation, limits: Nbytes) -> Nbytes:
        """Return the bytes that a model takes now. On its way to sleep or back it may take as many as before
        and after.
        """
        awake = self.nbytes(generation, limits)
        if generation.residence not in {Residence.SUSPENDING, Residence.ASLEEP, Residence.WAKING}:
            return awake
        asleep = self.asleep_nbytes(generation)
        if generation.residence is Residence.ASLEEP:
            return {device: asleep[device] for device in limits}
        return {device: max(nbytes, asleep[device]) for device, nbytes in awake.items()}

    def asleep_nbytes(self, generation: Generation) -> Counter[str]:
        """Return the bytes that a model takes asleep: measured, and on the host at least all that its GPUs
        get free, because the driver's page-locked memory is not in the kernel's figure for a process.
        """
        spec, found = generation.spec, Counter[str]()
        counts = Counter(device for one in spec.instances for device in one.devices if device != CPU)
        known = self._asleep.get((spec.name, spec.version), {})
        awake = self.nbytes(generation, {**dict.fromkeys(counts, 0), CPU: 0})
        for device, count in counts.items():
            found[device] = min(awake[device], count * known.get(device, CONTEXT_NBYTES))
        moves = any(worker.moves_to_host for worker in generation.group.workers)
        moved_nbytes = sum(awake[device] - found[device] for device in counts) if moves else 0
        host_nbytes = known.get(CPU, 0) * len(spec.instances) or awake[CPU]
        found[CPU] = max(host_nbytes, awake[CPU] + moved_nbytes if counts else 0)
        return found

    def nbytes(self, generation: Generation, limits: Nbytes) -> Nbytes:
        """Return the bytes that a model takes or will take: declared or measured, or else as many for each
        instance as the largest instance that was measured.
        """
        spec = generation.spec
        declared = spec.declared_nbytes
        counts = {
            **Counter(device for one in spec.instances for device in one.devices),
            CPU: len(spec.instances),
        }
        known = self._measured.get((spec.name, spec.version), {})
        shared = self._shared.get((spec.name, spec.version), {})
        largest = Counter[str]() if any(declared.values()) else self._largest
        return {
            device: max(
                declared.get(device, 0),
                counts.get(device, 0) * known.get(device, largest[device]) + shared.get(device, 0),
            )
            for device in limits
        }

    def is_guess(self, generation: Generation) -> bool:
        """Return whether the memory of a model is neither declared nor measured."""
        spec = generation.spec
        return not any(spec.declared_nbytes.values()) and (spec.name, spec.version) not in self._measured

    def measure(self, gpu_memory: Mapping[int, int]) -> None:
        """Measure the memory of the loaded models. ``gpu_memory`` has the bytes on GPUs by process."""
        if not self.limits():
            return
        present = {(spec.name, spec.version) for spec in self._table.specs()}
        self._measured = {key: one for key, one in self._measured.items() if key in present}
        self._asleep = {key: one for key, one in self._asleep.items() if key in present}
        self._shared = {key: one for key, one in self._shared.items() if key in present}
        # The front polls the GPUs: its figure may be older than a change of residence.
        settled_at = time.monotonic() - 2 * self._settings.current.gpu_health_interval_s
        for one in self._table:
            is_asleep = one.residence is Residence.ASLEEP
            if one.spec.on_demand and not (is_asleep or one.residence is Residence.RESIDENT):
                continue
            state = InstanceState.ASLEEP if is_asleep else InstanceState.READY
            lives = [
                (worker, [child.process.pid for child in worker.children])
                for worker in one.group.workers
                if worker.lifecycle.state is state
            ]
            # A worker thread has no process of its own.
            alive = [(worker, pids) for worker, pids in lives if pids and pids != [os.getpid()]]
            if not alive:
                continue
            found = {CPU: host_nbytes(pid for _, pids in alive for pid in pids) // len(alive)}
            used = {device for worker, _ in alive for device in worker.instance.devices} - {CPU}
            shared: dict[str, int] = {}
            for device in used if one.moved_at <= settled_at else ():
                on_device = [
                    self._own_nbytes(worker, device, [gpu_memory.get(pid, 0) for pid in pids])
                    for worker, pids in alive
                    if device in worker.instance.devices
                ]
                if any(on_device):
                    found[device] = max(on_device)
                weights = [each for worker, _ in alive for each in self._table.weights_on(worker, device)]
                shared[device] = sum({each.key: each.nbytes for each in weights}.values())
            if shared and not is_asleep:
                self._shared[one.spec.name, one.spec.version] = shared
            key, measured = (one.spec.name, one.spec.version), self._asleep if is_asleep else self._measured
            measured[key] = {**measured.get(key, {}), **found}
        self._largest = Counter[str]()
        for key, nbytes in self._measured.items():
            self._largest |= Counter(nbytes) + Counter(self._shared.get(key, {}))

    def _own_nbytes(self, worker: WorkerMonitor, device: str, taken: Sequence[int]) -> int:
        """Return the memory of an instance on a GPU, without the shared weights that the driver counts as
        memory of its processes, which have ``taken`` bytes on all GPUs of the instance.
        """
        owned = [one.nbytes for one in self._table.weights_on(worker, device) if one.owner in worker.ranks]
        return max(0, sum(taken) // len(worker.instance.devices) - sum(owned))


def host_nbytes(pids: Iterable[int]) -> int:
    """Return the bytes on the host that the processes of one model take: their private memory, and once the
    memory that they share. Pages of files, which the kernel can drop, do not count.
    """
    private = shared = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # the process may have just ended
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            private += int(fields.get("RssAnon", "0 kB").split()[0]) * 1024
            shared = max(shared, int(fields.get("RssShmem", "0 kB").split()[0]) * 1024)
    return private + shared
