"""What a model is, complete: ``ModelSpec``, to which the arguments of ``bind()`` and the config file come
alike, and which the supervisor, the front and (in part) the workers are given. Plain values only, no I/O.
What users write is in ``model.py``.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.devices.placement import ANYWHERE, Placement
from gpuserve.ensemble_spec import StepSpec
from gpuserve.errors import BindError
from gpuserve.label_spec import LabelSpec
from gpuserve.rate_spec import NO_RATE, RateSpec
from gpuserve.sequence_spec import NO_SEQUENCES, SequenceSpec
from gpuserve_worker.tensor import TensorSpec

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DEFAULT_MAX_QUEUE_REQUESTS: Final = 4096
DEFAULT_MAX_QUEUE_NBYTES: Final = 2 << 30
#: Batches under way at once in one instance.
MAX_CONCURRENCY: Final = 4096
#: Instances of one model that may be declared at once.
MAX_INSTANCES: Final = 256
#: What ``on_unrecoverable`` may say.
SHUTDOWN: Final = "shutdown"
RESTART_WORKER: Final = "restart_worker"


@dataclass(frozen=True, slots=True)
class BatchingSpec:
    """When a batch is formed; the semantics are Triton's dynamic batcher.

    ``merge=False``: every request is its own batch. ``preserve_ordering``: the answers of a model are
    given in the order in which its requests were accepted.
    """

    max_queue_delay_us: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    merge: bool = True
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """How long and how many requests of one priority may wait; 0 is no limit.

    ``on_timeout`` "reject" refuses a request whose time in the queue ran out; "delay" lets all others
    of its priority go before it, once and for all. With ``allow_timeout_override`` a request's own timeout
    replaces a longer ``default_timeout_us``, but none that is 0.
    """

    on_timeout: str = "reject"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_requests: int = 0


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """How much may wait for a model before requests are refused, and in which order it is taken.

    ``priority_levels`` 0: all requests are alike. Level 1 goes first; a request that names none (0), or one
    that there is not, has ``default_priority``. ``policies`` holds what differs from ``policy``, by level.
    """

    max_requests: int = DEFAULT_MAX_QUEUE_REQUESTS
    max_nbytes: int = DEFAULT_MAX_QUEUE_NBYTES
    priority_levels: int = 0
    default_priority: int = 0
    policy: PolicySpec = PolicySpec()
    policies: tuple[tuple[int, PolicySpec], ...] = ()

    @classmethod
    def from_wire(cls, plain: tuple[Any, ...]) -> QueueSpec:
        """The inverse of ``dataclasses.astuple``."""
        max_requests, max_nbytes, levels, default, policy, policies = plain
        by_level = tuple((level, PolicySpec(*one)) for level, one in policies)
        return cls(max_requests, max_nbytes, levels, default, PolicySpec(*policy), by_level)


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One worker process: its name, its device, and where its callable comes from (``wire.Init.source``).

    ``device`` is as it was written until the instance is placed, and "cpu" or "cuda:N" from then on.
    ``rate`` is what it needs before it may run, on a server that limits rates.
    """

    name: str
    device: str
    source: dict[str, Any]
    rate: RateSpec = NO_RATE
    placement: Placement = ANYWHERE


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model, complete. ``max_batch_size`` 0 means that the model does not batch.

    ``prefetch`` is how many batches may wait inside a worker besides those that run. ``concurrency`` is
    how many batches an async callable or a generator may have under way at once in one instance; 0
    leaves it to the worker, which knows what kind its callable is. ``array`` is the kind of array that the
    callable is given: "numpy", "cupy" or "torch". ``warmup`` is what
    ``wire.Init.warmup`` says. An ensemble has ``steps``, and no ``instances``.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    instances: tuple[InstanceSpec, ...]
    version: int = 1
    batching: BatchingSpec = BatchingSpec()
    queue: QueueSpec = QueueSpec()
    prefetch: int = 0
    concurrency: int = 0
    strict: bool = False
    decoupled: bool = False
    response_cache: bool = False
    read_only_inputs: bool = False
    array: str = "numpy"
    retry_on_worker_death: bool = True
    on_unrecoverable: str = SHUTDOWN
    warmup: tuple[Any, ...] = ()
    sequence: SequenceSpec = NO_SEQUENCES
    labels: tuple[LabelSpec, ...] = ()
    steps: tuple[StepSpec, ...] = ()

    @property
    def is_ensemble(self) -> bool:
        """Whether its requests are answered by other models, and it has no instance of its own."""
        return bool(self.steps)

    @property
    def in_sequences(self) -> bool:
        """Whether every request belongs to a sequence."""
        return bool(self.sequence.strategy)

    def to_wire(self) -> dict[str, Any]:
        """The spec as plain data for another process, without the instances' callables; of their placements
        only the UUID of the GPU.
        """
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["batching"] = dataclasses.astuple(self.batching)
        plain["queue"] = dataclasses.astuple(self.queue)
        plain["sequence"] = dataclasses.astuple(self.sequence)
        plain["labels"] = [dataclasses.astuple(one) for one in self.labels]
        plain["steps"] = [dataclasses.astuple(one) for one in self.steps]
        plain["instances"] = [
            (one.name, one.device, dataclasses.astuple(one.rate), one.placement.gpu_uuid)
            for one in self.instances
        ]
        return plain

    @classmethod
    def from_wire(cls, plain: dict[str, Any]) -> ModelSpec:
        """The inverse of ``to_wire``; the instances' sources are empty."""
        return cls(
            **{
                **plain,
                "inputs": tuple(TensorSpec(*one) for one in plain["inputs"]),
                "outputs": tuple(TensorSpec(*one) for one in plain["outputs"]),
                "batching": BatchingSpec(*plain["batching"]),
                "queue": QueueSpec.from_wire(plain["queue"]),
                "sequence": SequenceSpec.from_wire(plain["sequence"]),
                "labels": tuple(LabelSpec(*one) for one in plain["labels"]),
                "steps": tuple(StepSpec.from_wire(one) for one in plain["steps"]),
                "instances": tuple(
                    InstanceSpec(name, device, {}, RateSpec.from_wire(rate), Placement(uuid))
                    for name, device, rate, uuid in plain["instances"]
                ),
            }
        )


def check_model_name(name: object) -> str:
    """The name, if a model may have it.

    Raises:
        BindError: not a string, empty, too long, or with other characters than the allowed ones.
    """
    if not isinstance(name, str) or not name:
        raise BindError("Model name cannot be empty")
    if MODEL_NAME.fullmatch(name) is None:
        raise BindError(
            f"Model name {name[:140]!r} is not allowed: it can only contain alphanumeric characters, "
            "dots, underscores and dashes, begins with no dot or dash and has at most 128 characters"
        )
    return name
