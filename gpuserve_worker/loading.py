"""From ``Init`` to a loaded ``Model`` and its loop, and the worker's word to the supervisor meanwhile. The
same for a worker process and for a worker thread; what only a process owes its surroundings is in
``running/lifecycle.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuserve_worker.calling.callable import CallableKind, LoadError, build, kind_of, locate
from gpuserve_worker.calling.calls import OutgoingCalls
from gpuserve_worker.calling.context import ModelContext, enter_model
from gpuserve_worker.calling.failure import log_text, log_traceback
from gpuserve_worker.calling.metrics import MetricRegistry
from gpuserve_worker.calling.warmup import batches, warmups
from gpuserve_worker.devices import open_path
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import TensorSpec
from gpuserve_worker.protocol.wire import PROTOCOL, Init
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.supervision import Reporter

if TYPE_CHECKING:
    from gpuserve_worker.running.device_path import WorkerLoop

#: The method of a callable that is told of the end of its worker.
_HOOK: Final = "close"
#: Batches that a callable which awaits or yields has under way at once, where nothing else is said.
DEFAULT_CONCURRENCY: Final = 16


def load_model(init: Init, reporter: Reporter) -> Model:
    """Load what ``init`` names; the supervisor is told of each phase, but of no ``LoadError``."""
    if init.protocol != PROTOCOL:
        raise LoadError(f"the supervisor speaks protocol {init.protocol}, this worker protocol {PROTOCOL}")
    context = _context(init, reporter)
    enter_model(context)
    path = open_path(init, reporter)
    reporter.phase("importing")
    target = locate(init.source)
    reporter.phase("loading")
    may_yield = init.decoupled or init.exact or not init.strict
    made = build(target, init.source, init.device, may_yield=may_yield)
    plain = kind_of(made) is CallableKind.PLAIN
    own = getattr(made, "concurrency", None)
    slots = 1 if plain else init.concurrency or (own if isinstance(own, int) else DEFAULT_CONCURRENCY)
    concurrent = init.decoupled or not plain
    rules = init.strict, init.exact, init.read_only_inputs
    return Model(context, made, path, *rules, slots, concurrent, init.all_lines)


def new_loop(link: Link, model: Model, reporter: Reporter) -> WorkerLoop:
    if not model.concurrent:
        return model.path.new_loop(link, model, reporter)
    from gpuserve_worker.running.async_loop import AsyncLoop  # brings asyncio, which most workers never need

    return AsyncLoop(link, model, reporter)


def warm_up(init: Init, model: Model, loop: WorkerLoop, reporter: Reporter) -> None:
    """Run the declared warm-ups. One that fails is logged, and the model is served all the same."""
    if not init.warmup:
        return
    reporter.phase("warming up")
    for warmup in warmups(init.warmup):
        try:
            for batch in batches(warmup, model.context):
                loop.try_out(batch)
        except Exception as error:  # the user's code may raise anything
            what = f"warm-up {warmup.name!r} of model {model.name!r} failed: {log_text(error)}"
            reporter.warning(what, log_traceback(error))


def close_model(model: Model, reporter: Reporter) -> None:
    """Tell a callable that has a method ``close`` that its worker ends; no batch is under way. What it raises
    is logged.
    """
    close = getattr(model.call, _HOOK, None)
    if not callable(close):
        return
    try:
        close()
    except Exception as error:  # the user's code may raise anything
        text = f"{_HOOK} of the inference callable of model {model.name!r} raised {log_text(error)}"
        reporter.error(text, log_traceback(error))


def _context(init: Init, reporter: Reporter) -> ModelContext:
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
        OutgoingCalls(),
        init.array,
        MetricRegistry(),
        reporter.log,
    )
