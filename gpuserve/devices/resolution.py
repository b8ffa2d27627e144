"""From the device that a model names to the devices that there are, or to the sentence that says what was
found and what is missing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuserve.devices.inventory import NOT_INSTALLED, Inventory
from gpuserve.devices.machine import PROHIBITED, Gpu
from gpuserve.devices.names import CPU, EVERY_GPU, VARIABLE, number_of
from gpuserve.devices.visible import VisibleDevice, matches
from gpuserve.errors import DeviceError


def devices_named(text: str, inventory: Inventory) -> tuple[VisibleDevice, ...]:
    """Return the devices behind a name other than "cpu": one, or for ``cuda:*`` every one. Raises
    DeviceError: there is none, several begin with the UUID, or no process may use it.
    """
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
            raise DeviceError(
                f"{device.name} ({device.gpu.label}) is in compute mode {PROHIBITED!r}: no process may use it"
            )
    return found


def _by_uuid(text: str, inventory: Inventory) -> tuple[VisibleDevice, ...]:
    found = tuple(one for one in inventory.devices if one.uuid and matches(one.uuid, text))
    if len(found) > 1:
        names = ", ".join(one.uuid for one in found)
        raise DeviceError(f"{text!r} is the beginning of several UUIDs, {names}: write more of it")
    if not found:
        _refuse_uuid(text, inventory)
    return found


def _refuse_uuid(text: str, inventory: Inventory) -> None:
    """Raise ``DeviceError`` where there is more to say of a UUID than that it is not known."""
    machine = inventory.machine
    for gpu in machine.gpus:
        if gpu.uuid and matches(gpu.uuid, text):
            raise DeviceError(_refused_whole(gpu) if gpu.in_mig_mode else _hidden(gpu.uuid, inventory))
        for one in gpu.mig:
            if matches(one.uuid, text):
                raise DeviceError(_hidden(one.uuid, inventory))
    if inventory.devices and machine.shortage:
        why = machine.shortage
        if text.startswith("MIG-"):
            raise DeviceError(f"MIG instances such as {text!r} are only found by NVML, but {why}")
        if not any(one.uuid for one in inventory.devices):
            raise DeviceError(f"the UUIDs of the GPUs are not known here, so {text!r} cannot be found: {why}")


def _refused_whole(gpu: Gpu) -> str:
    parts = ", ".join(one.uuid for one in gpu.mig)
    instead = f": name one of its instances, {parts}" if parts else ", and it has no MIG instances"
    return f"{gpu.uuid} is in MIG mode and cannot be used as a whole{instead}"


def _hidden(uuid: str, inventory: Inventory) -> str:
    return f"{uuid} is on this machine, but {VARIABLE} ({inventory.variable!r}) leaves it out"


def _what_there_is(inventory: Inventory) -> str:
    """Write ``only cpu, cuda:0 (GPU-…); CUDA_VISIBLE_DEVICES is '0'``, or why there is no GPU at all."""
    known = [f"{one.name} ({one.uuid})" if one.uuid else one.name for one in inventory.devices]
    text = f"only {', '.join([CPU, *known])}"
    if not known:
        return f"{text}: {absence(inventory)}"
    if inventory.variable is not None:
        text += f"; {VARIABLE} is {inventory.variable!r}"
    if inventory.machine.shortage not in ("", NOT_INSTALLED):
        text += f"; {inventory.machine.shortage}"
    return text


def absence(inventory: Inventory) -> str:
    """Say in a clause why there is no GPU to be used: what was found and what is missing."""
    machine = inventory.machine
    if machine.gpus and all(gpu.in_mig_mode and not gpu.mig for gpu in machine.gpus):
        return f"{_counted(machine.gpus, 'GPU')} in MIG mode, without any MIG instance"
    if machine.gpus:
        return f"{VARIABLE} ({inventory.variable!r}) leaves none of {_counted(machine.gpus, 'GPU')}"
    if machine.idle_gpus:
        return (
            f"{_counted(machine.idle_gpus, 'NVIDIA GPU')} on the PCI bus, but no NVIDIA driver that serves "
            f"{'it' if len(machine.idle_gpus) == 1 else 'them'}"
        )
    if machine.driver is None:
        return "no NVIDIA driver was found"
    version = f" {machine.driver.version}" if machine.driver.version else ""
    why = machine.shortage if machine.shortage not in ("", NOT_INSTALLED) else "it has none for this process"
    return f"the NVIDIA driver{version} was found, but no GPU: {why}"


def _counted(things: Sequence[object] | Iterable[object], noun: str) -> str:
    count = len(list(things))
    return f"{count} {noun}{'' if count == 1 else 's'}"
