"""What NVML can say no with: its codes, words and exception classes, and the wrapper of every function."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, ParamSpec, TypeVar

from cuda_simulation import traces
from cuda_simulation.machine import Gpu, MachineView, view_from_environment

P = ParamSpec("P")
R = TypeVar("R")

#: name after NVML_ERROR_ -> (code, name after NVMLError_, words)
_ERRORS = {
    "UNINITIALIZED": (1, "Uninitialized", "Uninitialized"),
    "INVALID_ARGUMENT": (2, "InvalidArgument", "Invalid Argument"),
    "NOT_SUPPORTED": (3, "NotSupported", "Not Supported"),
    "NO_PERMISSION": (4, "NoPermission", "Insufficient Permissions"),
    "ALREADY_INITIALIZED": (5, "AlreadyInitialized", "Already Initialized"),
    "NOT_FOUND": (6, "NotFound", "Not Found"),
    "INSUFFICIENT_SIZE": (7, "InsufficientSize", "Insufficient Size"),
    "INSUFFICIENT_POWER": (8, "InsufficientPower", "Insufficient External Power"),
    "DRIVER_NOT_LOADED": (9, "DriverNotLoaded", "Driver Not Loaded"),
    "TIMEOUT": (10, "Timeout", "Timeout"),
    "IRQ_ISSUE": (11, "IrqIssue", "Interrupt Request Issue"),
    "LIBRARY_NOT_FOUND": (12, "LibraryNotFound", "NVML Shared Library Not Found"),
    "FUNCTION_NOT_FOUND": (13, "FunctionNotFound", "Function Not Found"),
    "CORRUPTED_INFOROM": (14, "CorruptedInforom", "Corrupted infoROM"),
    "GPU_IS_LOST": (15, "GpuIsLost", "GPU is lost"),
    "RESET_REQUIRED": (16, "ResetRequired", "GPU requires restart"),
    "OPERATING_SYSTEM": (17, "OperatingSystem", "The operating system has blocked the request."),
    "LIB_RM_VERSION_MISMATCH": (
        18,
        "LibRmVersionMismatch",
        "RM has detected an NVML/RM version mismatch.",
    ),
    "IN_USE": (19, "InUse", "In use"),
    "MEMORY": (20, "Memory", "Insufficient Memory"),
    "GPU_NOT_FOUND": (28, "GpuNotFound", "GPU Not Found"),
    "UNKNOWN": (999, "Unknown", "Unknown Error"),
}
#: The constants: NVML_ERROR_TIMEOUT and so on.
CODES = {f"NVML_ERROR_{name}": code for name, (code, _, _) in _ERRORS.items()} | {"NVML_SUCCESS": 0}
_WORDS = {code: words for code, _, words in _ERRORS.values()}


class NVMLError(Exception):
    """A call that NVML refused; ``value`` is the code. Made of the class that belongs to the code."""

    value: int
    _classes: ClassVar[dict[int, type[NVMLError]]] = {}

    def __new__(cls, value: int | None = None) -> NVMLError:
        chosen = cls._classes.get(value or 0, cls) if cls is NVMLError else cls
        made = super().__new__(chosen)
        if value is not None:
            made.value = value
        return made

    def __str__(self) -> str:
        return _WORDS.get(self.value, f"NVML Error with code {self.value}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NVMLError) and self.value == other.value

    __hash__ = Exception.__hash__


class NVMLLibraryMismatchError(Exception):
    """An unversioned function whose version the driver's library lacks; no NVMLError, as in the library."""


#: Functions of the library that raise ``NVMLLibraryMismatchError`` in place of FUNCTION_NOT_FOUND.
_UNVERSIONED = frozenset({"nvmlDeviceGetComputeRunningProcesses"})


def _subclass(code: int, name: str) -> type[NVMLError]:
    """A class of one code, which is made without an argument."""
    return type(f"NVMLError_{name}", (NVMLError,), {"value": code, "__init__": lambda self, *_: None})


#: The classes: NVMLError_Timeout and so on.
CLASSES = {f"NVMLError_{name}": _subclass(code, name) for code, name, _ in _ERRORS.values()}
NVMLError._classes.update({made.value: made for made in CLASSES.values()})


class Library:
    """NVML in this process. From its first initialisation to its last shutdown it lists the GPUs that there
    were then, and one that was lost meanwhile stays so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._initialised = 0
        self._listed: tuple[str, ...] = ()
        self._lost: set[str] = set()
        self._nodes: tuple[int, ...] = ()

    @functools.cached_property
    def view(self) -> MachineView:
        """The machine."""
        return view_from_environment()

    def initialise(self) -> None:
        """Raises NVMLError: there is no library, or no driver."""
        machine = self.view.now
        if not machine.nvml:
            raise NVMLError(CODES["NVML_ERROR_LIBRARY_NOT_FOUND"])
        if machine.driver_version is None:
            raise NVMLError(CODES["NVML_ERROR_DRIVER_NOT_LOADED"])
        with self._lock:
            self._initialised += 1
            if self._initialised == 1:
                in_order = sorted(machine.gpus, key=lambda gpu: gpu.pci_bus_id)
                self._listed = tuple(gpu.uuid for gpu in in_order)
                self._nodes = traces.nodes(self.view.directory, "nvidiactl", "nvidia0")

    def shut_down(self) -> None:
        with self._lock:
            self._initialised -= 1
            if not self._initialised:
                self._lost.clear()
                for node in self._nodes:
                    os.close(node)
                self._nodes = ()

    def gpus(self) -> list[Gpu]:
        """Those that are listed, as they are now, in the order of the bus."""
        return [self.gpu(uuid) for uuid in self._listed]

    def gpu(self, uuid: str) -> Gpu:
        """The GPU of that UUID, or of the MIG instance of that UUID."""
        found = self.view.gpu(uuid)
        if found.lost:
            self._lost.add(found.uuid)
        return replace(found, lost=found.uuid in self._lost)

    def check(self, name: str) -> None:
        """What every call finds first. Raises NVMLError."""
        machine = self.view.now
        time.sleep(machine.nvml_hang_s)
        if name in machine.failures:
            code = machine.failures[name]
            if code == CODES["NVML_ERROR_FUNCTION_NOT_FOUND"] and name in _UNVERSIONED:
                raise NVMLLibraryMismatchError
            raise NVMLError(code)
        if not self._initialised and not name.startswith("nvmlInit"):
            raise NVMLError(CODES["NVML_ERROR_UNINITIALIZED"])


library = Library()


def _check_gpu(name: str, asked: object = None) -> None:
    """Raises NVMLError: the GPU that is asked, or the one of a MIG instance, fails at this function."""
    uuid = getattr(asked, "_uuid", None)
    code = library.view.gpu(uuid).nvml_failures.get(name) if isinstance(uuid, str) else None
    if code is not None:
        raise NVMLError(code)


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """A function of NVML: takes its time, and fails by what is wrong with the machine."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        library.check(function.__name__)
        _check_gpu(function.__name__, *args[:1])
        return function(*args, **kwargs)

    return call
