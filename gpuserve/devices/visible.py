"""Which devices ``CUDA_VISIBLE_DEVICES`` leaves of a machine's GPUs, and what they are called here. Pure. The
variable is read as CUDA reads it: numbers and UUIDs (or beginnings of them), up to the first entry that names
nothing or names a device again. Numbers count the GPUs in the order of the PCI bus. One thing differs: CUDA
lets a process use one MIG instance only, but here every instance gets its own worker process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuserve.devices.machine import Gpu, MigInstance
from gpuserve.devices.names import gpu_name


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A GPU, or a MIG instance of one, as ``cuda:N``. ``entry`` is what makes it visible to a process."""

    number: int
    gpu: Gpu
    mig: MigInstance | None
    entry: str

    @property
    def name(self) -> str:
        return gpu_name(self.number)

    @property
    def uuid(self) -> str:
        """The UUID of the MIG instance or of the GPU; "" where it is not known."""
        return self.gpu.uuid if self.mig is None else self.mig.uuid


def visible_devices(gpus: Sequence[Gpu], variable: str | None) -> tuple[VisibleDevice, ...]:
    """Return the devices by number. ``variable`` is ``CUDA_VISIBLE_DEVICES``, None where it is not set."""
    chosen = _all(gpus) if variable is None else _listed(gpus, variable.split(","))
    return tuple(VisibleDevice(number, *one) for number, one in enumerate(chosen))


def matches(uuid: str, written: str) -> bool:
    """Whether what is written is a UUID, or the beginning of it."""
    return uuid.casefold().startswith(written.casefold())


_Chosen = tuple[Gpu, MigInstance | None, str]


def _all(gpus: Sequence[Gpu]) -> Iterator[_Chosen]:
    for gpu in gpus:
        yield from _parts(gpu, str(gpu.number))


def _parts(gpu: Gpu, entry: str) -> Iterator[_Chosen]:
    """Give a GPU as CUDA has it: whole, or in MIG mode its instances. ``entry`` is for one without a UUID."""
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
    """Return what one entry names: of a GPU in MIG mode its first instance, as with CUDA."""
    if entry.isdecimal():
        found = [part for gpu in gpus if gpu.number == int(entry) for part in _parts(gpu, entry)][:1]
    elif not entry.startswith(("GPU-", "MIG-")):
        found = []
    elif gpus and not any(gpu.uuid for gpu in gpus):
        # Which it is only the driver could tell. That it is there is taken for granted.
        found = [(Gpu(len(gpus), entry), None, entry)]
    else:
        found = [part for gpu in gpus for part in _by_uuid(gpu, entry)]
    return found[0] if len(found) == 1 else None


def _by_uuid(gpu: Gpu, entry: str) -> Iterator[_Chosen]:
    parts = list(_parts(gpu, entry))
    if gpu.uuid and matches(gpu.uuid, entry):
        yield from parts[:1]
    yield from (part for part in parts if part[1] is not None and matches(part[1].uuid, entry))
