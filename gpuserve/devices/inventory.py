"""The devices that models may name: the visible GPUs of this machine, and the lookup of a device by name.

NVML is used if ``nvidia-ml-py`` is installed, else the driver's files. ``CUDA_VISIBLE_DEVICES`` is read as
CUDA reads it: numbers and UUIDs (or prefixes of UUIDs), up to the first entry that names no device or a
device that was named before. Numbers count the GPUs in the order of the PCI bus. Unlike with CUDA, which lets
a process use only one MIG instance, every MIG instance gets its own worker process.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from gpuserve.core.errors import DeviceError
from gpuserve.devices.machine import PROHIBITED, Gpu, Machine, MigInstance, NvidiaDriver, machine_by_files
from gpuserve.devices.names import CPU, EVERY_GPU, VARIABLE, gpu_name, number_of
from gpuserve.devices.nvml import machine_by_nvml


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A GPU or a MIG instance as ``cuda:N``. ``entry`` is its process's value of CUDA_VISIBLE_DEVICES."""

    number: int
    gpu: Gpu
    mig: MigInstance | None
    entry: str

    @property
    def name(self) -> str:
        return gpu_name(self.number)

    @property
    def uuid(self) -> str:
        return self.gpu.uuid if self.mig is None else self.mig.uuid


def visible_devices(gpus: Sequence[Gpu], variable: str | None) -> tuple[VisibleDevice, ...]:
    """Return the devices by number. ``variable`` is ``CUDA_VISIBLE_DEVICES``, None if it is not set."""
    chosen: Iterable[_Chosen]
    if variable is None:
        chosen = (part for gpu in gpus for part in _parts(gpu, str(gpu.number)))
    else:
        chosen = _listed(gpus, variable.split(","))
    return tuple(VisibleDevice(number, *one) for number, one in enumerate(chosen))


def matches_uuid(uuid: str, written: str) -> bool:
    """Return whether a text is a UUID or a prefix of it."""
    return uuid.casefold().startswith(written.casefold())


_Chosen = tuple[Gpu, MigInstance | None, str]


def _parts(gpu: Gpu, entry: str) -> Iterator[_Chosen]:
    """Yield a GPU as CUDA sees it: the GPU (as ``entry`` without a UUID), or in MIG mode its instances."""
    if gpu.in_mig_mode:
        yield from ((gpu, one, one.uuid) for one in gpu.mig)
    else:
        yield gpu, None, gpu.uuid or entry


def _listed(gpus: Sequence[Gpu], entries: Sequence[str]) -> Iterator[_Chosen]:
    seen: set[str] = set()
    for entry in entries:
        one = _named(gpus, entry.strip())
        if one is None or one[2] in seen:
            return
        seen.add(one[2])
        yield one


def _named(gpus: Sequence[Gpu], entry: str) -> _Chosen | None:
    """Return the device that an entry names; a GPU in MIG mode means its first instance, as in CUDA."""
    if entry.isdecimal():
        found = [part for gpu in gpus if gpu.number == int(entry) for part in _parts(gpu, entry)][:1]
    elif not entry.startswith(("GPU-", "MIG-")):
        found = []
    elif gpus and not any(gpu.uuid for gpu in gpus):
        # The driver alone knows which GPU has the UUID; assume that the GPU exists.
        found = [(Gpu(len(gpus), entry), None, entry)]
    else:
        found = []
        for gpu in gpus:
            parts = list(_parts(gpu, entry))
            found += parts[:1] if gpu.uuid and matches_uuid(gpu.uuid, entry) else []
            found += [one for one in parts if one[1] is not None and matches_uuid(one[1].uuid, entry)]
    return found[0] if len(found) == 1 else None


#: NVML takes milliseconds, or a second or two if the driver has to be initialized.
LOOK_TIMEOUT_S: Final = 5.0
NOT_INSTALLED: Final = "nvidia-ml-py is not installed"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices ``cuda:0``, ``cuda:1``…; ``variable`` is ``CUDA_VISIBLE_DEVICES``, None if not set."""

    machine: Machine
    devices: tuple[VisibleDevice, ...] = ()
    variable: str | None = None

    def names(self) -> list[str]:
        """Return every device that a model may name, "cpu" first."""
        return [CPU, *(one.name for one in self.devices)]

    def numbered_as(self, earlier: Inventory) -> Inventory:
        """Return this inventory with the numbers of an earlier one; a new device gets the next number."""
        numbers = {one.entry: one.number for one in earlier.devices}
        unused = 1 + max(numbers.values(), default=-1)
        new = [one.entry for one in self.devices if one.entry not in numbers]
        numbers.update({entry: unused + place for place, entry in enumerate(new)})
        renumbered = (replace(one, number=numbers[one.entry]) for one in self.devices)
        return replace(self, devices=tuple(sorted(renumbered, key=attrgetter("number"))))


def load_nvml() -> Any:
    return importlib.import_module("pynvml")


@dataclass
class DriverReader:
    """A reader of the machine's inventory, in a thread that is abandoned if the driver hangs; then all later
    readings fail at once. ``load`` returns the module of NVML or raises ImportError.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] | None = None
    load: Callable[[], Any] = load_nvml
    timeout_s: float = LOOK_TIMEOUT_S
    _pending: Future[Machine] | None = None

    def read(self) -> Inventory:
        """Return the inventory of the machine now, or raise DeviceError if the driver does not respond."""
        variable = (os.environ if self.environ is None else self.environ).get(VARIABLE)
        machine = self._machine()
        return Inventory(machine, visible_devices(machine.gpus, variable), variable)

    def _machine(self) -> Machine:
        hung = self._pending is not None and not self._pending.done()
        if not hung:
            self._pending = self._start_reading()
        assert self._pending is not None
        try:
            return self._pending.result(0 if hung else self.timeout_s)
        except TimeoutError:
            late = f"the NVIDIA driver did not answer within {self.timeout_s:g} s"
            unknown = "so it cannot be told which GPUs there are; see whether nvidia-smi answers"
            raise DeviceError(f"{late}, {unknown}") from None

    def _start_reading(self) -> Future[Machine]:
        found: Future[Machine] = Future()

        def look() -> None:
            try:
                found.set_result(read_machine(self.root, self.load))
            except BaseException as error:  # the waiting thread raises it again
                found.set_exception(error)

        threading.Thread(target=look, name="gpuserve-devices", daemon=True).start()
        return found


def read_machine(root: Path, load: Callable[[], Any]) -> Machine:
    """Return the GPUs of the machine, by NVML if it is installed. The call may hang with the driver."""
    try:
        nvml = load()
    except ImportError:
        return machine_by_files(root, NOT_INSTALLED)
    try:
        return machine_by_nvml(nvml, root)
    except nvml.NVMLError as error:
        by_files = machine_by_files(root, f"NVML failed: {error}")
        # The library is absent, such as in a container without the driver's tools.
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return by_files
        # CUDA cannot use a driver that NVML cannot use, whatever the files say.
        is_loaded = error.value != nvml.NVML_ERROR_DRIVER_NOT_LOADED
        return replace(by_files, driver=by_files.driver or (NvidiaDriver() if is_loaded else None), gpus=())


def devices_named(text: str, inventory: Inventory) -> tuple[VisibleDevice, ...]:
    """Return the devices of a name other than "cpu", for ``cuda:*`` all, or raise DeviceError."""
    if text == EVERY_GPU:
        found = inventory.devices
    elif (number := number_of(text)) is not None:
        found = tuple(one for one in inventory.devices if one.number == number)
    else:
        found = _by_uuid(text, inventory)
    if not found:
        raise DeviceError(f"this machine has no device {text!r}, {_what_there_is(inventory)}")
    for device in found:
        if device.gpu.compute_mode == PROHIBITED:
            mode = f"{device.name} ({device.gpu.label}) is in compute mode {PROHIBITED!r}"
            raise DeviceError(f"{mode}: no process may use it")
    return found


def _by_uuid(text: str, inventory: Inventory) -> tuple[VisibleDevice, ...]:
    found = tuple(one for one in inventory.devices if one.uuid and matches_uuid(one.uuid, text))
    if len(found) > 1:
        names = ", ".join(one.uuid for one in found)
        raise DeviceError(f"{text!r} is the beginning of several UUIDs, {names}: write more of it")
    if not found:
        _refuse_uuid(text, inventory)
    return found


def _refuse_uuid(text: str, inventory: Inventory) -> None:
    machine = inventory.machine
    for gpu in machine.gpus:
        if gpu.uuid and matches_uuid(gpu.uuid, text):
            if not gpu.in_mig_mode:
                raise DeviceError(_hidden(gpu.uuid, inventory))
            parts = ", ".join(one.uuid for one in gpu.mig)
            instead = f": name one of its instances, {parts}" if parts else ", and it has no MIG instances"
            raise DeviceError(f"{gpu.uuid} is in MIG mode and cannot be used as a whole{instead}")
        for one in gpu.mig:
            if matches_uuid(one.uuid, text):
                raise DeviceError(_hidden(one.uuid, inventory))
    if inventory.devices and machine.shortage:
        why = machine.shortage
        if text.startswith("MIG-"):
            raise DeviceError(f"MIG instances such as {text!r} are only found by NVML, but {why}")
        if not any(one.uuid for one in inventory.devices):
            raise DeviceError(f"the UUIDs of the GPUs are not known here, so {text!r} cannot be found: {why}")


def _hidden(uuid: str, inventory: Inventory) -> str:
    return f"{uuid} is on this machine, but {VARIABLE} ({inventory.variable!r}) leaves it out"


def _what_there_is(inventory: Inventory) -> str:
    """Return ``only cpu, cuda:0 (GPU-…); CUDA_VISIBLE_DEVICES is '0'``, or the reason why there is no GPU."""
    known = [f"{one.name} ({one.uuid})" if one.uuid else one.name for one in inventory.devices]
    text = f"only {', '.join([CPU, *known])}"
    if not known:
        return f"{text}: {missing_gpu_reason(inventory)}"
    if inventory.variable is not None:
        text += f"; {VARIABLE} is {inventory.variable!r}"
    if inventory.machine.shortage not in ("", NOT_INSTALLED):
        text += f"; {inventory.machine.shortage}"
    return text


def missing_gpu_reason(inventory: Inventory) -> str:
    """Return, as a clause, the reason why there is no usable GPU."""
    machine = inventory.machine
    if machine.gpus and all(gpu.in_mig_mode and not gpu.mig for gpu in machine.gpus):
        return f"{_counted(machine.gpus, 'GPU')} in MIG mode, without any MIG instance"
    if machine.gpus:
        return f"{VARIABLE} ({inventory.variable!r}) leaves none of {_counted(machine.gpus, 'GPU')}"
    if machine.idle_gpus:
        served = "it" if len(machine.idle_gpus) == 1 else "them"
        found = f"{_counted(machine.idle_gpus, 'NVIDIA GPU')} on the PCI bus"
        return f"{found}, but no NVIDIA driver that serves {served}"
    if machine.driver is None:
        return "no NVIDIA driver was found"
    version = f" {machine.driver.version}" if machine.driver.version else ""
    why = machine.shortage if machine.shortage not in ("", NOT_INSTALLED) else "it has none for this process"
    return f"the NVIDIA driver{version} was found, but no GPU: {why}"


def _counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
