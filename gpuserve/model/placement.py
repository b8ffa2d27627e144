"""Placement of models on the devices of a server, changes of the number of instances, their shares of the
cores, and checks for GPU libraries.

The inventory of devices is taken when the first model that names a GPU is placed, and again for models that
are loaded later. Device numbers stay those of the first inventory. cupy and torch are only looked up, not
imported: an import takes seconds, and the supervisor must not use CUDA.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuserve.core.errors import DeviceError, InvalidArgument
from gpuserve.devices.names import AUTO, CPU, TOGETHER, devices_of
from gpuserve.devices.placement import (
    ANYWHERE,
    THREADS_VARIABLE,
    Placement,
    placement_on,
    threads_of_environment,
)
from gpuserve.model.spec import MAX_INSTANCES, InstanceSpec, ModelSpec

if TYPE_CHECKING:
    from gpuserve.devices.inventory import DriverReader, Inventory, VisibleDevice


class ServerDevices:
    """The machine's devices, for any thread. ``numa_affinity``: workers run on their GPU's NUMA node."""

    def __init__(self, look: DriverReader | None = None, *, numa_affinity: bool = True) -> None:
        self._look = look
        self._numa_affinity = numa_affinity
        self._inventory_lock = threading.Lock()
        self._known: Inventory | None = None

    def inventory(self, *, again: bool = False) -> Inventory:
        """Return the inventory, refreshed with ``again``. Raise ``DeviceError`` without a working driver."""
        from gpuserve.devices.inventory import (
            DriverReader,  # here, because a server without GPUs does not need it
        )

        with self._inventory_lock:
            self._look = self._look or DriverReader()
            if self._known is None:
                self._known = self._look.read()
            elif again:
                self._known = self._look.read().numbered_as(self._known)
            return self._known

    def devices_named(self, text: str) -> Sequence[VisibleDevice]:
        """Return the devices of a name, none for "cpu" and "auto". Raise ``DeviceError`` for others."""
        if text in {CPU, AUTO}:
            return ()
        from gpuserve.devices.inventory import devices_named  # as above

        found = [device for one in devices_of(text) for device in devices_named(one, self.inventory())]
        if len({one.number for one in found}) < len(found):
            raise DeviceError(f"expected different GPUs for one process, {text!r} names one of them twice")
        return found

    def place(
        self, specs: Iterable[ModelSpec], *, again: bool = False, beside: Iterable[ModelSpec] = ()
    ) -> list[ModelSpec]:
        """Return the models with a device for each instance. Placed models are returned unchanged. With
        ``again`` the inventory is refreshed if any model needs a GPU. Instances on "auto" are placed last,
        with regard to the models ``beside`` them. Raise DeviceError if a device or a library is missing.
        """
        models = list(specs)
        if again and any(_is_unplaced(one) for model in models for one in model.instances):
            self.inventory(again=True)
        placed = []
        for one in models:
            fixed = tuple(instance for instance in one.instances if instance.device != AUTO)
            placed.append(
                self._place(dataclasses.replace(one, instances=fixed) if _has_auto(one) else one, None)
            )
        if not any(map(_has_auto, models)):
            return placed
        from gpuserve.devices.machine import PROHIBITED  # as above

        devices = [one for one in self.inventory().devices if one.gpu.compute_mode != PROHIBITED]
        parts = {one.name: one.mig or one.gpu for one in devices}
        sizes = {name: (part.memory_nbytes, part.free_nbytes) for name, part in parts.items()}
        room, pairs = FreeMemory(sizes, [*beside, *placed]), zip(models, placed, strict=True)
        return [self._place(one, room) if _has_auto(one) else made for one, made in pairs]

    def _place(self, spec: ModelSpec, room: FreeMemory | None) -> ModelSpec:
        if missing := missing_library(spec) or _missing_cpu(spec.instances):
            raise DeviceError(f"model {spec.name!r}: {missing}")
        if not any(map(_is_unplaced, spec.instances)):
            return spec
        try:
            chosen = [one if room is None else self._chosen(one, spec, room) for one in spec.instances]
            instances = [placed for one in chosen for placed in self._spread(one)]
        except DeviceError as error:
            raise DeviceError(f"model {spec.name!r}: {error}") from None
        if len(instances) > MAX_INSTANCES:
            raise DeviceError(
                f"model {spec.name!r}: its instances on every GPU are {len(instances)}, but a model may have "
                f"{MAX_INSTANCES} at most"
            )
        return dataclasses.replace(spec, instances=tuple(_named(instances, spec.instances)))

    def _chosen(self, instance: InstanceSpec, spec: ModelSpec, room: FreeMemory) -> InstanceSpec:
        """Return an instance on "auto" with the device that has the most free memory."""
        if instance.device != AUTO:
            return instance
        device = room.choose(expected_nbytes(spec, instance))
        if device is None and spec.array == "cupy":
            from gpuserve.devices.inventory import missing_gpu_reason  # as above

            why = missing_gpu_reason(self.inventory())
            raise DeviceError(f"device {AUTO!r} of a model with CuPy arrays needs a GPU: {why}")
        name = instance.name.replace(f"{AUTO}#", f"{device or CPU}#")
        return dataclasses.replace(instance, device=device or CPU, name=name)

    def _spread(self, instance: InstanceSpec) -> Iterator[InstanceSpec]:
        """Yield an instance for each device of its name. A worker thread can use all GPUs of its process."""
        if not _is_unplaced(instance):
            yield instance
            return
        devices = self.devices_named(instance.device)
        are_together = len(devices_of(instance.device)) > 1
        for group in [devices] if are_together else [[one] for one in devices]:
            placement = placement_on(group, numa_affinity=self._numa_affinity)
            if "object" in instance.source:
                placement = Placement(placement.gpu_uuids)
            name = TOGETHER.join(one.name for one in group)
            yield dataclasses.replace(instance, device=name, placement=placement)


#: The memory of an instance on a GPU that declares none: a CUDA context, and a small model.
_ASSUMED_NBYTES: Final = 1 << 30


def expected_nbytes(spec: ModelSpec, instance: InstanceSpec) -> int:
    """Return the memory that an instance is expected to take on each of its GPUs."""
    declared_nbytes = spec.memory_nbytes or spec.gpu_memory_nbytes
    return declared_nbytes // len(instance.devices) or _ASSUMED_NBYTES


class FreeMemory:
    """The free memory of each device, while instances are placed. ``sizes`` are the bytes in all and the free
    ones as the driver reports them, None if unknown. Of the driver's figure and what the ``present`` models
    are expected to take, the larger counts: those that are loaded are in both.
    """

    def __init__(
        self, sizes: Mapping[str, tuple[int | None, int | None]], present: Iterable[ModelSpec]
    ) -> None:
        taken: Counter[str] = Counter()
        for spec in present:
            for instance in spec.instances:
                taken.update(dict.fromkeys(instance.devices, expected_nbytes(spec, instance)))
        self._nbytes = {
            device: min(total - taken[device], total if free is None else free)
            for device, (known, free) in sizes.items()
            for total in (known or 0,)
        }

    def choose(self, nbytes: int) -> str | None:
        """Take memory of the device that has the most, and return its name; None without any device."""
        if not self._nbytes:
            return None
        device = max(self._nbytes, key=self._nbytes.__getitem__)  # of equal ones the first
        self._nbytes[device] -= nbytes
        return device


def _has_auto(spec: ModelSpec) -> bool:
    return any(one.device == AUTO for one in spec.instances)


def _missing_cpu(instances: Iterable[InstanceSpec]) -> str:
    """Return a sentence about the first CPU of an instance that this process may not use, or ""."""
    bound = [one for one in instances if one.cpus]
    allowed = os.sched_getaffinity(0) if bound else set()
    for one in bound:
        if missing := [cpu for cpu in one.cpus if cpu not in allowed]:
            return f"instance {one.name} names CPU {missing[0]}, and this process may use {sorted(allowed)}"
    return ""


def _is_unplaced(instance: InstanceSpec) -> bool:
    return instance.device != CPU and instance.placement == ANYWHERE


def _named(instances: Iterable[InstanceSpec], declared: Sequence[InstanceSpec]) -> Iterator[InstanceSpec]:
    """Yield the instances with names: numbered on each device if the declared ones are, else by position."""
    on_device = all(one.name.startswith(f"{one.device}#") for one in declared)
    counts: Counter[str] = Counter()
    for one in instances:
        place = one.device if on_device else ""
        name = f"{place}#{counts[place]}" if on_device else f"{counts[place]}"
        counts[place] += 1
        yield dataclasses.replace(one, name=name)


def instances_by_device(spec: ModelSpec) -> dict[str, int]:
    return dict(Counter(one.device for one in spec.instances))


def with_count(spec: ModelSpec, count: int, down: Collection[str] = ()) -> ModelSpec:
    """Return the model with ``count`` instances on each of its devices. Of too many, instances that are
    ``down`` are dropped first, then the last ones. New instances are copies of the device's first instance.
    Raise InvalidArgument if the model cannot have so many.
    """
    _check(spec, count)
    on_device = all(one.name.startswith(f"{one.device}#") for one in spec.instances)
    taken = {one.name for one in spec.instances}
    instances: list[InstanceSpec] = []
    for device in instances_by_device(spec):
        there = [one for one in spec.instances if one.device == device]
        staying = sorted(there, key=lambda one: one.name in down)[:count]
        here = [one for one in there if one in staying]
        place = f"{device}#" if on_device else ""
        free = (name for number in itertools.count() if (name := f"{place}{number}") not in taken)
        names = list(itertools.islice(free, count - len(here)))
        taken.update(names)
        instances += [*here, *(dataclasses.replace(here[0], name=name) for name in names)]
    return dataclasses.replace(spec, instances=tuple(instances))


def joined(spec: ModelSpec, wanted: ModelSpec, name: str) -> ModelSpec:
    """Return the model with the instance ``name`` of ``wanted`` added, before those to be dropped."""
    names = {name, *(one.name for one in spec.instances)}
    there = [one for one in wanted.instances if one.name in names]
    going = [one for one in spec.instances if one not in there]
    return dataclasses.replace(spec, instances=(*there, *going))


def _check(spec: ModelSpec, count: int) -> None:
    if spec.is_ensemble:
        raise InvalidArgument(
            f"model '{spec.name}' is an ensemble and has no instances of its own: scale the models of its "
            "steps"
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(
            f"model '{spec.name}': expected the number of instances on each device, 1 at least, got {count!r}"
        )
    present = instances_by_device(spec)
    if count * len(present) > MAX_INSTANCES:
        raise InvalidArgument(
            f"model '{spec.name}': a model may have {MAX_INSTANCES} instances at most, given {count}"
            f"{f' on each of {len(present)} devices' if len(present) > 1 else ''}"
        )
    first = spec.instances[0]
    if any(one.source != first.source for one in spec.instances) and {count} != set(present.values()):
        raise InvalidArgument(
            f"the {len(spec.instances)} instances of model '{spec.name}' have different callables: there "
            f"cannot be {count} on each device"
        )


#: Variables of libraries that would otherwise use all cores in each instance.
_OWN: Final = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
#: The front and the ingress processes have cores of their own if these are at most this part of all cores. On
#: smaller machines they would take more from large models than they need.
_RESERVED_PART: Final = 1 / 8


def cores_of_instances(processors: float, ingress_processes: int) -> float:
    """Return the cores that the instances of a server share."""
    needed = 1 + (ingress_processes if ingress_processes > 1 else 0)
    return processors - min(needed, int(processors * _RESERVED_PART))


def n_threads(instance: InstanceSpec, instances: Sequence[InstanceSpec], cores: float) -> int:
    """Return the threads of an instance's process: of the config, the environment or a share of ``cores``."""
    if instance.threads or (from_environment := threads_of_environment()):
        return instance.threads or from_environment
    sharing = [one for one in instances if not one.threads]
    bound = {cpu for one in sharing for cpu in one.cpus}
    left = len(instance.cpus) or cores - len(bound) - sum(one.threads * one.ranks for one in instances)
    return max(1, int(left / max(1, sum(one.ranks for one in sharing if one.cpus == instance.cpus))))


def thread_variables(instance: InstanceSpec, threads: int) -> dict[str, str]:
    """Return a worker's thread-count variables; only the config's ``threads`` overrides the user's."""
    if instance.threads:
        return dict.fromkeys((THREADS_VARIABLE, *_OWN), f"{threads}")
    return {} if THREADS_VARIABLE in os.environ else {THREADS_VARIABLE: f"{threads}"}


def overloads(instances: Sequence[InstanceSpec], processors: float, ingress_processes: int) -> Iterator[str]:
    """Yield a sentence for each part of a server with more threads or processes than there are cores."""
    if ingress_processes > max(1, processors):
        yield (
            f"{ingress_processes} ingress processes have {processors:g} cores, and wait for each other: "
            "lower ingress_processes, where 1 means none"
        )
    cores = cores_of_instances(processors, ingress_processes)
    total = sum(n_threads(one, instances, cores) * one.ranks for one in instances)
    if total > max(cores, sum(one.ranks for one in instances)):
        yield (
            f"{len(instances)} instances have {total} threads for {cores:g} cores, and wait for each other: "
            f"lower instances[].threads or {THREADS_VARIABLE}"
        )


_EXTRAS: Final = "pip install 'gpuserve[cuda12]' or 'gpuserve[cuda13]'"
#: Distributions of cupy, with their major versions of CUDA.
_CUPY: Final = {"cupy-cuda11x": "11", "cupy-cuda12x": "12", "cupy-cuda13x": "13", "cupy": ""}


class Cupy(NamedTuple):
    """The installed cupy; "" for an unknown version."""

    version: str
    cuda_major: str


def is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # the package is in sys.modules without a spec
        return True


def installed_cupy() -> Cupy | None:
    """Return the version of cupy that workers will import, or None if there is none."""
    if not is_importable("cupy"):
        return None
    from importlib import metadata  # here, because it imports email and zipfile, which no server needs

    for distribution, cuda_major in _CUPY.items():
        try:
            return Cupy(metadata.version(distribution), cuda_major)
        except metadata.PackageNotFoundError:
            continue
    return Cupy("", "")


def missing_library(spec: ModelSpec, present: Callable[[str], bool] = is_importable) -> str:
    """Return a sentence about a library that a model's workers need and will not find, or ""."""
    if spec.array == "numpy":
        return ""
    if any(one.device != CPU for one in spec.instances) and not present("cupy"):
        on_device = [one.name for one in spec.inputs if one.memory == "gpu"]
        what = f"input {on_device[0]!r} on a GPU" if on_device else f"array {spec.array!r}"
        return f"{what} needs cupy, which is not installed: {_EXTRAS}"
    if spec.array == "torch" and not present("torch"):
        return "array 'torch' needs torch, which is not installed"
    return ""
