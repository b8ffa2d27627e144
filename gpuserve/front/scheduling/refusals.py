"""The errors of requests that get no answer: one function for each reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NoMemory,
    QueueFull,
    RequestError,
    Stopping,
    Unavailable,
    Unimplemented,
)
from gpuserve.front.requests.limits import shown
from gpuserve.front.scheduling.request_queue import RemovalReason


def no_stream(model: str) -> RequestError:
    return Unimplemented(
        "ModelInfer RPC doesn't support models with decoupled transaction policy: model "
        f"{model!r} gives any number of responses, which ModelStreamInfer carries"
    )


def too_late(model: str, timeout_s: float | None, *, was_queued: bool) -> RequestError:
    return DeadlineExceeded(
        f"Deadline Exceeded: {timeout_s or 0:g} s were given to model {model!r}, and the request was still "
        f"{'queued' if was_queued else 'running'}"
    )


def hopeless(model: str, timeout_s: float | None) -> RequestError:
    """Return the error of a request that was not begun, because it would have ended too late."""
    return DeadlineExceeded(
        f"Deadline Exceeded: {timeout_s or 0:g} s were given to model {model!r}, and less is left than a "
        "batch takes"
    )


def stopping() -> RequestError:
    return Stopping("Server is stopping, scheduler for model has stopped accepting new inference requests")


def crowded_out(model: str) -> RequestError:
    """Return the error of a request that was evicted from a full queue for a request of another client."""
    return QueueFull(f"Exceeds maximum queue size of model {model!r}, of which this client had the most")


def waited_too_long() -> RequestError:
    """Return the error of a request that exceeds its queue policy. Triton clients compare the whole text."""
    return Unavailable("Request timeout expired")


def no_memory(model: str) -> RequestError:
    return NoMemory(f"model {model!r} has no memory left for its inputs")


def nonsense(model: str) -> RequestError:
    return Internal(f"model {model!r} gave an answer that does not fit its request")


#: The failure of a request that the callable has returned to the queue.
KEPT_INPUTS: Final = "admit raised Later for a request and kept its inputs"


def worker_died(model: str, attempts: int, isolated: bool = False) -> RequestError:
    if isolated:
        return Internal(
            f"model {model!r}: the worker process died while it ran this request alone, as others did under "
            "requests of this client"
        )
    if attempts > 1:
        return Internal(f"model {model!r}: the worker process died twice while it ran this request")
    return Unavailable(f"model {model!r}: the worker process died while it ran this request")


def not_back(model: str, instance: str, limit_s: float) -> RequestError:
    return DeadlineExceeded(
        f"model {model!r}: the callable of instance {instance} was not back within execution_timeout_s, "
        f"{limit_s:g} s, and was ended"
    )


def not_started(model: str, sequence: int | str) -> RequestError:
    """Return the error of a request without a sequence: not begun, ended, idle for too long, or lost."""
    return InvalidArgument(
        f"inference request for sequence {_sequence(sequence)} to model '{model}' must specify the START "
        "flag on the first request of the sequence"
    )


def removed_from_sequence(model: str, sequence: int | str, reason: RemovalReason) -> RequestError:
    of = f"sequence {_sequence(sequence)} of model {model!r}"
    if reason is RemovalReason.LATE_IN_BACKLOG:
        return Unavailable(
            f"timeout of the corresponding sequence has been expired: {of} was still waiting for a slot"
        )
    return Cancelled(f"{of} has ended, because another request of it was cancelled")


def sequence_lost(model: str, sequence: int | str) -> RequestError:
    return Unavailable(
        f"sequence {_sequence(sequence)} of model {model!r} has ended: the worker process that ran it died"
    )


def lost_before(model: str, sequence: int | str, process: str) -> RequestError:
    """Return the error of a request that continues a sequence whose process died or was replaced."""
    return Unavailable(
        f"sequence {_sequence(sequence)} of model {model!r} was lost with {process}: it has to begin anew "
        "with a request that has the START flag"
    )


def _sequence(sequence: int | str) -> str:
    return str(sequence) if isinstance(sequence, int) else shown(sequence)


def several_devices(named: Sequence[str]) -> RequestError:
    return InvalidArgument(
        f"the request names shared memory of {' and '.join(named)}, expected regions of one device"
    )


def other_device(model: str, device: str, devices: Sequence[str]) -> RequestError:
    return InvalidArgument(
        f"the request names shared memory of {device}, but model {model!r} runs on {', '.join(devices)}: "
        "expected regions of such a device, or of system memory"
    )


def device_in_sequences(model: str, device: str, devices: Sequence[str]) -> RequestError:
    """Return the error of a request in a sequence that names device memory, if instances are elsewhere."""
    return InvalidArgument(
        f"the request names shared memory of {device}, but the sequences of model {model!r} run on "
        f"{', '.join(devices)}: expected all of its instances on one device"
    )


def none_on_device(model: str, device: str) -> RequestError:
    return Unavailable(f"model {model!r} has no live instance on {device}, whose memory the request names")


def no_instance(model: str, fault: str = "") -> RequestError:
    """Return the error if no instance will be up soon. ``fault`` describes a fault of the machine."""
    return Unavailable(f"model {model!r} has no live instance: {fault or 'its last one died'}")


def retired(model: str) -> RequestError:
    return Unavailable(
        f"model {model!r} was scaled down, and the instance that ran this request did not finish in time"
    )


def ended(model: str, *, stops: bool) -> RequestError:
    """Return the error if nothing runs any more: the server ``stops``, or the model was removed."""
    return stopping() if stops else Unavailable(f"model {model!r} is not served any more")
