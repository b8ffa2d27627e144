"""From ``Init`` to a loaded ``Model``, and the worker's word to the supervisor meanwhile.

The same for a worker process and for a worker thread; what only a process owes its surroundings is in
``lifecycle.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from gpuserve_worker.callable import Kind, LoadError, build, kind_of, locate
from gpuserve_worker.calls import Calls
from gpuserve_worker.context import ModelContext, enter_model
from gpuserve_worker.failure import log_text, log_traceback
from gpuserve_worker.link import Link
from gpuserve_worker.loop import Loop
from gpuserve_worker.model import Model
from gpuserve_worker.reporting import Report
from gpuserve_worker.tensor import TensorSpec
from gpuserve_worker.warmup import batches, warmups
from gpuserve_worker.wire import PROTOCOL, Init

if TYPE_CHECKING:
    from gpuserve_worker.async_loop import AsyncLoop
    from gpuserve_worker.cuda.device import Device
    from gpuserve_worker.cuda.device_loop import DeviceLoop

    AnyLoop: TypeAlias = Loop | AsyncLoop | DeviceLoop

#: Batches that a callable which awaits or yields has under way at once, where nothing else is said.
DEFAULT_CONCURRENCY: Final = 16


def load_model(init: Init, report: Report) -> Model:
    """Load what ``init`` names; the supervisor is told of each phase.

    Raises:
        LoadError: it cannot be loaded; nothing is told to the supervisor of that.
        OSError: the supervisor is gone.
    """
    if init.protocol != PROTOCOL:
        raise LoadError(f"the supervisor speaks protocol {init.protocol}, this worker protocol {PROTOCOL}")
    context = _context(init)
    enter_model(context)
    device = _device(init, report)
    report.phase("importing")
    target = locate(init.source)
    report.phase("loading")
    made = build(target, init.source, init.device, decoupled=init.decoupled)
    plain = kind_of(made) is Kind.PLAIN
    slots = 1 if plain else init.concurrency or DEFAULT_CONCURRENCY
    concurrent = init.decoupled or not plain
    return Model(context, made, init.strict, init.read_only_inputs, slots, concurrent, device)


def _device(init: Init, report: Report) -> Device | None:
    """The worker's device, opened before user code can be in its way; None where it has none.

    Raises:
        LoadError: the model's inputs cannot be what they are declared to be without it.
    """
    if init.device == "cpu":
        if init.array == "cupy":
            raise LoadError(
                f"the inputs of model {init.model!r} are to be CuPy arrays, which instance {init.instance!r} "
                "on the CPU cannot have: expected an instance on a GPU, or array torch or numpy"
            )
        return None
    from gpuserve_worker.cuda.opening import device_of  # only a worker with a device has any use for it

    return device_of(init, report)


def new_loop(link: Link, model: Model, report: Report) -> AnyLoop:
    """The loop for the kind of the model's callable."""
    if not model.concurrent:
        if model.device is None:
            return Loop(link, model, report)
        from gpuserve_worker.cuda.device_loop import DeviceLoop  # only a worker with a device

        return DeviceLoop(link, model, model.device, report)
    from gpuserve_worker.async_loop import AsyncLoop  # brings asyncio, which most workers never need

    return AsyncLoop(link, model, report)


def warm_up(init: Init, model: Model, loop: AnyLoop, report: Report) -> None:
    """Run the declared warm-ups. One that fails is logged, and the model is served all the same.

    Raises:
        OSError: the supervisor is gone.
    """
    if not init.warmup:
        return
    report.phase("warming up")
    for warmup in warmups(init.warmup):
        try:
            for batch in batches(warmup, model.context):
                loop.try_out(batch)
        except Exception as error:  # the user's code may raise anything
            what = f"warm-up {warmup.name!r} of model {model.name!r} failed: {log_text(error)}"
            report.warning(what, log_traceback(error))


def _context(init: Init) -> ModelContext:
    return ModelContext(
        init.model,
        init.version,
        init.instance,
        init.device,
        tuple(TensorSpec(*one) for one in init.inputs),
        tuple(TensorSpec(*one) for one in init.outputs),
        init.max_batch_size,
        init.preferred_batch_sizes,
        init.decoupled,
        Calls(),
        init.array,
    )
