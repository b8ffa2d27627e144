"""The questions to NVML, the driver's own library, through ``nvidia-ml-py`` (module ``pynvml``).

Every call may hang with the driver: only the thread of ``monitor`` makes them. What a GPU, a driver or a
version of the module does not tell is None; a GPU that is gone is a fault; anything else that goes wrong is
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from gpuserve.front.gpu_health.readings import SLOWDOWNS, GpuReport, Reading, RemappedRows, Report, Xid

_Value = TypeVar("_Value")

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
_MIG_ON: Final = 1
_NO_INSTANCE: Final = 0xFFFFFFFF


class NvmlAbsent(Exception):
    """This machine has no NVML. The text says what is missing."""


class NvmlSilent(Exception):
    """NVML gave no answer that says anything. The text is NVML's."""


class NvmlGone(Exception):
    """The GPU cannot be used any more. The text is NVML's."""


class _Handle(NamedTuple):
    """How NVML is asked: ``whole`` is the GPU, and ``part`` the same or its MIG instance."""

    uuid: str
    product: str
    whole_uuid: str
    whole: Any
    part: Any
    gpu_instance: int | None = None


class Nvml:
    """NVML, open. Made by ``open_nvml``.

    Between two rounds of questions ``next_xid`` waits for errors that the driver reports.
    """

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._handles: list[_Handle] = []
        self._events: Any = None

    def open(self) -> None:
        """Find the GPUs, and listen for what their driver reports.

        Raises:
            NvmlAbsent, NvmlSilent: they cannot be found.
        """
        try:
            self._nvml.nvmlInit()
            for number in range(self._nvml.nvmlDeviceGetCount()):
                self._find(number)
        except self._nvml.NVMLError as error:
            raise (NvmlAbsent if _code(error) in _ABSENT else NvmlSilent)(str(error)) from None
        self._listen()

    def close(self) -> None:
        """Let go of it."""
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:  # whatever is wrong with it, nobody asks any more
            pass

    def read(self, names: Mapping[str, str]) -> Report:
        """Ask for everything of every GPU; ``names`` says what the server calls them, by UUID."""
        return Report(tuple(self._report(one, names.get(one.uuid, "")) for one in self._handles))

    def next_xid(self, timeout_s: float) -> Xid | None:
        """Wait for an error that the driver reports; None where none came in time.

        Raises:
            NvmlSilent: nothing can be heard here; the time was not waited.
        """
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

    def _find(self, number: int) -> None:
        """One that does not answer is not found: it is lost, if it was known before."""
        try:
            whole = self._nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = _text(self._nvml.nvmlDeviceGetUUID(whole))
            product = _text(self._told(lambda: self._nvml.nvmlDeviceGetName(whole)) or "")
            if self._told(lambda: self._nvml.nvmlDeviceGetMigMode(whole)[0]) == _MIG_ON:
                self._handles += self._mig_instances(whole, uuid, product)
            else:
                self._handles.append(_Handle(uuid, product, uuid, whole, whole))
        except (self._nvml.NVMLError, NvmlGone, NvmlSilent):
            return

    def _mig_instances(self, whole: Any, whole_uuid: str, product: str) -> Iterator[_Handle]:
        nvml = self._nvml
        for number in range(self._told(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(whole)) or 0):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
                uuid = _text(nvml.nvmlDeviceGetUUID(part))
            except nvml.NVMLError:  # no instance has this number
                continue
            yield _Handle(uuid, product, whole_uuid, whole, part, self._gpu_instance(part))

    def _gpu_instance(self, part: Any) -> int | None:
        return self._told(lambda: int(self._nvml.nvmlDeviceGetGpuInstanceId(part)))

    def _listen(self) -> None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            kind, listened = nvml.nvmlEventTypeXidCriticalError, 0
            for whole in self._wholes():
                if nvml.nvmlDeviceGetSupportedEventTypes(whole) & kind:
                    nvml.nvmlDeviceRegisterEvents(whole, kind, events)
                    listened += 1
        except (nvml.NVMLError, AttributeError):  # no permission, or a machine that has no events
            return
        if listened:
            self._events = events

    def _wholes(self) -> list[Any]:
        """Each GPU once, whatever instances it has."""
        return list({id(one.whole): one.whole for one in self._handles}.values())

    def _concerned(self, event: Any) -> tuple[str, ...]:
        """The GPU that an event is about, or its MIG instances: the one that the event names, or all.

        None where the GPU does not even tell its UUID any more.
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

    def _reading(self, gpu: _Handle) -> Reading:
        nvml, told, whole = self._nvml, self._told, gpu.whole
        memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu.part))
        rates = told(lambda: nvml.nvmlDeviceGetUtilizationRates(whole))
        power_mw = told(lambda: nvml.nvmlDeviceGetPowerUsage(whole))
        limit_mw = told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole))
        energy_mj = told(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(whole))
        rows = told(lambda: nvml.nvmlDeviceGetRemappedRows(whole))
        pending = told(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(whole))
        return Reading(
            memory_total_nbytes=None if memory is None else int(memory.total),
            memory_used_nbytes=None if memory is None else int(memory.used),
            utilization=None if rates is None else rates.gpu / 100,
            temperature_c=told(lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)),
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            ecc_corrected=self._ecc_errors(whole, "CORRECTED"),
            ecc_uncorrected=self._ecc_errors(whole, "UNCORRECTED"),
            remapped_rows=None if rows is None else _remapped(*rows),
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

    def _told(self, question: Callable[[], _Value]) -> _Value | None:
        """The answer, or None where this GPU does not tell.

        Raises:
            NvmlGone, NvmlSilent: something is wrong with it.
        """
        try:
            return question()
        except AttributeError:  # an older module
            return None
        except self._nvml.NVMLError as error:
            code = _code(error)
            if code in _UNTOLD:
                return None
            raise (NvmlGone if code in _GONE else NvmlSilent)(str(error)) from None


def open_nvml(load: Callable[[], Any]) -> Nvml:
    """NVML with the GPUs that there are; ``load`` gives the module.

    Raises:
        NvmlAbsent: there is none on this machine.
        NvmlSilent: there is, but it does not work.
    """
    try:
        module = load()
    except ImportError:
        raise NvmlAbsent("nvidia-ml-py is not installed") from None
    opened = Nvml(module)
    opened.open()
    return opened


def _remapped(corrected: int, uncorrected: int, pending: int, failed: int) -> RemappedRows:
    return RemappedRows(corrected, uncorrected, bool(pending), bool(failed))


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 0))


def _text(given: str | bytes) -> str:
    """Some versions of the module give bytes."""
    return given.decode() if isinstance(given, bytes) else given
