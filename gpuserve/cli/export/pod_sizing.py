"""The computed numbers of a manifest, each with its reason. A pod's memory is a sum of ``MemoryShare``s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from gpuserve.cli.export.manifest_templates import Reasoned
from gpuserve.config.settings.server import TERMINATED_LAME_DUCK_S
from gpuserve.config.settings.values import AUTO, auto_ingress_processes
from gpuserve.devices.names import CPU, EVERY_GPU, devices_of, number_of
from gpuserve.model.options import NBYTES, parse_quantity
from gpuserve.model.rules import mapping
from gpuserve_worker.memory.arena import RETAINED_NBYTES
from gpuserve_worker.memory.segments import SEGMENT_NBYTES
from gpuserve_worker.protocol.tensor import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.cli.export.export_options import ExportOptions
    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.config.yaml_document import Path
    from gpuserve.model.spec import ModelSpec, Resources
    from gpuserve_worker.protocol.tensor import TensorSpec


KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30


def parse_nbytes(text: str) -> int:
    """Return the bytes of ``64Gi``, ``512Mi`` or ``80G``; raise ValueError for another form, or for 0."""
    try:
        nbytes = int(parse_quantity(f"{text.strip()}B", NBYTES))
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes <= 0:
        raise ValueError(f"expected an amount of memory such as 64Gi or 512Mi, given {text!r}")
    return nbytes


def quantity(nbytes: int) -> str:
    """Return the amount in the largest unit that divides it: ``9Gi``, ``9344Mi``."""
    for unit, size in (("Gi", GIB), ("Mi", MIB), ("Ki", KIB)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def readable_size(nbytes: int) -> str:
    """Return the amount for a sentence: ``8 GiB``, ``1.5 GiB``, ``64 KiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


def round_up(nbytes: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``nbytes``."""
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """An entry of ``instances``: ``count`` instances on each GPU, or on all together, of ``ranks`` processes.
    ``gpus`` are their numbers, none on the CPU.
    """

    model: int
    path: Path
    device: str
    count: int
    ranks: int
    gpus: tuple[int, ...]
    resources: Resources
    gpu_memory_nbytes: int | None = None

    @property
    def processes(self) -> int:
        """The number of worker processes in one pod."""
        return self.n_instances * self.ranks

    @property
    def n_instances(self) -> int:
        are_together = len(devices_of(self.device)) > 1
        return self.count * (1 if are_together else max(1, len(self.gpus)))


def instance_groups(configuration: Configuration, options: ExportOptions) -> list[InstanceGroup]:
    """Return every entry of ``instances``; ``cuda:*`` stands for the GPUs of a node."""
    found = []
    for index, model in enumerate(configuration.entries.models):
        for position, entry in enumerate(model.instances if model.ensemble is None else ()):
            path = ("models", index, "instances", position)
            names = [] if entry.device == CPU else devices_of(entry.device)
            gpus = tuple(number_of(one) or 0 for one in names)
            if entry.device == EVERY_GPU:
                gpus = tuple(range(options.gpus_per_node or 1))
            nbytes = entry.resources.gpu_memory_nbytes or model.gpu_memory_nbytes or None
            place = index, path, entry.device, entry.count, entry.ranks, gpus
            found.append(InstanceGroup(*place, entry.resources, nbytes))
    return found


def gpu_count(groups: list[InstanceGroup]) -> int:
    """Return the GPUs that a pod needs for the highest GPU number; numbers start from 0 in every pod."""
    return max((number + 1 for group in groups for number in group.gpus), default=0)


def has_gpus(configuration: Configuration, options: ExportOptions) -> bool:
    return gpu_count(instance_groups(configuration, options)) > 0


def gpu_memory(groups: list[InstanceGroup]) -> dict[int, list[tuple[InstanceGroup, int]]]:
    """Return by GPU number the groups with declared GPU memory, and the memory of each group's processes."""
    declared: dict[int, list[tuple[InstanceGroup, int]]] = {}
    for group in groups:
        if group.gpu_memory_nbytes is not None:
            nbytes = group.count * group.gpu_memory_nbytes
            for number in group.gpus:
                declared.setdefault(number, []).append((group, nbytes))
    return declared


#: Supervisor and front had 90 MiB together with one model; the rest is for connections and answers.
SERVER_NBYTES: Final = 256 * MIB
#: A worker without ``memory_nbytes`` in the config; a worker with numpy and a small model had 77 MiB.
CPU_PROCESS_NBYTES: Final = 512 * MIB
#: A worker on a GPU, with the libraries of CUDA and a framework; assumed, not measured.
GPU_PROCESS_NBYTES: Final = 4 * GIB
#: An idle ingress process has 37 MiB of its own (PSS); the rest is for connections, small bodies and answers.
INGRESS_NBYTES: Final = 128 * MIB
#: A tensor below this size is on the heap of the front, not in the arena.
HEAP_REQUEST_NBYTES: Final = 64 << 10
#: A batch in a client's region, for a model with axes of any size; assumed.
FREE_BATCH_NBYTES: Final = 64 * MIB
#: The default size of /dev/shm in a container.
LEAST_SHM_NBYTES: Final = 64 * MIB
TMP_NBYTES: Final = 1 * GIB
LOG_NBYTES: Final = 1 * GIB
FRONT_CPUS: Final = 1
#: Time until no node and no balancer sends requests to an ending pod.
PROPAGATION_S: Final = 10
#: Time after the queue is empty: the front closes (6 s), the workers (10 s) and the supervisor end.
STOP_MARGIN_S: Final = 20
STARTUP_PERIOD_S: Final = 5
#: The time limit of a model without ``load_timeout_s``; after that the container is restarted.
UNLIMITED_LOAD_S: Final = 1200
#: Time from the start of the process to the first load.
PROCESS_START_S: Final = 60
#: Time for scheduling, adding a node, and pulling an image of some gigabytes.
SCHEDULING_S: Final = 900
MIN_READY_S: Final = 10


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A share of a pod's memory in bytes. ``path`` is the key that sets the share."""

    name: str
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class PodSizes:
    """The numbers of one pod. ``parts`` add up to ``memory_nbytes``, except for rounding."""

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


def compute_sizes(configuration: Configuration, options: ExportOptions) -> PodSizes:
    groups = instance_groups(configuration, options)
    parts = memory_parts(configuration, groups)
    memory_nbytes = round_up(sum(part.nbytes for part in parts), 64 * MIB)
    gpus = _gpu_size(groups, options)
    listed = "; ".join(f"{readable_size(part.nbytes)} {part.name}" for part in parts)
    tmp, log = readable_size(TMP_NBYTES), readable_size(LOG_NBYTES)
    threads = max((group.resources.cpus for group in groups), default=1)
    start_s = startup_s(configuration.settings)
    return PodSizes(
        gpus=gpus,
        cpus=_cpu_size(groups, _ingress_processes(configuration, groups)),
        memory=Reasoned(quantity(memory_nbytes), f"The most that the limits of the config allow: {listed}."),
        memory_request=_memory_request_size(configuration, parts, memory_nbytes, bool(gpus.value)),
        ephemeral=Reasoned(
            quantity(TMP_NBYTES + LOG_NBYTES),
            f"{tmp} for /tmp and {log} for logs until the node rotates them.",
        ),
        shm=_shm_size(parts),
        tmp=Reasoned(quantity(TMP_NBYTES), "Caches of libraries and temporary files; the root is read only."),
        threads=Reasoned(
            str(threads),
            "Libraries count the cores of the node, not of the pod (the largest resources.cpus).",
        ),
        pre_stop_s=_pre_stop_delay(configuration.settings),
        grace_s=_grace_period(configuration.settings),
        startup_failures=_startup_probes(configuration.settings),
        progress_s=Reasoned(
            SCHEDULING_S + start_s + MIN_READY_S,
            f"{SCHEDULING_S} for a node and the image + {start_s} to start + minReadySeconds.",
        ),
        memory_nbytes=memory_nbytes,
        parts=tuple(parts),
    )


#: The key that limits the memory of all workers if models are loaded on demand.
_BUDGET: Final[Path] = ("server", "memory", "host")


def memory_parts(configuration: Configuration, groups: Sequence[InstanceGroup]) -> list[MemoryShare]:
    """Return the shares of a pod's memory. Files in /dev/shm and arenas count as the container's memory."""
    settings = configuration.settings
    workers, limit = [*map(_worker_memory, groups)], settings.memory.host
    is_limited = limit is not None and any(one.on_demand for one in configuration.models)
    if limit is not None and is_limited and limit < sum(one.nbytes for one in workers):
        workers = [MemoryShare("workers, within server.memory.host", limit, _BUDGET)]
    parts = [MemoryShare("supervisor and front", SERVER_NBYTES, ("server",)), *workers]
    if processes := _ingress_processes(configuration, groups):
        name = f"{processes} ingress processes and a spare one"
        parts.append(MemoryShare(name, (processes + 1) * INGRESS_NBYTES, ("server",)))
    intake = settings.max_intake_nbytes
    parts.append(MemoryShare("bodies of requests that come", intake, ("server", "max_intake_nbytes")))
    for index, model in enumerate(configuration.models):
        slots = _batch_slots(model, [group for group in groups if group.model == index])
        parts.append(_input_memory(index, model, slots, settings))
        if slots:
            batch = batch_nbytes(model, model.outputs)
            # A worker keeps some memory for the next burst.
            nbytes = slots * (RETAINED_NBYTES if batch is None else round_up(2 * batch, SEGMENT_NBYTES))
            parts.append(MemoryShare(f"answers of {model.name}", nbytes, ("models", index, "outputs")))
    if settings.response_cache_nbytes:
        key: Path = ("server", "response_cache_nbytes")
        parts.append(MemoryShare("the response cache", settings.response_cache_nbytes, key))
    return [*parts, _region_memory(configuration, groups)]


def batch_nbytes(model: ModelSpec, tensors: Sequence[TensorSpec]) -> int | None:
    """Return the bytes of these tensors in a full batch, or None if a size is variable."""
    if any(-1 in one.shape or not ITEMSIZE[one.datatype] for one in tensors):
        return None
    row = sum(math.prod(one.shape) * ITEMSIZE[one.datatype] for one in tensors)
    return row * max(1, model.max_batch_size)


def _batch_slots(model: ModelSpec, groups: Sequence[InstanceGroup]) -> int:
    return sum(group.n_instances for group in groups) * max(1, model.concurrency) * (1 + model.prefetch)


def _worker_memory(group: InstanceGroup) -> MemoryShare:
    assumed = GPU_PROCESS_NBYTES if group.gpus else CPU_PROCESS_NBYTES
    each = group.resources.memory_nbytes or assumed
    size = readable_size(each) + ("" if group.resources.memory_nbytes else " assumed")
    name = f"processes of models[{group.model}] on {group.device} ({group.processes} x {size})"
    return MemoryShare(name, group.processes * each, (*group.path, "resources", "memory_nbytes"))


def _input_memory(index: int, model: ModelSpec, slots: int, settings: ServerSettings) -> MemoryShare:
    """Return the memory for queued requests, and for the batches of running ones."""
    batch = batch_nbytes(model, model.inputs)
    most, arena = model.queue.max_nbytes, settings.max_arena_nbytes
    if batch is None:
        heap = min(most, model.queue.max_requests * HEAP_REQUEST_NBYTES)
        name = f"requests for {model.name} (server.max_arena_nbytes, and {readable_size(heap)} of small ones)"
        return MemoryShare(name, arena + heap, ("server", "max_arena_nbytes"))
    waiting = min(most, model.queue.max_requests * batch)
    nbytes = round_up(waiting + 2 * slots * batch, SEGMENT_NBYTES)
    if nbytes >= arena:
        name = f"requests for {model.name} (server.max_arena_nbytes)"
        return MemoryShare(name, arena, ("server", "max_arena_nbytes"))
    return MemoryShare(f"requests for {model.name} (its queue)", nbytes, ("models", index, "queue"))


def _region_memory(configuration: Configuration, groups: Sequence[InstanceGroup]) -> MemoryShare:
    """Return the shared memory of clients in the same pod: inputs and outputs of every batch, twice."""
    nbytes = 0
    for index, model in enumerate(configuration.models):
        batch = batch_nbytes(model, (*model.inputs, *model.outputs))
        slots = _batch_slots(model, [group for group in groups if group.model == index])
        nbytes += 2 * slots * (FREE_BATCH_NBYTES if batch is None else batch)
    nbytes = max(LEAST_SHM_NBYTES, round_up(nbytes, 16 * MIB))
    return MemoryShare("/dev/shm", nbytes, ("models",))


def _gpu_size(groups: list[InstanceGroup], options: ExportOptions) -> Reasoned:
    count = gpu_count(groups)
    if options.gpus_per_node is not None and any(group.device == "cuda:*" for group in groups):
        return Reasoned(count, f"cuda:* is every GPU of a node, and a node has {count} (--gpus-per-node).")
    return Reasoned(count, f"The models name cuda:0 to cuda:{count - 1}; GPUs count from 0 in every pod.")


def _ingress_processes(configuration: Configuration, groups: Sequence[InstanceGroup]) -> int:
    """Return the number of ingress processes in a pod, 0 if the front has the connections. ``auto``, as the
    file may say, depends on the pod's cores, not on those of this machine.
    """
    processes: int = configuration.settings.ingress_processes
    document = configuration.sources.document
    in_file = {} if document is None else mapping(mapping(document.data).get("server"))
    if in_file.get("ingress_processes") == AUTO:
        other_cpus, previous = FRONT_CPUS + _worker_cpus(groups), 0
        # The cores of ingress processes count as well, and so may allow more of them.
        while (processes := auto_ingress_processes(other_cpus + previous)) > max(1, previous):
            previous = processes
    return processes if processes > 1 else 0


def _worker_cpus(groups: Sequence[InstanceGroup]) -> int:
    return sum(group.processes * group.resources.cpus for group in groups)


def _cpu_size(groups: Sequence[InstanceGroup], processes: int) -> Reasoned:
    workers = _worker_cpus(groups)
    ingress = f", {processes} for ingress processes" if processes else ""
    front = f"{FRONT_CPUS} for the front, one event loop{ingress}"
    why = f"{front}, and {workers} for the instances (their resources.cpus)."
    return Reasoned(FRONT_CPUS + processes + workers, why)


def _memory_request_size(
    configuration: Configuration, parts: Sequence[MemoryShare], limit: int, on_gpu: bool
) -> Reasoned:
    if on_gpu:
        why = "As the limit: a pod that is Guaranteed can have cores of its own next to its GPU."
        return Reasoned(quantity(limit), why)
    bursts = len(configuration.models) * RETAINED_NBYTES
    processes = [
        one for one in parts if one.path in {("server",), _BUDGET} or one.path[-1] == "memory_nbytes"
    ]
    held = sum(one.nbytes for one in processes)
    nbytes = min(limit, round_up(held + bursts, 64 * MIB))
    why = "What it holds at rest: its processes, and what each model keeps for the next burst (256 MiB)."
    return Reasoned(quantity(nbytes), why)


def _shm_size(parts: Sequence[MemoryShare]) -> Reasoned:
    nbytes = next(part.nbytes for part in parts if part.name == "/dev/shm")
    why = (
        "Only for regions that clients in this pod register, and for models that share memory by name; the "
        "server's own has no name and is not here. Inputs and outputs of every batch under way, twice. It "
        "counts as memory of the container."
    )
    return Reasoned(quantity(nbytes), why)


def _pre_stop_delay(settings: ServerSettings) -> Reasoned:
    """Return the propagation time minus the server's own lame duck period."""
    why = f"{PROPAGATION_S} s until nobody sends to this pod any more; it serves meanwhile, SIGTERM comes "
    why += "then."
    if lame_duck_s := _lame_duck_s(settings):
        why += f" {lame_duck_s:g} s of them are server.lame_duck_s."
    return Reasoned(max(0, PROPAGATION_S - math.floor(lame_duck_s)), why)


def _grace_period(settings: ServerSettings) -> Reasoned:
    pre_stop, drain = _pre_stop_delay(settings).value, math.ceil(settings.drain_timeout_s)
    lame_duck = math.ceil(_lame_duck_s(settings))
    named = f" + server.lame_duck_s {lame_duck}" if lame_duck else ""
    why = f"preStop {pre_stop}{named} + server.drain_timeout_s {drain} + {STOP_MARGIN_S} until all have "
    why += "ended."
    return Reasoned(pre_stop + lame_duck + drain + STOP_MARGIN_S, why)


def _lame_duck_s(settings: ServerSettings) -> float:
    """Return the lame duck period of a pod, which SIGTERM ends and which has no terminal."""
    return TERMINATED_LAME_DUCK_S if settings.lame_duck_s is None else settings.lame_duck_s


def startup_s(settings: ServerSettings) -> int:
    """Return the time limit from the start of a pod's process until the server is ready."""
    return PROCESS_START_S + math.ceil(settings.load_timeout_s or UNLIMITED_LOAD_S)


def _startup_probes(settings: ServerSettings) -> Reasoned:
    most = startup_s(settings)
    loads = f"{UNLIMITED_LOAD_S} for the models (server.load_timeout_s has no limit)"
    if settings.load_timeout_s:
        loads = f"server.load_timeout_s {settings.load_timeout_s:g}"
    why = f"Every {STARTUP_PERIOD_S} s for {most} s: {PROCESS_START_S} to start + {loads}."
    return Reasoned(math.ceil(most / STARTUP_PERIOD_S), why)


GRPC: Final = "grpc"
HTTP: Final = "http"
METRICS: Final = "metrics"
HEALTH: Final = "health"


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """Port numbers by name, in the order of a pod's list, and the names of ports with TLS."""

    numbers: dict[str, int]
    tls: frozenset[str]

    @classmethod
    def of(cls, settings: ServerSettings, options: ExportOptions) -> Self:
        """Return the ports of a server in a pod, where a Secret may bring TLS."""
        ports = settings.ports
        numbers: dict[str, int] = {
            name: ports[name] for name in (GRPC, HTTP, METRICS, HEALTH) if name in ports
        }
        has_tls = bool(settings.tls_certfile or options.tls_secret)
        return cls(numbers, frozenset(settings.tls_ports) & numbers.keys() if has_tls else frozenset())

    def app_protocol(self, name: str) -> str:
        """Return the ``appProtocol`` of a port, for meshes and gateways."""
        if name in self.tls:
            return "https"
        return "kubernetes.io/h2c" if name == GRPC else "http"


def probe_port(ports: ServerPorts) -> str | None:
    """Return the port for the node's probes: the health port, or else a port without TLS."""
    asked = [HEALTH, *ports.numbers] if HEALTH in ports.numbers else ports.numbers
    return next((name for name in asked if name not in ports.tls), None)
