"""Every number of a manifest that is computed from the configuration, each with its reason. Memory is a sum
of ``MemoryShare``s: the server's, the instances', and the most that requests and answers may take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuserve.config.settings.server import TERMINATED_LAME_DUCK_S
from gpuserve.config.settings.values import AUTO, doors_of
from gpuserve.devices.names import CPU, EVERY_GPU, number_of
from gpuserve.export.sizing.values import GIB, MIB, Reasoned, quantity, readable, up_to
from gpuserve.model.rules import mapping
from gpuserve_worker.memory.arena import RETAINED_NBYTES, SEGMENT_NBYTES
from gpuserve_worker.protocol.tensor import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.config.yaml_document import Path
    from gpuserve.export.sizing.options import ExportOptions
    from gpuserve.model.spec import ModelSpec, Resources
    from gpuserve_worker.protocol.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """One entry of ``instances``: ``count`` processes on each of ``gpus`` (by number; empty on the CPU)."""

    model: int
    path: Path
    device: str
    count: int
    gpus: tuple[int, ...]
    resources: Resources

    @property
    def processes(self) -> int:
        """The number of worker processes in one pod."""
        return self.count * max(1, len(self.gpus))


def instance_groups(configuration: Configuration, options: ExportOptions) -> list[InstanceGroup]:
    """Every entry of ``instances``; ``cuda:*`` stands for the GPUs of a node."""
    return [
        InstanceGroup(
            index,
            ("models", index, "instances", position),
            entry.device,
            entry.count,
            _gpu_numbers(entry.device, options.gpus_per_node or 1),
            entry.resources,
        )
        for index, model in enumerate(configuration.entries.models)
        for position, entry in enumerate(model.instances if model.ensemble is None else ())
    ]


def _gpu_numbers(device: str, every: int) -> tuple[int, ...]:
    if device == CPU:
        return ()
    if device == EVERY_GPU:
        return tuple(range(every))
    return (number_of(device) or 0,)


def gpu_count(groups: list[InstanceGroup]) -> int:
    """How many GPUs a pod needs to have one of the highest number: they count from 0 in every pod."""
    return max((number + 1 for group in groups for number in group.gpus), default=0)


def gpu_memory(groups: list[InstanceGroup]) -> dict[int, list[tuple[InstanceGroup, int]]]:
    """By GPU: the groups on it whose memory there is declared, and what their processes take together."""
    taken: dict[int, list[tuple[InstanceGroup, int]]] = {}
    for group in groups:
        if group.resources.gpu_memory_nbytes is not None:
            nbytes = group.count * group.resources.gpu_memory_nbytes
            for number in group.gpus:
                taken.setdefault(number, []).append((group, nbytes))
    return taken


#: Supervisor and front had 90 MiB together with one model; the rest is for connections and answers.
SERVER_NBYTES: Final = 256 * MIB
#: Of a worker whose config says nothing: a worker with numpy and a small model had 77 MiB.
CPU_PROCESS_NBYTES: Final = 512 * MIB
#: With the libraries of CUDA and a framework; assumed, not measured.
GPU_PROCESS_NBYTES: Final = 4 * GIB
#: A door at rest has 37 MiB of its own (PSS); the rest is for connections, small bodies and answers.
DOOR_NBYTES: Final = 128 * MIB
#: A tensor below this size lies on the heap of the front, not in the arena.
HEAP_REQUEST_NBYTES: Final = 64 << 10
#: A batch of a model whose shapes are free, in a client's region: assumed.
FREE_BATCH_NBYTES: Final = 64 * MIB
#: What a container has as /dev/shm where nothing is said.
LEAST_SHM_NBYTES: Final = 64 * MIB
TMP_NBYTES: Final = 1 * GIB
LOG_NBYTES: Final = 1 * GIB
FRONT_CPUS: Final = 1
#: How long it takes until no node and no balancer sends to a pod that is ending.
PROPAGATION_S: Final = 10
#: After the queue is empty: the front closes (6 s), the workers end (10 s), the supervisor (a rest).
STOP_MARGIN_S: Final = 20
STARTUP_PERIOD_S: Final = 5
#: A model that may load for ever is given this long; then a new container is tried.
UNLIMITED_LOAD_S: Final = 1200
#: From the start of the process to the first load.
PROCESS_START_S: Final = 60
#: Scheduling, a node that is added for the pod, and pulling an image of some gigabytes.
SCHEDULING_S: Final = 900
MIN_READY_S: Final = 10


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A share of the memory of a pod, in bytes. ``path`` is the key that sets it."""

    name: str
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of one pod. ``parts`` add up to ``memory_nbytes``, but for rounding."""

    gpus: Reasoned
    cpus: Reasoned
    memory: Reasoned
    memory_request: Reasoned
    ephemeral: Reasoned
    shm: Reasoned
    tmp: Reasoned
    threads: Reasoned
    pre_stop_s: Reasoned
    grace_s: Reasoned
    startup_failures: Reasoned
    progress_s: Reasoned
    memory_nbytes: int
    parts: tuple[MemoryShare, ...]


def sizes(configuration: Configuration, options: ExportOptions) -> Sizes:
    groups = instance_groups(configuration, options)
    parts = memory_parts(configuration, groups)
    memory_nbytes = up_to(sum(part.nbytes for part in parts), 64 * MIB)
    gpus = _gpus(groups, options)
    return Sizes(
        gpus=gpus,
        cpus=_cpus(groups, _doors(configuration, groups)),
        memory=_memory(memory_nbytes, parts),
        memory_request=_memory_request(configuration, parts, memory_nbytes, bool(gpus.value)),
        ephemeral=_ephemeral(),
        shm=_shm(parts),
        tmp=Reasoned(quantity(TMP_NBYTES), "Caches of libraries and temporary files; the root is read only."),
        threads=_threads(groups),
        pre_stop_s=_pre_stop(configuration.settings),
        grace_s=_grace(configuration.settings),
        startup_failures=_startup(configuration.settings),
        progress_s=_progress(configuration.settings),
        memory_nbytes=memory_nbytes,
        parts=tuple(parts),
    )


def memory_parts(configuration: Configuration, groups: Sequence[InstanceGroup]) -> list[MemoryShare]:
    """The shares of a pod's memory. Files in /dev/shm and arenas count as the container's."""
    settings = configuration.settings
    parts = [MemoryShare("supervisor and front", SERVER_NBYTES, ("server",)), *map(_processes, groups)]
    if doors := _doors(configuration, groups):
        name = f"{doors} doors, and the process that waits to be one"
        parts.append(MemoryShare(name, (doors + 1) * DOOR_NBYTES, ("server",)))
    intake = settings.max_intake_nbytes
    parts.append(MemoryShare("bodies of requests that come", intake, ("server", "max_intake_nbytes")))
    for index, model in enumerate(configuration.models):
        slots = _slots(model, [group for group in groups if group.model == index])
        parts.append(_inputs(index, model, slots, settings))
        if slots:
            parts.append(_outputs(index, model, slots))
    if settings.response_cache_nbytes:
        key: Path = ("server", "response_cache_nbytes")
        parts.append(MemoryShare("the response cache", settings.response_cache_nbytes, key))
    return [*parts, _regions(configuration, groups)]


def batch_nbytes(model: ModelSpec, tensors: Sequence[TensorSpec]) -> int | None:
    """Bytes of these tensors in a full batch; None where a size is free."""
    if any(-1 in one.shape or not ITEMSIZE[one.datatype] for one in tensors):
        return None
    row = sum(math.prod(one.shape) * ITEMSIZE[one.datatype] for one in tensors)
    return row * max(1, model.max_batch_size)


def _slots(model: ModelSpec, groups: Sequence[InstanceGroup]) -> int:
    """Batches that are under way or wait inside a worker, at most."""
    return sum(group.processes for group in groups) * max(1, model.concurrency) * (1 + model.prefetch)


def _processes(group: InstanceGroup) -> MemoryShare:
    assumed = GPU_PROCESS_NBYTES if group.gpus else CPU_PROCESS_NBYTES
    each = group.resources.memory_nbytes or assumed
    said = "" if group.resources.memory_nbytes else " assumed"
    name = (
        f"processes of models[{group.model}] on {group.device} ({group.processes} x {readable(each)}{said})"
    )
    return MemoryShare(name, group.processes * each, (*group.path, "resources", "memory_nbytes"))


def _inputs(index: int, model: ModelSpec, slots: int, settings: ServerSettings) -> MemoryShare:
    """Memory for requests that wait, and for the batches made of those that run."""
    batch = batch_nbytes(model, model.inputs)
    most, arena = model.queue.max_nbytes, settings.max_arena_nbytes
    if batch is None:
        heap = min(most, model.queue.max_requests * HEAP_REQUEST_NBYTES)
        name = f"requests for {model.name} (server.max_arena_nbytes, and {readable(heap)} of small ones)"
        return MemoryShare(name, arena + heap, ("server", "max_arena_nbytes"))
    waiting = min(most, model.queue.max_requests * batch)
    nbytes = up_to(waiting + 2 * slots * batch, SEGMENT_NBYTES)
    if nbytes >= arena:
        name = f"requests for {model.name} (server.max_arena_nbytes)"
        return MemoryShare(name, arena, ("server", "max_arena_nbytes"))
    return MemoryShare(f"requests for {model.name} (its queue)", nbytes, ("models", index, "queue"))


def _outputs(index: int, model: ModelSpec, slots: int) -> MemoryShare:
    """Memory for answers; a worker keeps some for the next burst."""
    batch = batch_nbytes(model, model.outputs)
    nbytes = slots * (RETAINED_NBYTES if batch is None else up_to(2 * batch, SEGMENT_NBYTES))
    return MemoryShare(f"answers of {model.name}", nbytes, ("models", index, "outputs"))


def _regions(configuration: Configuration, groups: Sequence[InstanceGroup]) -> MemoryShare:
    """Shared memory of clients in the same pod: inputs and outputs of every batch, twice."""
    nbytes = 0
    for index, model in enumerate(configuration.models):
        batch = batch_nbytes(model, (*model.inputs, *model.outputs))
        slots = _slots(model, [group for group in groups if group.model == index])
        nbytes += 2 * slots * (FREE_BATCH_NBYTES if batch is None else batch)
    nbytes = max(LEAST_SHM_NBYTES, up_to(nbytes, 16 * MIB))
    return MemoryShare("/dev/shm", nbytes, ("models",))


def _gpus(groups: list[InstanceGroup], options: ExportOptions) -> Reasoned:
    count = gpu_count(groups)
    if options.gpus_per_node is not None and any(group.device == "cuda:*" for group in groups):
        return Reasoned(count, f"cuda:* is every GPU of a node, and a node has {count} (--gpus-per-node).")
    return Reasoned(count, f"The models name cuda:0 to cuda:{count - 1}; GPUs count from 0 in every pod.")


def _doors(configuration: Configuration, groups: Sequence[InstanceGroup]) -> int:
    """Doors that are processes of their own in a pod; ``auto`` is decided by its cores, not by those here."""
    doors: int = configuration.settings.doors
    if _written(configuration, "doors") == AUTO:
        others, before = FRONT_CPUS + _worker_cpus(groups), 0
        while (doors := doors_of(others + before)) > max(1, before):  # theirs count as well
            before = doors
    return doors if doors > 1 else 0


def _written(configuration: Configuration, key: str) -> Any:
    """A key of the server as the file has it, which is what the pod reads."""
    document = configuration.sources.document
    return None if document is None else mapping(mapping(document.data).get("server")).get(key)


def _worker_cpus(groups: Sequence[InstanceGroup]) -> int:
    return sum(group.processes * group.resources.cpus for group in groups)


def _cpus(groups: Sequence[InstanceGroup], doors: int) -> Reasoned:
    workers = _worker_cpus(groups)
    front = f"{FRONT_CPUS} for the front, one event loop" + f", {doors} for its doors" * bool(doors)
    return Reasoned(
        FRONT_CPUS + doors + workers, f"{front}, and {workers} for the instances (their resources.cpus)."
    )


def _memory(nbytes: int, parts: Sequence[MemoryShare]) -> Reasoned:
    listed = "; ".join(f"{readable(part.nbytes)} {part.name}" for part in parts)
    return Reasoned(quantity(nbytes), f"The most that the limits of the config allow: {listed}.")


def _memory_request(
    configuration: Configuration, parts: Sequence[MemoryShare], limit: int, on_gpu: bool
) -> Reasoned:
    if on_gpu:
        why = "As the limit: a pod that is Guaranteed can have cores of its own next to its GPU."
        return Reasoned(quantity(limit), why)
    bursts = len(configuration.models) * RETAINED_NBYTES
    held = sum(part.nbytes for part in parts if part.path == ("server",) or part.path[-1] == "memory_nbytes")
    nbytes = min(limit, up_to(held + bursts, 64 * MIB))
    why = "What it holds at rest: its processes, and what each model keeps for the next burst (256 MiB)."
    return Reasoned(quantity(nbytes), why)


def _ephemeral() -> Reasoned:
    why = f"{readable(TMP_NBYTES)} for /tmp and {readable(LOG_NBYTES)} for logs until the node rotates them."
    return Reasoned(quantity(TMP_NBYTES + LOG_NBYTES), why)


def _shm(parts: Sequence[MemoryShare]) -> Reasoned:
    nbytes = next(part.nbytes for part in parts if part.name == "/dev/shm")
    why = (
        "Only for regions that clients in this pod register, and for models that share memory by name; the "
        "server's own has no name and is not here. Inputs and outputs of every batch under way, twice. It "
        "counts as memory of the container."
    )
    return Reasoned(quantity(nbytes), why)


def _threads(groups: Sequence[InstanceGroup]) -> Reasoned:
    most = max((group.resources.cpus for group in groups), default=1)
    return Reasoned(
        str(most), "Libraries count the cores of the node, not of the pod (the largest resources.cpus)."
    )


def _pre_stop(settings: ServerSettings) -> Reasoned:
    """What the server's own lame duck does not cover of the time until everybody has heard."""
    why = (
        f"{PROPAGATION_S} s until nobody sends to this pod any more; it serves meanwhile, SIGTERM comes then."
    )
    if lame_duck_s := _lame_duck_s(settings):
        why += f" {lame_duck_s:g} s of them are server.lame_duck_s."
    return Reasoned(max(0, PROPAGATION_S - math.floor(lame_duck_s)), why)


def _grace(settings: ServerSettings) -> Reasoned:
    pre_stop, drain = _pre_stop(settings).value, math.ceil(settings.drain_timeout_s)
    lame_duck = math.ceil(_lame_duck_s(settings))
    said = f" + server.lame_duck_s {lame_duck}" if lame_duck else ""
    why = f"preStop {pre_stop}{said} + server.drain_timeout_s {drain} + {STOP_MARGIN_S} until all have ended."
    return Reasoned(pre_stop + lame_duck + drain + STOP_MARGIN_S, why)


def _lame_duck_s(settings: ServerSettings) -> float:
    """A pod has no terminal, and is ended by SIGTERM."""
    return TERMINATED_LAME_DUCK_S if settings.lame_duck_s is None else settings.lame_duck_s


def startup_s(settings: ServerSettings) -> int:
    """How long a pod may take from the start of its process until it serves."""
    return PROCESS_START_S + math.ceil(settings.load_timeout_s or UNLIMITED_LOAD_S)


def _startup(settings: ServerSettings) -> Reasoned:
    most = startup_s(settings)
    loads = (
        f"server.load_timeout_s {settings.load_timeout_s:g}"
        if settings.load_timeout_s
        else (f"{UNLIMITED_LOAD_S} for the models (server.load_timeout_s has no limit)")
    )
    why = f"Every {STARTUP_PERIOD_S} s for {most} s: {PROCESS_START_S} to start + {loads}."
    return Reasoned(math.ceil(most / STARTUP_PERIOD_S), why)


def _progress(settings: ServerSettings) -> Reasoned:
    total = SCHEDULING_S + startup_s(settings) + MIN_READY_S
    why = f"{SCHEDULING_S} for a node and the image + {startup_s(settings)} to start + minReadySeconds."
    return Reasoned(total, why)
