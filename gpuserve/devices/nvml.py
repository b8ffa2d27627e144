"""The only user of NVML, the driver's library, through ``nvidia-ml-py`` (module ``pynvml``), without CUDA.
``machine_by_nvml`` reads the GPUs once; an open ``Nvml`` reads their figures periodically. Every call may
hang with the driver, so callers use a thread. A GPU that does not respond does not affect the others.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gpuserve.devices.machine import (
    EXCLUSIVE,
    PROHIBITED,
    SLOWDOWNS,
    Gpu,
    GpuLink,
    GpuLinks,
    GpuReading,
    GpuReport,
    Machine,
    MigInstance,
    NvidiaDriver,
    NvmlRound,
    RemappedRows,
    Xid,
    local_cpus,
    numa_node,
)

_Value = TypeVar("_Value")

#: NVML_COMPUTEMODE_… by number.
_COMPUTE_MODES: Final = ("default", "exclusive thread", PROHIBITED, EXCLUSIVE)
_MIG_ON: Final = 1
_SCOPE_NODE: Final = 0
_NO_INSTANCE: Final = 0xFFFFFFFF
#: Words of 64 bits in the sets that NVML fills: room for 4096 CPUs and as many NUMA nodes.
_SET_WORDS: Final = 64
_WORD_BITS: Final = 64

#: NVML_ERROR_…: this machine has no usable NVML.
_ABSENT: Final = frozenset({9, 12, 18})  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH
#: NVML_ERROR_…: this GPU or driver does not report the figure. INVALID_ARGUMENT, NOT_SUPPORTED,
#: NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH, DEPRECATED.
_UNREPORTED: Final = frozenset({2, 3, 4, 6, 13, 21, 25, 26})
#: GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND.
_GONE: Final = frozenset({15, 16, 28})
_TIMEOUT: Final = 10
#: NVML_P2P_CAPS_INDEX_NVLINK, and …_READ, which GPUs behind one PCIe root have as well.
_LINK_CAPABILITIES: Final[Mapping[GpuLink, int]] = {GpuLink.NVLINK: 2, GpuLink.PCIE: 0}
_P2P_OK: Final = 0
#: Recovery actions that the driver requests for a GPU that cannot be used: NVML_GPU_RECOVERY_ACTION_…. All
#: other actions leave the GPU in use.
_RECOVERY: Final[Mapping[int, str]] = {1: "a reset", 2: "a reboot", 6: "a reset of its bus", 7: "a reboot"}


class NvmlMissing(Exception):
    """The absence of NVML on this machine, with the missing part as its text."""


class NvmlUnresponsive(Exception):
    """NVML gave no useful response; the text is NVML's."""


class GpuLost(Exception):
    """The GPU cannot be used any more; the text is NVML's."""


def machine_by_nvml(nvml: Any, root: Path) -> Machine:
    """Return driver and GPUs by ``nvml``, completed from ``/sys`` below ``root``; may raise NVMLError."""
    nvml.nvmlInit()
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()  # 13010 is "13.1"
        cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}"
        driver = NvidiaDriver(_text(nvml.nvmlSystemGetDriverVersion()), cuda_version)
        silent: list[str] = []
        gpus = tuple(_gpus(nvml, root, silent))
        return Machine(driver, gpus, ", ".join(silent))
    finally:
        nvml.nvmlShutdown()


def _gpus(nvml: Any, root: Path, silent: list[str]) -> Iterator[Gpu]:
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            yield _gpu(nvml, root, number)
        except nvml.NVMLError as error:
            silent.append(f"GPU {number} does not answer ({error})")


def _gpu(nvml: Any, root: Path, number: int) -> Gpu:
    gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    ask = functools.partial(_ask, nvml)
    bus_id = ask(lambda: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId), "")
    in_mig_mode = ask(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0] == _MIG_ON, False)
    nodes = _members(ask(lambda: nvml.nvmlDeviceGetMemoryAffinity(gpu, _SET_WORDS, _SCOPE_NODE), ()))
    cpus = _members(ask(lambda: nvml.nvmlDeviceGetCpuAffinity(gpu, _SET_WORDS), ()))
    parts: tuple[MigInstance, ...] = ()
    if in_mig_mode:
        parts = tuple(MigInstance(uuid, *_memory(nvml, part)) for uuid, part in _mig_parts(nvml, gpu))
    return Gpu(
        number,
        _text(nvml.nvmlDeviceGetUUID(gpu)),
        ask(lambda: _text(nvml.nvmlDeviceGetName(gpu)), ""),
        bus_id,
        *_memory(nvml, gpu),
        nodes[0] if len(nodes) == 1 else numa_node(root, bus_id),
        cpus or local_cpus(root, bus_id),
        ask(lambda: _COMPUTE_MODES[nvml.nvmlDeviceGetComputeMode(gpu)], ""),
        in_mig_mode,
        parts,
    )


def _memory(nvml: Any, gpu: Any) -> tuple[int | None, int | None]:
    memory = _ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu), None)
    return (None, None) if memory is None else (int(memory.total), int(memory.free))


def _mig_parts(nvml: Any, gpu: Any) -> Iterator[tuple[str, Any]]:
    for number in range(_ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)), 0)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
            uuid = _text(nvml.nvmlDeviceGetUUID(part))
        except nvml.NVMLError:  # there is no instance with this number
            continue
        yield uuid, part


def _ask(nvml: Any, question: Callable[[], _Value], unknown: _Value) -> _Value:
    """Return the result of a question that not every GPU, driver or version of the module supports."""
    try:
        return question()
    except (nvml.NVMLError, IndexError, *_absent_functions(nvml)):
        return unknown


def _absent_functions(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the errors that are not NVMLErrors: of a function that the module does not have, and of one of
    the module's unversioned functions whose version the driver's library does not have.
    """
    return AttributeError, getattr(nvml, "NVMLLibraryMismatchError", AttributeError)


class _GpuHandles(NamedTuple):
    """The NVML handles of a device: ``whole`` is the GPU, and ``part`` the GPU or its MIG instance."""

    uuid: str
    product: str
    whole_uuid: str
    whole: Any
    part: Any
    gpu_instance: int | None = None


class Nvml:
    """An open NVML. ``next_xid`` waits for errors that the driver reports, between two rounds of ``read``. A
    figure that a GPU, a driver or a version of the module does not report is None. A GPU that is gone has a
    fault. A GPU that does not even report its memory has no reading.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        """Find the GPUs, and register for errors. Raise NvmlMissing or NvmlUnresponsive."""
        self._handles: list[_GpuHandles] = []
        self._events: Any = None
        try:
            self._nvml = load()
        except ImportError:
            raise NvmlMissing("nvidia-ml-py is not installed") from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise (NvmlMissing if _code(error) in _ABSENT else NvmlUnresponsive)(str(error)) from None
        try:
            for number in range(self._nvml.nvmlDeviceGetCount()):
                self._add_handles(number)
        except self._nvml.NVMLError as error:
            self.close()  # NVML counts its users: initialised once more, it would never search again
            raise NvmlUnresponsive(str(error)) from None
        self._register_events()

    def close(self) -> None:
        """Shut NVML down; ignore errors."""
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass

    def read(self, names: Mapping[str, str]) -> NvmlRound:
        """Return the figures of every GPU; ``names`` are the server's names of the GPUs by UUID."""
        return NvmlRound(tuple(self._report(one, names.get(one.uuid, "")) for one in self._handles))

    def links(self, names: Mapping[str, str]) -> GpuLinks:
        """Return how the GPUs in ``names`` reach each other, as far as the driver reports it."""
        # MIG instances reach no memory of others.
        whole = [
            (names[one.uuid], one.whole)
            for one in self._handles
            if one.uuid in names and one.gpu_instance is None
        ]
        found = {}
        for (name, gpu), (other_name, other) in itertools.combinations(whole, 2):
            for link, capability in _LINK_CAPABILITIES.items():
                pair = functools.partial(self._nvml.nvmlDeviceGetP2PStatus, gpu, other, capability)
                if _ask(self._nvml, pair, None) == _P2P_OK:
                    found[frozenset((name, other_name))] = link
                    break
        return GpuLinks(found)

    def next_xid(self, timeout_s: float) -> Xid | None:
        """Return the driver's next error or None; raise NvmlUnresponsive if no GPU reports errors."""
        if self._events is None:
            raise NvmlUnresponsive("no GPU here reports errors")
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, max(1, round(timeout_s * 1000)))
            return Xid(self._affected_uuids(event), int(event.eventData))
        except self._nvml.NVMLError as error:
            if _code(error) == _TIMEOUT:
                return None
            raise NvmlUnresponsive(str(error)) from None

    # ---- finding --------------------------------------------------------------------------

    def _add_handles(self, number: int) -> None:
        """Record the handles of one GPU or its MIG instances; leave out a GPU that does not respond."""
        try:
            whole = self._nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = _text(self._nvml.nvmlDeviceGetUUID(whole))
            product = _text(self._query(lambda: self._nvml.nvmlDeviceGetName(whole)) or "")
            if self._query(lambda: self._nvml.nvmlDeviceGetMigMode(whole)[0]) == _MIG_ON:
                for part_uuid, part in _mig_parts(self._nvml, whole):
                    instance = self._query(functools.partial(self._nvml.nvmlDeviceGetGpuInstanceId, part))
                    self._handles.append(_GpuHandles(part_uuid, product, uuid, whole, part, instance))
            else:
                self._handles.append(_GpuHandles(uuid, product, uuid, whole, whole))
        except (self._nvml.NVMLError, GpuLost, NvmlUnresponsive):
            return

    def _register_events(self) -> None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            kind, listened = nvml.nvmlEventTypeXidCriticalError, 0
            for whole in {id(one.whole): one.whole for one in self._handles}.values():
                if nvml.nvmlDeviceGetSupportedEventTypes(whole) & kind:
                    nvml.nvmlDeviceRegisterEvents(whole, kind, events)
                    listened += 1
        except (nvml.NVMLError, *_absent_functions(nvml)):  # no permission, or a machine without events
            return
        if listened:
            self._events = events

    def _affected_uuids(self, event: Any) -> tuple[str, ...]:
        """Return the GPU of an event, or its MIG instances; empty if the GPU does not report its UUID."""
        try:
            uuid = _text(self._nvml.nvmlDeviceGetUUID(event.device))
        except self._nvml.NVMLError:
            return ()
        instance = getattr(event, "gpuInstanceId", _NO_INSTANCE)
        parts = [one for one in self._handles if one.gpu_instance is not None and one.whole_uuid == uuid]
        named = [one for one in parts if one.gpu_instance == instance]
        return tuple(one.uuid for one in named or parts) or (uuid,)

    # ---- asking ---------------------------------------------------------------------------

    def _report(self, gpu: _GpuHandles, device: str) -> GpuReport:
        reading, fault = None, ""
        try:
            reading = self._reading(gpu)
            fault = self._recovery(gpu)
        except GpuLost as error:
            fault = f"NVML says: {error}"
        except NvmlUnresponsive:
            pass
        return GpuReport(gpu.uuid, device, gpu.product, reading, fault)

    def _reading(self, gpu: _GpuHandles) -> GpuReading:
        nvml, query, whole = self._nvml, self._query, gpu.whole
        memory = query(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu.part), every_gpu_tells=True)
        rates = query(lambda: nvml.nvmlDeviceGetUtilizationRates(whole))
        power_mw = query(lambda: nvml.nvmlDeviceGetPowerUsage(whole))
        limit_mw = query(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole))
        energy_mj = query(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(whole))
        rows = query(lambda: nvml.nvmlDeviceGetRemappedRows(whole))
        pending = query(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(whole))
        return GpuReading(
            memory_total_nbytes=None if memory is None else int(memory.total),
            memory_used_nbytes=None if memory is None else int(memory.used),
            utilization=None if rates is None else rates.gpu / 100,
            temperature_c=query(lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            ecc_corrected=self._ecc_errors(whole, "CORRECTED"),
            ecc_uncorrected=self._ecc_errors(whole, "UNCORRECTED"),
            remapped_rows=None if rows is None else RemappedRows(*rows[:2], *map(bool, rows[2:])),
            retired_pages_pending=None if pending is None else bool(pending),
            slowdowns=self._slowdowns(whole),
            processes=self._processes(gpu.part),
        )

    def _ecc_errors(self, whole: Any, kind: str) -> int | None:
        nvml = self._nvml
        error = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
        return self._query(lambda: nvml.nvmlDeviceGetTotalEccErrors(whole, error, nvml.NVML_VOLATILE_ECC))

    def _slowdowns(self, whole: Any) -> frozenset[str] | None:
        bits = self._query(lambda: self._nvml.nvmlDeviceGetCurrentClocksEventReasons(whole))
        if bits is None:  # the name before driver 535
            bits = self._query(lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole))
        return None if bits is None else frozenset(word for bit, word in SLOWDOWNS.items() if bits & bit)

    def _processes(self, part: Any) -> dict[int, int]:
        """Return the bytes of each process on a GPU, by pid. Return none if the pids are those of another
        namespace, as in a container with some drivers: a worker here may have the number of a process there.
        """
        for _ in range(2):  # a process may have ended since the first query
            found = self._query(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(part)) or ()
            if all(_is_process(one.pid) for one in found):
                return {one.pid: one.usedGpuMemory for one in found if one.usedGpuMemory is not None}
        return {}

    def _recovery(self, gpu: _GpuHandles) -> str:
        """Return the recovery action that the driver (from 565 on) requests for a GPU, or ""."""
        nvml = self._nvml
        values = self._query(
            lambda: nvml.nvmlDeviceGetFieldValues(gpu.whole, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        )
        if not values or values[0].nvmlReturn != 0:
            return ""
        wanted = _RECOVERY.get(int(values[0].value.uiVal))
        return f"its driver asks for {wanted}" if wanted else ""

    def _query(self, question: Callable[[], _Value], *, every_gpu_tells: bool = False) -> _Value | None:
        """Return a figure, or None if this GPU does not report it. Raise GpuLost if the GPU is gone. Drivers
        return undocumented error codes permanently; such a code raises NvmlUnresponsive only for a figure
        that every GPU reports.
        """
        try:
            return question()
        except _absent_functions(self._nvml):
            return None
        except self._nvml.NVMLError as error:
            code = _code(error)
            if code in _GONE:
                raise GpuLost(str(error)) from None
            if every_gpu_tells and code not in _UNREPORTED:
                raise NvmlUnresponsive(str(error)) from None
            return None


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 0))


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _members(words: Iterable[int]) -> tuple[int, ...]:
    """Return the positions of the set bits in a sequence of 64-bit words, which is NVML's form of a set."""
    pairs = ((place * _WORD_BITS, int(word)) for place, word in enumerate(words))
    return tuple(first + bit for first, word in pairs for bit in range(_WORD_BITS) if word >> bit & 1)


def _text(given: str | bytes) -> str:
    """Return text as str: some versions of the module return bytes."""
    return given.decode() if isinstance(given, bytes) else given
