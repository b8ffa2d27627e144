"""Every message between the supervisor and the front. All of them, and nothing else.

::

    supervisor -> front   Setup, AddModel, RemoveModel, ServeModel, ModelStates, Outcome, InstanceUp,
                          InstanceDown, Resize, RetireInstance, Serving, Drain, Quit, CudaState, Adjust,
                          Quiesce, Resume, TakeCensus, Happened, WatchRates, IngressUp, IngressDown
    front -> supervisor   FrontReady, Retired, InstanceRetired, LoadModel, UnloadModel, Operate, Drained,
                          Quiesced, Census, ExecutionHung, IsolatedDeath, Noticed, Rates, StartIngress
    either way            Changed, LostGpus
    supervisor -> ingress process   AttachFront

A *generation* is one load of one version of a model. Its number is never used again by the same server, so
that of two generations of one version, of which one replaces the other, it is clear which is meant.

Like the workers' wire (``gpuserve_worker.protocol.wire``): named tuples, msgpack arrays with a tag, one
datagram each, descriptors beside. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gpuserve.journal.event import EventWire
from gpuserve_worker.protocol.wire import Vocabulary


class Setup(NamedTuple):
    """The first message: the settings, and the listeners' descriptors beside it, in this order. ``epoch``
    counts the fronts of this server; links are taken over with it. ``listeners`` are the roles of the
    descriptors: "http", "grpc", "metrics", "health"; the front's pulse and the supervisor's come last.
    """

    epoch: int
    settings: dict[str, Any]
    listeners: tuple[str, ...]


class AddModel(NamedTuple):
    """A generation that exists from now on (``ModelSpec.to_wire``); its instances come up later. An
    ``attached`` one lives in another program: the server can be ready without it. One that is not ``served``
    gets no requests before ``ServeModel`` says so.
    """

    generation: int
    spec: dict[str, Any]
    attached: bool
    served: bool


class RemoveModel(NamedTuple):
    """A generation that is no more; whoever waits for it is refused."""

    generation: int


class ServeModel(NamedTuple):
    """These generations, and no others, get the requests for a model from now on. Each other one that had
    them is answered by ``Retired``, once it has finished what it has, or has refused it after ``timeout_s``;
    the front does not know it any more then.
    """

    model: str
    generations: tuple[int, ...]
    timeout_s: float


class Resize(NamedTuple):
    """The same generation with other instances (``ModelSpec.to_wire``). Those that are new come up later;
    those that are not in it any more stay until ``RetireInstance``.
    """

    generation: int
    spec: dict[str, Any]


class RetireInstance(NamedTuple):
    """An instance gets nothing new from now on. ``InstanceRetired`` answers, once it has finished what it has
    or ``timeout_s`` are over; the front does not know it any more then.
    """

    generation: int
    instance: str
    timeout_s: float


class ModelStates(NamedTuple):
    """What the repository index says of a model: (version, state, reason) of each version. A model that was
    never loaded has the one entry ``(0, "", "")``; one without entries does not exist.
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
    """A worker is loaded, which took ``load_s``, and takes ``slots`` batches at once. Its link and its pidfd
    ride beside this.
    """

    generation: int
    instance: str
    pid: int
    slots: int
    load_s: float = 0.0


class InstanceDown(NamedTuple):
    """A worker is dead, or must get no more batches. Its successor comes in ``restart_in_s``."""

    generation: int
    instance: str
    reason: str
    restart_in_s: float


#: Why a version is not there that somebody took out.
UNLOADED: Final = "unloaded"


class Serving(NamedTuple):
    """Every model of the start is loaded, but those that are ``missing``: the server may say that it is ready
    once these are there as well, or are not wanted any more.
    """

    missing: tuple[str, ...]


class Drain(NamedTuple):
    """Say not ready; after ``lame_duck_s`` take nothing new, and finish what is queued within ``timeout_s``.
    Then answer ``Drained``. With ``notice`` clients hear of it in between.
    """

    timeout_s: float
    lame_duck_s: float = 0.0
    notice: bool = False


class Quiesce(NamedTuple):
    """Say not ready, but serve everything that comes; after ``lame_duck_s`` have clients told that their
    connections take no more. ``Quiesced`` answers with the same ``ticket``, at the latest ``timeout_s`` after
    that.
    """

    ticket: int
    timeout_s: float
    lame_duck_s: float


class Resume(NamedTuple):
    """Be ready again; a ``Quiesce`` that is not answered yet never is."""


class TakeCensus(NamedTuple):
    """The question what waits and runs now. ``Census`` answers with the same ``ticket``."""

    ticket: int


class Quit(NamedTuple):
    """Close the connections and exit with status 0."""


class FrontReady(NamedTuple):
    """The front accepts connections on all listeners."""


class Retired(NamedTuple):
    """A generation that ``ServeModel`` left out has nothing in flight any more, and is forgotten. So many
    requests were ``unfinished``, and given up.
    """

    generation: int
    unfinished: int


class InstanceRetired(NamedTuple):
    """The instance of a ``RetireInstance`` has nothing in flight any more, and is forgotten. It was ``idle``,
    or else something was given up.
    """

    generation: int
    instance: str
    idle: bool


class LoadModel(NamedTuple):
    """A client wants a model loaded, or loaded anew. ``Outcome`` answers with the same ``ticket``.
    ``changes`` are those that the client makes to the model's declaration, as ``spec_changes`` takes them.
    """

    ticket: int
    model: str
    changes: dict[str, Any]


class UnloadModel(NamedTuple):
    """A client wants every version of a model unloaded. ``Outcome`` answers."""

    ticket: int
    model: str


class Operate(NamedTuple):
    """An operator asks for a verb by the admin API. ``Outcome`` answers with the same ``ticket``."""

    ticket: int
    verb: str
    arguments: dict[str, Any]


class Drained(NamedTuple):
    """Nothing is in flight any more; ``unfinished`` requests were given up at the timeout."""

    unfinished: int


class Quiesced(NamedTuple):
    """Nothing waits or runs, and nothing comes; or this was the timeout: ``unfinished`` requests wait or run,
    and others still come unless it ``is_quiet``.
    """

    ticket: int
    unfinished: int
    is_quiet: bool


class Census(NamedTuple):
    """``ready``: whether requests should come here. ``counts``: of each generation (its model, its version,
    requests that wait, requests that run, batches that its instances run at once, saturation or None). One
    that gets no requests has no slots here. ``states``: the repository index, (model, version, state,
    reason). ``gpu_memory``: bytes on GPUs by the pid of the worker that has them, as pairs. ``doors``, those
    that are processes: (number, pid or None, state, connections, requests, seconds of a core, restarts).
    """

    ticket: int
    ready: bool
    counts: tuple[tuple[str, int, int, int, int, float | None], ...]
    states: tuple[tuple[str, str, str, str], ...]
    gpu_memory: tuple[tuple[int, int], ...]
    doors: tuple[tuple[int, int | None, str, int, int, float, int], ...] = ()


class Happened(NamedTuple):
    """What has happened in the server, in its order, to be shown; ``Event.to_wire`` of each."""

    events: tuple[EventWire, ...]


class Noticed(NamedTuple):
    """What only the front sees has happened: an event of a kind of ``SEEN_BY_FRONT``, not numbered yet."""

    kind: str
    model: str
    version: int
    instance: str
    facts: dict[str, Any]


class WatchRates(NamedTuple):
    """Whether ``Rates`` are wanted from now on, once a second."""

    wanted: bool


class Rates(NamedTuple):
    """How fast the front works, and the fields of a ``Census`` of the same moment. ``models``: (name,
    version, requests, failures and rejections a second, rows a batch, p50 and p99 in seconds). ``instances``:
    (model, version, name, batches a second, part of the time in the callable). ``gpus``: (device, UUID, part
    of the time that it works, bytes in use, bytes). What there is nothing to tell of is None.
    """

    census: tuple[Any, ...]
    requests_per_s: float
    connections: int
    models: tuple[tuple[Any, ...], ...]
    instances: tuple[tuple[Any, ...], ...]
    gpus: tuple[tuple[Any, ...], ...]


class ExecutionHung(NamedTuple):
    """An instance, whose worker is the process ``pid``, has run one call for ``ran_s`` seconds, which is over
    the model's limit. The front has given it up; its worker is to be killed. With ``limit_s`` 0 there is no
    limit, and this is only to be told.
    """

    generation: int
    instance: str
    pid: int
    ran_s: float
    limit_s: float


class IsolatedDeath(NamedTuple):
    """An instance, whose worker was the process ``pid``, died under a request of a client whose requests had
    killed workers before. Others do not wait for that: the instance starts again without restart back-off.
    """

    generation: int
    instance: str
    pid: int


class Changed(NamedTuple):
    """Settings that clients have changed while the server runs; ``kind`` is "log" or "trace". From a front:
    all of that kind, to be remembered. To a front: what its predecessor said last.
    """

    kind: str
    settings: dict[str, Any]


class Adjust(NamedTuple):
    """Settings of the server that are others from now on, by name, as ``ServerSettings.to_wire`` has them."""

    settings: dict[str, Any]


class LostGpus(NamedTuple):
    """The GPUs that cannot be used, and no others: (UUID, device, reason) of each. No worker runs on them.
    From a front: whenever these are others. To a front: what its predecessor said last.
    """

    gpus: tuple[tuple[str, str, str], ...]


class CudaState(NamedTuple):
    """Whether a new process can use CUDA. Where it cannot, no worker on a GPU can start again."""

    works: bool


# Ingress processes: the supervisor is their parent, the front decides which of them are to run.


class StartIngress(NamedTuple):
    """Connect the ingress process of this number to the front; start one if none is running. ``IngressUp`` or
    ``IngressDown`` answers.
    """

    number: int


class IngressUp(NamedTuple):
    """An ingress process runs and gets the other end of the channel whose descriptor rides beside this,
    before the pidfd of the process. ``restarts`` counts the processes of this number before it. ``survived``:
    it was connected to a front before, and may have connections.
    """

    number: int
    pid: int
    restarts: int
    survived: bool


class IngressDown(NamedTuple):
    """The ingress process with this pid has ended, and is reaped; with pid 0: it could not be started."""

    number: int
    pid: int
    reason: str


class AttachFront(NamedTuple):
    """Serve a front from now on, over the channel whose descriptor rides beside this. The front before it has
    ended, and all that it sent is in the channel before this one.
    """


# Both ends are of one version, so a tag is the place in this list.
# fmt: off
CONTROL: Final = Vocabulary(dict(enumerate((
    Setup, AddModel, RemoveModel, ServeModel, Resize, RetireInstance, ModelStates, Outcome, InstanceUp,
    InstanceDown, Serving, Drain, Quiesce, Resume, TakeCensus, Quit, FrontReady, Retired, InstanceRetired,
    LoadModel, UnloadModel, Operate, Drained, Quiesced, Census, Changed, Adjust, LostGpus, CudaState,
    Happened, Noticed, WatchRates, Rates, ExecutionHung, IsolatedDeath, StartIngress, IngressUp,
    IngressDown, AttachFront,
), start=1)))
# fmt: on
