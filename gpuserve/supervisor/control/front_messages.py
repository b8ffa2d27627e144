"""The messages between the supervisor and the front, and from the supervisor to ingress processes::

    supervisor -> front   Setup, AddModel, RemoveModel, ServeModel, ModelStates, Outcome, InstanceUp,
                          InstanceDown, Resize, RetireInstance, Serving, Drain, Quit, CudaState, Adjust,
                          HeldWeights, Quiesce, Resume, RequestCensus, EventBatch, WatchRates, IngressUp,
                          IngressDown, Listen, Sleep, ResidentMemory
    front -> supervisor   FrontReady, Retired, InstanceRetired, LoadModel, UnloadModel, Operate, Drained,
                          Quiesced, Census, ExecutionHung, IsolatedWorkerDeath, FrontEvent, Rates,
                          StartIngress, Usage, Asleep
    either way            Changed, LostGpus
    supervisor -> ingress process   AttachFront

A *generation* is one load of one version of a model. Its number is never reused, so that it distinguishes two
generations of one version while one replaces the other. Messages are framed like those of workers
(``gpuserve_worker.protocol.wire``): named tuples, msgpack arrays with a tag, one datagram each, with
descriptors beside them. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gpuserve.core.event_log import EventWire
from gpuserve_worker.protocol.wire import MessageCodec


class Setup(NamedTuple):
    """The first message: the settings, with the descriptors of the listeners. ``listeners`` are their roles,
    in the same order: "http", "grpc", "metrics", "health". The heartbeats of the front and of the supervisor
    come last. ``epoch`` counts the fronts of this server; a front takes over the links of workers with it.
    """

    epoch: int
    settings: dict[str, Any]
    listeners: tuple[str, ...]


class Listen(NamedTuple):
    """Accept clients. Sent after the models, so that the front answers no client that a model is unknown."""


class AddModel(NamedTuple):
    """A new generation (``ModelSpec.to_wire``); its instances come up later. Readiness does not depend on an
    ``attached`` model of another program. Unless ``served``, it gets no requests until ``ServeModel``.
    """

    generation: int
    spec: dict[str, Any]
    attached: bool
    served: bool


class RemoveModel(NamedTuple):
    """A generation to be removed; its waiting requests are refused."""

    generation: int


class ServeModel(NamedTuple):
    """The generations that get the requests for a model from now on, and no others. Each other generation is
    answered by ``Retired`` once its requests are finished, or refused after ``timeout_s``, and is forgotten.
    """

    model: str
    generations: tuple[int, ...]
    timeout_s: float


class Resize(NamedTuple):
    """A generation with other instances (``ModelSpec.to_wire``). New instances come up later. Instances that
    are missing here stay until ``RetireInstance``.
    """

    generation: int
    spec: dict[str, Any]


class RetireInstance(NamedTuple):
    """An instance that gets no new requests. ``InstanceRetired`` is the answer, once its requests are
    finished, or after ``timeout_s``. The front has forgotten it by then.
    """

    generation: int
    instance: str
    timeout_s: float


class Sleep(NamedTuple):
    """A request to take the instances of a model with ``on_demand`` out of rotation. The answer is
    ``Asleep``: at once, or if ``is_used`` after the running requests. Later requests wait for instances that
    are still to come up. Without a ``reason`` the workers have ended already. If ``keeps_processes``, the
    workers stay, and come up again with the same process ids.
    """

    generation: int
    reason: str
    is_used: bool
    keeps_processes: bool = False


class ResidentMemory(NamedTuple):
    """The bytes that each model with ``on_demand`` takes, changed or not: (model, version, device, bytes).
    The models that sleep: (model, version).
    """

    models: tuple[tuple[str, int, str, int], ...]
    asleep: tuple[tuple[str, int], ...] = ()


class ModelStates(NamedTuple):
    """The entry of a model in the repository index: (version, state, reason) of each version. A model that
    was never loaded has the single entry ``(0, "", "")``; a model without entries does not exist.
    """

    model: str
    states: tuple[tuple[int, str, str], ...]


class Outcome(NamedTuple):
    """The answer to ``LoadModel``, ``UnloadModel`` or ``Operate``: the fields of a ``VerbOutcome``."""

    ticket: int
    code: str
    text: str
    result: dict[str, Any]


class InstanceUp(NamedTuple):
    """A loaded worker that runs ``slots`` batches at once, with the descriptors of its link and its pidfd.
    ``follower_pids`` are the processes of ranks other than 0.
    """

    generation: int
    instance: str
    pid: int
    slots: int
    load_s: float = 0.0
    follower_pids: tuple[int, ...] = ()


class InstanceDown(NamedTuple):
    """A worker that died, or must get no more batches. It restarts in ``restart_in_s``."""

    generation: int
    instance: str
    reason: str
    restart_in_s: float


#: The reason in the repository index of a version that was unloaded on request.
UNLOADED: Final = "unloaded"


class Serving(NamedTuple):
    """Every model of the start is loaded, except the ``missing`` ones. The server may report readiness once
    these are loaded as well, or are not wanted any more.
    """

    missing: tuple[str, ...]


class Drain(NamedTuple):
    """Report not ready. After ``lame_duck_s`` accept no new requests, and finish queued requests within
    ``timeout_s``. Then answer ``Drained``. With ``notice`` clients are told to close connections in between.
    With ``keeps_ports`` another process keeps the listeners for the next server: new connections wait there.
    """

    timeout_s: float
    lame_duck_s: float = 0.0
    notice: bool = False
    keeps_ports: bool = False


class Quiesce(NamedTuple):
    """Report not ready, but serve all requests. After ``lame_duck_s`` tell clients that their connections
    close. Answer ``Quiesced`` with the same ``ticket``, at the latest ``timeout_s`` after that.
    """

    ticket: int
    timeout_s: float
    lame_duck_s: float


class Resume(NamedTuple):
    """Report ready again; pending ``Quiesce`` messages are not answered any more."""


class RequestCensus(NamedTuple):
    """A request for a ``Census`` with the same ``ticket``."""

    ticket: int


class Quit(NamedTuple):
    """Close the connections and exit with status 0."""


class FrontReady(NamedTuple):
    """The front accepts connections on all listeners."""


class Retired(NamedTuple):
    """A generation that ``ServeModel`` left out is forgotten; ``unfinished`` requests were aborted."""

    generation: int
    unfinished: int


class InstanceRetired(NamedTuple):
    """The instance of a ``RetireInstance`` is forgotten. Unless it was ``idle``, requests were aborted."""

    generation: int
    instance: str
    idle: bool


class LoadModel(NamedTuple):
    """A client's request to load or reload a model. ``Outcome`` is the answer, with the same ``ticket``.
    ``changes`` are the client's changes to the model's declaration, as ``spec_changes`` takes them.
    """

    ticket: int
    model: str
    changes: dict[str, Any]


class UnloadModel(NamedTuple):
    """A client's request to unload every version of a model. ``Outcome`` is the answer."""

    ticket: int
    model: str


class Operate(NamedTuple):
    """An operator's request by the admin API, to be answered by ``Outcome``."""

    ticket: int
    verb: str
    arguments: dict[str, Any]


class Drained(NamedTuple):
    """No requests are in flight any more; ``unfinished`` requests were aborted at the timeout."""

    unfinished: int


class Quiesced(NamedTuple):
    """No requests wait or run, and none arrive; or the timeout is over: ``unfinished`` requests wait or run,
    and others still arrive unless it ``is_quiet``.
    """

    ticket: int
    unfinished: int
    is_quiet: bool


#: The names of the values of an ingress process in a ``Census``.
INGRESS_FIELDS: Final = ("number", "pid", "state", "connections", "requests", "cpu_s", "restarts")


class Census(NamedTuple):
    """The counts and states of the front. ``ready``: whether the server accepts requests. ``counts``: of each
    generation (model, version, waiting requests, running requests, slots of its instances, saturation or
    None); a retiring generation has no slots. ``states``: the repository index, (model, version, state,
    reason). ``gpu_memory``: bytes on GPUs by the worker's pid, as pairs. ``ingress``: the ingress
    processes, with the values of ``INGRESS_FIELDS``.
    """

    ticket: int
    ready: bool
    counts: tuple[tuple[str, int, int, int, int, float | None], ...]
    states: tuple[tuple[str, str, str, str], ...]
    gpu_memory: tuple[tuple[int, int], ...]
    ingress: tuple[tuple[int, int | None, str, int, int, float, int], ...] = ()


class EventBatch(NamedTuple):
    """Events of the server in their order, to be shown: ``Event.to_wire`` of each."""

    events: tuple[EventWire, ...]


class FrontEvent(NamedTuple):
    """An event that only the front observes, of a kind in ``OBSERVED_BY_FRONT``, without a number."""

    kind: str
    model: str
    version: int
    instance: str
    facts: dict[str, Any]


class WatchRates(NamedTuple):
    """A request to send ``Rates`` once a second from now on, or to stop sending them."""

    wanted: bool


class Rates(NamedTuple):
    """The rates of the front, with the fields of a ``Census`` of the same moment. ``models``: (name, version,
    requests, failures and rejections per second, rows per batch, p50 and p99 in seconds). ``instances``:
    (model, version, name, batches per second, fraction of time in the callable). ``gpus``: (device, UUID,
    utilization, bytes in use, bytes). Unknown values are None.
    """

    census: tuple[Any, ...]
    requests_per_s: float
    connections: int
    models: tuple[tuple[Any, ...], ...]
    instances: tuple[tuple[Any, ...], ...]
    gpus: tuple[tuple[Any, ...], ...]


class ExecutionHung(NamedTuple):
    """A call in process ``pid`` that has run for ``ran_s`` seconds. With a ``limit_s`` the front has stopped
    using the instance, and its worker is to be killed; otherwise the call is only reported.
    """

    generation: int
    instance: str
    pid: int
    ran_s: float
    limit_s: float


class IsolatedWorkerDeath(NamedTuple):
    """The worker of an instance died under a request of a client whose requests had killed workers before. It
    restarts without restart back-off, so that other clients do not wait.
    """

    generation: int
    instance: str
    pid: int


class Usage(NamedTuple):
    """The use of each generation with ``on_demand`` that has instances in rotation or requests: (generation,
    seconds since the latest request, unfinished requests). ``gpu_memory`` is that of a ``Census``.
    """

    models: tuple[tuple[int, float, int], ...]
    gpu_memory: tuple[tuple[int, int], ...]


class Asleep(NamedTuple):
    """The answer to ``Sleep``: whether the instances are out of rotation, or else are in use."""

    generation: int
    is_asleep: bool


class Changed(NamedTuple):
    """Settings of kind "log" or "trace" that clients have changed. From a front: all of that kind, to be
    stored. To a front: the settings that its predecessor sent last.
    """

    kind: str
    settings: dict[str, Any]


class Adjust(NamedTuple):
    """Changed settings of the server by name, in the form of ``ServerSettings.to_wire``."""

    settings: dict[str, Any]


class LostGpus(NamedTuple):
    """All GPUs that cannot be used: (UUID, device, reason) of each. From a front: whenever the list changes.
    To a front: the list that its predecessor sent last.
    """

    gpus: tuple[tuple[str, str, str], ...]


class CudaState(NamedTuple):
    """The state of CUDA: if new processes cannot use CUDA, no worker on a GPU can restart."""

    works: bool


class HeldWeights(NamedTuple):
    """The memory that instances share: (name, device, bytes, number of instances) of each weights."""

    weights: tuple[tuple[str, str, int, int], ...]


# Ingress processes are children of the supervisor; the front decides which of them run.


class StartIngress(NamedTuple):
    """A request to start an ingress process, if it is not running, and to connect it to the front."""

    number: int


class IngressUp(NamedTuple):
    """An ingress process that runs, with the front's end of the channel to it, and its pidfd. ``restarts``
    counts earlier processes of this number. ``survived``: it was connected to an earlier front.
    """

    number: int
    pid: int
    restarts: int
    survived: bool


class IngressDown(NamedTuple):
    """The ingress process with this pid has ended and is reaped; with pid 0 it could not be started."""

    number: int
    pid: int
    reason: str


class AttachFront(NamedTuple):
    """The descriptor of the channel to a new front, because the earlier front has ended."""


# Both ends have the same version, so a message's tag is its position in this list.
# fmt: off
CONTROL: Final = MessageCodec(dict(enumerate((
    Setup, AddModel, RemoveModel, ServeModel, Resize, RetireInstance, ModelStates, Outcome, InstanceUp,
    InstanceDown, Serving, Drain, Quiesce, Resume, RequestCensus, Quit, FrontReady, Retired, InstanceRetired,
    LoadModel, UnloadModel, Operate, Drained, Quiesced, Census, Changed, Adjust, LostGpus, CudaState,
    EventBatch, FrontEvent, WatchRates, Rates, ExecutionHung, IsolatedWorkerDeath, StartIngress, IngressUp,
    IngressDown, AttachFront, HeldWeights, Listen, Sleep, ResidentMemory, Usage, Asleep,
), start=1)))
# fmt: on
