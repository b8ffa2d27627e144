"""One look at this machine: its GPUs, and the devices among them that models may name. NVML is asked where
``nvidia-ml-py`` is installed, else the driver's files are read; both in a thread that is left alone when the
driver hangs.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from gpuserve.devices.driver_files import machine_by_files
from gpuserve.devices.machine import Machine, NvidiaDriver
from gpuserve.devices.names import CPU, VARIABLE
from gpuserve.devices.nvml import machine_by_nvml
from gpuserve.devices.visible import VisibleDevice, visible_devices
from gpuserve.errors import DeviceError

#: NVML takes milliseconds, or a second or two where the driver has to be woken up.
LOOK_TIMEOUT_S: Final = 5.0
NOT_INSTALLED: Final = "nvidia-ml-py is not installed"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices ``cuda:0``, ``cuda:1``…; ``variable`` is ``CUDA_VISIBLE_DEVICES``, None where not set."""

    machine: Machine
    devices: tuple[VisibleDevice, ...] = ()
    variable: str | None = None

    def names(self) -> list[str]:
        """Return every device that a model may name, "cpu" first."""
        return [CPU, *(one.name for one in self.devices)]

    def numbered_as(self, earlier: Inventory) -> Inventory:
        """Keep the numbers of an earlier look: a name means one device for as long as a server runs. A device
        that is gone leaves its number free; one that is new gets the next number.
        """
        numbers = {one.entry: one.number for one in earlier.devices}
        unused = 1 + max(numbers.values(), default=-1)
        new = [one.entry for one in self.devices if one.entry not in numbers]
        numbers.update({entry: unused + place for place, entry in enumerate(new)})
        devices = sorted(
            (replace(one, number=numbers[one.entry]) for one in self.devices), key=attrgetter("number")
        )
        return replace(self, devices=tuple(devices))


def load_nvml() -> Any:
    return importlib.import_module("pynvml")


class DriverLook:
    """Looks at the machine, again and again. A look that hangs makes all later ones fail at once. ``root`` is
    where the driver's files are, ``load`` gives the module of NVML or raises ImportError.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
        load: Callable[[], Any] = load_nvml,
        timeout_s: float = LOOK_TIMEOUT_S,
    ) -> None:
        self._root = root
        self._environ = environ
        self._load = load
        self._timeout_s = timeout_s
        self._under_way: Future[Machine] | None = None

    def take(self) -> Inventory:
        """Look at the machine as it is at this moment; ``DeviceError`` where the driver does not answer."""
        variable = (os.environ if self._environ is None else self._environ).get(VARIABLE)
        machine = self._machine()
        return Inventory(machine, visible_devices(machine.gpus, variable), variable)

    def _machine(self) -> Machine:
        hung = self._under_way is not None and not self._under_way.done()
        if not hung:
            self._under_way = self._begin()
        assert self._under_way is not None
        try:
            return self._under_way.result(0 if hung else self._timeout_s)
        except TimeoutError:
            raise DeviceError(
                f"the NVIDIA driver did not answer within {self._timeout_s:g} s, so it cannot be told which "
                "GPUs there are; see whether nvidia-smi answers"
            ) from None

    def _begin(self) -> Future[Machine]:
        found: Future[Machine] = Future()

        def look() -> None:
            try:
                found.set_result(read_machine(self._root, self._load))
            except BaseException as error:  # it is raised again by whoever waits
                found.set_exception(error)

        threading.Thread(target=look, name="gpuserve-devices", daemon=True).start()
        return found


def read_machine(root: Path, load: Callable[[], Any]) -> Machine:
    """Read the GPUs, by NVML where it can be had. May hang with the driver."""
    try:
        nvml = load()
    except ImportError:
        return machine_by_files(root, NOT_INSTALLED)
    try:
        return machine_by_nvml(nvml, root)
    except nvml.NVMLError as error:
        by_files = machine_by_files(root, f"NVML failed: {error}")
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:  # as in a container without the driver's tools
            return by_files
        # A driver that NVML cannot use is of no use to CUDA, whatever the files say.
        is_loaded = error.value != nvml.NVML_ERROR_DRIVER_NOT_LOADED
        return replace(by_files, driver=by_files.driver or (NvidiaDriver() if is_loaded else None), gpus=())
