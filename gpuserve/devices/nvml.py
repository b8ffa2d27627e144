"""NVML, the driver's own library, through ``nvidia-ml-py`` (module ``pynvml``): its one reader. No CUDA.
``machine_by_nvml`` takes one look at what there is; an open ``Nvml`` asks for figures round after round.
Every call may hang with the driver: the caller sees to that. A GPU that does not answer hides no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gpuserve.devices import driver_files
from gpuserve.devices.machine import EXCLUSIVE, PROHIBITED, Gpu, Machine, MigInstance, NvidiaDriver
from gpuserve.devices.readings import SLOWDOWNS, GpuReading, GpuReport, NvmlRound, RemappedRows, Xid

_Value = TypeVar("_Value")

#: NVML_COMPUTEMODE_… by number.
_COMPUTE_MODES: Final = ("default", "exclusive thread", PROHIBITED, EXCLUSIVE)
_MIG_ON: Final = 1
_SCOPE_NODE: Final = 0
_NO_INSTANCE: Final = 0xFFFFFFFF
#: Bits of the sets that NVML fills, in words of 64: room for 4096 CPUs and as many NUMA nodes.
_SET_WORDS: Final = 64
_WORD_BITS: Final = 64

#: NVML_ERROR_…: there is nothing to be asked on this machine.
_ABSENT: Final = frozenset({9, 12, 18})  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH
#: This GPU, or this driver, does not tell. INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND,
#: FUNCTION_NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH, DEPRECATED.
_UNTOLD: Final = frozenset({2, 3, 4, 6, 13, 21, 25, 26})
#: GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND.
_GONE: Final = frozenset({15, 16, 28})
_TIMEOUT: Final = 10
#: What the driver asks for with a GPU that cannot be used as it is: a reset of it or of its bus, a restart of
#: the machine. NVML_GPU_RECOVERY_ACTION_…; the others leave it in use.
_RECOVERY: Final[Mapping[int, str]] = {1: "a reset", 2: "a reboot", 6: "a reset of its bus", 7: "a reboot"}


class NvmlAbsent(Exception):
    """This machine has no NVML. The text says what is missing."""


class NvmlSilent(Exception):
    """NVML gave no answer that says anything. The text is NVML's."""


class NvmlGone(Exception):
    """The GPU cannot be used any more. The text is NVML's."""


# ---- one look at the machine --------------------------------------------------------------------


def machine_by_nvml(nvml: Any, root: Path) -> Machine:
    """The driver and the GPUs, as NVML tells of them. ``nvml`` is the module ``pynvml``; ``/sys`` below
    ``root`` has what NVML does not say. Raises pynvml.NVMLError: NVML cannot be used at all.
    """
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
    """The GPUs that answer; what is to be said of the others goes into ``silent``."""
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
    return Gpu(
        number,
        _text(nvml.nvmlDeviceGetUUID(gpu)),
        ask(lambda: _text(nvml.nvmlDeviceGetName(gpu)), ""),
        bus_id,
        *_memory(nvml, gpu),
        nodes[0] if len(nodes) == 1 else driver_files.numa_node(root, bus_id),
        cpus or driver_files.local_cpus(root, bus_id),
        ask(lambda: _COMPUTE_MODES[nvml.nvmlDeviceGetComputeMode(gpu)], ""),
        in_mig_mode,
        tuple(MigInstance(uuid, *_memory(nvml, part)) for uuid, part in _mig_parts(nvml, gpu))
        if in_mig_mode
        else (),
    )


def _memory(nvml: Any, gpu: Any) -> tuple[int | None, int | None]:
    """Total and free bytes of a GPU's or MIG instance's memory; None where it does not tell."""
    memory = _ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu), None)
    return (None, None) if memory is None else (int(memory.total), int(memory.free))


def _mig_parts(nvml: Any, gpu: Any) -> Iterator[tuple[str, Any]]:
    for number in range(_ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)), 0)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
            uuid = _text(nvml.nvmlDeviceGetUUID(part))
        except nvml.NVMLError:  # no instance has this number
            continue
        yield uuid, part


def _ask(nvml: Any, question: Callable[[], _Value], unknown: _Value) -> _Value:
    """Ask what not every GPU, driver or version of the module can tell."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError, IndexError):
        return unknown


# ---- round after round --------------------------------------------------------------------------


class _Handle(NamedTuple):
    """How NVML is asked: ``whole`` is the GPU, and ``part`` the same or its MIG instance."""

    uuid: str
    product: str
    whole_uuid: str
    whole: Any
    part: Any
    gpu_instance: int | None = None


class Nvml:
    """NVML, open from the start; ``load`` gives the module. Between two rounds of questions ``next_xid``
    waits for errors that the driver reports. What a GPU, a driver or a version of the module does not tell is
    None; a GPU that is gone is a fault; one that does not tell of its memory is silent.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        """Find the GPUs, and listen for what their driver reports. Raises NvmlAbsent: there is none on this
        machine; NvmlSilent: there is, but it does not work.
        """
        self._handles: list[_Handle] = []
        self._events: Any = None
        try:
            self._nvml = load()
        except ImportError:
            raise NvmlAbsent("nvidia-ml-py is not installed") from None
        self._initialise()
        try:
            for number in range(self._nvml.nvmlDeviceGetCount()):
                self._find(number)
        except self._nvml.NVMLError as error:
            self.close()  # NVML counts: initialised once more, it would never look anew
            raise NvmlSilent(str(error)) from None
        self._listen()

    def close(self) -> None:
        """Shut NVML down; an error of that is nobody's any more."""
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass

    def read(self, names: Mapping[str, str]) -> NvmlRound:
        """Ask for everything of every GPU; ``names`` says what the server calls them, by UUID."""
        return NvmlRound(tuple(self._report(one, names.get(one.uuid, "")) for one in self._handles))

    def next_xid(self, timeout_s: float) -> Xid | None:
        """Wait for an error that the driver reports; None where none came, ``NvmlSilent`` where none can."""
        if self._events is None:
            raise NvmlSilent("no GPU here reports errors")
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, max(1, round(timeout_s * 1000)))
            return Xid(self._concerned(event), int(event.eventData))
        except self._nvml.NVMLError as error:
            if _code(error) == _TIMEOUT:
                return None
            raise NvmlSilent(str(error)) from None

    # ---- finding --------------------------------------------------------------------------

    def _initialise(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise (NvmlAbsent if _code(error) in _ABSENT else NvmlSilent)(str(error)) from None

    def _find(self, number: int) -> None:
        """Note how to ask one GPU, or its MIG instances. One that does not answer is not noted: it is lost,
        if it was known before.
        """
        try:
            whole = self._nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = _text(self._nvml.nvmlDeviceGetUUID(whole))
            product = _text(self._told(lambda: self._nvml.nvmlDeviceGetName(whole)) or "")
            if self._told(lambda: self._nvml.nvmlDeviceGetMigMode(whole)[0]) == _MIG_ON:
                for part_uuid, part in _mig_parts(self._nvml, whole):
                    instance = self._told(functools.partial(self._nvml.nvmlDeviceGetGpuInstanceId, part))
                    self._handles.append(_Handle(part_uuid, product, uuid, whole, part, instance))
            else:
                self._handles.append(_Handle(uuid, product, uuid, whole, whole))
        except (self._nvml.NVMLError, NvmlGone, NvmlSilent):
            return

    def _listen(self) -> None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            kind, listened = nvml.nvmlEventTypeXidCriticalError, 0
            for whole in {id(one.whole): one.whole for one in self._handles}.values():
                if nvml.nvmlDeviceGetSupportedEventTypes(whole) & kind:
                    nvml.nvmlDeviceRegisterEvents(whole, kind, events)
                    listened += 1
        except (nvml.NVMLError, AttributeError):  # no permission, or a machine that has no events
            return
        if listened:
            self._events = events

    def _concerned(self, event: Any) -> tuple[str, ...]:
        """The GPU that an event is about, or its MIG instances: the one that the event names, or all. Empty
        where the GPU does not even tell its UUID any more.
        """
        try:
            uuid = _text(self._nvml.nvmlDeviceGetUUID(event.device))
        except self._nvml.NVMLError:
            return ()
        instance = getattr(event, "gpuInstanceId", _NO_INSTANCE)
        parts = [one for one in self._handles if one.gpu_instance is not None and one.whole_uuid == uuid]
        named = [one for one in parts if one.gpu_instance == instance]
        return tuple(one.uuid for one in named or parts) or (uuid,)

    # ---- asking ---------------------------------------------------------------------------

    def _report(self, gpu: _Handle, device: str) -> GpuReport:
        reading, fault = None, ""
        try:
            reading = self._reading(gpu)
            fault = self._recovery(gpu)
        except NvmlGone as error:
            fault = f"NVML says: {error}"
        except NvmlSilent:
            pass
        return GpuReport(gpu.uuid, device, gpu.product, reading, fault)

    def _reading(self, gpu: _Handle) -> GpuReading:
        nvml, told, whole = self._nvml, self._told, gpu.whole
        memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu.part), every_gpu_tells=True)
        rates = told(lambda: nvml.nvmlDeviceGetUtilizationRates(whole))
        power_mw = told(lambda: nvml.nvmlDeviceGetPowerUsage(whole))
        limit_mw = told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole))
        energy_mj = told(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(whole))
        rows = told(lambda: nvml.nvmlDeviceGetRemappedRows(whole))
        pending = told(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(whole))
        return GpuReading(
            memory_total_nbytes=None if memory is None else int(memory.total),
            memory_used_nbytes=None if memory is None else int(memory.used),
            utilization=None if rates is None else rates.gpu / 100,
            temperature_c=told(lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)),
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
        return self._told(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                whole, getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"), nvml.NVML_VOLATILE_ECC
            )
        )

    def _slowdowns(self, whole: Any) -> frozenset[str] | None:
        bits = self._told(lambda: self._nvml.nvmlDeviceGetCurrentClocksEventReasons(whole))
        if bits is None:  # the name before driver 535
            bits = self._told(lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole))
        return None if bits is None else frozenset(word for bit, word in SLOWDOWNS.items() if bits & bit)

    def _processes(self, part: Any) -> dict[int, int]:
        found = self._told(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(part)) or ()
        return {one.pid: one.usedGpuMemory for one in found if one.usedGpuMemory is not None}

    def _recovery(self, gpu: _Handle) -> str:
        """What the driver wants done before the GPU is used again; drivers before 565 do not tell."""
        nvml = self._nvml
        values = self._told(
            lambda: nvml.nvmlDeviceGetFieldValues(gpu.whole, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        )
        if not values or values[0].nvmlReturn != 0:
            return ""
        wanted = _RECOVERY.get(int(values[0].value.uiVal))
        return f"its driver asks for {wanted}" if wanted else ""

    def _told(self, question: Callable[[], _Value], *, every_gpu_tells: bool = False) -> _Value | None:
        """The answer, None where this GPU does not tell, ``NvmlGone`` where it is gone. Any other code is
        silence only where every GPU tells: a driver has codes that no list has, and says them for ever.
        """
        try:
            return question()
        except AttributeError:  # an older module
            return None
        except self._nvml.NVMLError as error:
            code = _code(error)
            if code in _GONE:
                raise NvmlGone(str(error)) from None
            if every_gpu_tells and code not in _UNTOLD:
                raise NvmlSilent(str(error)) from None
            return None


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 0))


def _members(words: Iterable[int]) -> tuple[int, ...]:
    """The numbers of the bits that are set in a sequence of 64-bit words, which is how NVML tells a set."""
    return tuple(
        place * _WORD_BITS + bit
        for place, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if int(word) >> bit & 1
    )


def _text(given: str | bytes) -> str:
    """Text as text: some versions of the module give bytes."""
    return given.decode() if isinstance(given, bytes) else given
