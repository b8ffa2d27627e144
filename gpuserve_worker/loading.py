"""Loading of a model: from ``Init`` to a loaded ``Model``, its device path and its loop. Worker processes and
worker threads share this code. Duties of a process alone are in ``execution/lifecycle.py``.

Only this module names kinds of devices. The code of a kind is in a folder of its own, which only a worker
with such a device imports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from gpuserve_worker.execution.device_path import Model, WorkerDevicePath, WorkerLoop
from gpuserve_worker.execution.lifecycle import EXIT_DEVICE, EXIT_FAILED, Reporter, leave
from gpuserve_worker.execution.loop import HostPath
from gpuserve_worker.execution.ranks import Follower, Leader, Rank
from gpuserve_worker.inference.call_check import call_problem
from gpuserve_worker.inference.callable_loading import CallableKind, LoadError, build, kind_of, locate
from gpuserve_worker.inference.callable_metrics import MetricRegistry
from gpuserve_worker.inference.failure import log_text, log_traceback
from gpuserve_worker.inference.model_calls import OutgoingCalls
from gpuserve_worker.inference.model_context import ModelContext, enter_model
from gpuserve_worker.inference.stepping import is_stepped, max_active_of
from gpuserve_worker.inference.warmup import batches, warmups
from gpuserve_worker.memory import device_copies
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import TensorSpec
from gpuserve_worker.protocol.wire import PROTOCOL, Init, Ready, Slept

#: The optional method of a callable that is called at the end of its worker.
_HOOK: Final = "close"
#: Optional methods of a callable: one frees the memory of its device, the other brings its weights back.
_SLEEP: Final = "sleep"
_WAKE: Final = "wake"
#: Concurrent batches of a callable that awaits or yields, unless the model configures a number.
DEFAULT_CONCURRENCY: Final = 16


def load_model(init: Init, reporter: Reporter, followers: Sequence[Link] = ()) -> Model:
    """Load a model and report phases to the supervisor; raise ``LoadError`` without reporting it. Rank 0 has
    links to its ``followers``.
    """
    if init.protocol != PROTOCOL:
        raise LoadError(f"the supervisor speaks protocol {init.protocol}, this worker protocol {PROTOCOL}")
    context = _context(init, reporter)
    enter_model(context)
    path = open_path(init, reporter)
    reporter.phase("importing")
    target = locate(init.source)
    reporter.phase("loading")
    check_call(target, init.source, [one[0] for one in init.inputs])
    may_yield = init.decoupled or init.exact or not init.strict
    try:
        made = build(target, init.source, init.device, may_yield=may_yield)
    except LoadError as error:
        if not (text := _limit_text(init, error)):
            raise
        raise LoadError(f"{error}{text}", error.traceback) from None
    stepped = is_stepped(made)
    if stepped != bool(init.max_active):
        raise LoadError(_wrong_kind(made, stepped=stepped))
    plain = kind_of(made) is CallableKind.PLAIN
    own = getattr(made, "concurrency", None)
    slots = 1 if plain else init.concurrency or (own if isinstance(own, int) else DEFAULT_CONCURRENCY)
    concurrent = init.decoupled or not plain
    rules = init.strict, init.exact, init.read_only_inputs
    if init.static_inputs and concurrent:
        raise LoadError("static_inputs needs a plain callable, which runs one batch at a time")
    if init.ranks > 1 and (concurrent or stepped):
        raise LoadError("ranks needs a plain callable, which runs one batch at a time")
    owned_outputs = init.owned_outputs or getattr(made, "owned_outputs", False) is True
    slots = init.max_active or slots
    more = init.all_lines, owned_outputs, init.static_inputs, stepped
    return Model(context, made, path, *rules, slots, concurrent, *more, open_rank(init, followers, reporter))


def check_call(target: Any, source: Mapping[str, Any], inputs: Collection[str]) -> None:
    """Raise LoadError if requests with these inputs, and perhaps controls of sequences, cannot call the
    target of an import path. ``bind()`` has checked objects, and an adapter has rules of its own.
    """
    if "path" not in source or "adapter" in source or not callable(target):
        return
    if problem := call_problem(target, source["path"], source.get("kwargs") or {}, inputs, all_inputs=False):
        raise LoadError(problem)


def open_rank(init: Init, followers: Sequence[Link], reporter: Reporter) -> Rank | None:
    """Return the worker's rank in an instance of several processes."""
    if init.ranks == 1:
        return None
    return Follower(init.rank, reporter) if init.rank else Leader(followers, reporter)


def _wrong_kind(made: Any, *, stepped: bool) -> str:
    kind = type(made).__name__
    if stepped:
        advice = f"give the model max_active: {max_active_of(made)}"
        return f"{kind} has the methods admit and step, but the model is not stepped: {advice}"
    return f"max_active is for a callable with the methods admit and step, which {kind} has not"


def _limit_text(init: Init, error: LoadError) -> str:
    """Return the end of the sentence if a load failed because of the limit of its memory on a GPU."""
    if init.device == "cpu":
        return ""
    from gpuserve_worker.cuda.memory_limit import limit_text

    return limit_text(init.gpu_memory_nbytes, error.__context__)


def new_loop(link: Link, model: Model, reporter: Reporter) -> WorkerLoop:
    """Return the worker loop for the model's kind of callable and device."""
    if model.stepped:
        from gpuserve_worker.execution.step_loop import StepLoop  # imports asyncio, see below

        return StepLoop(link, model, reporter)
    if not model.concurrent:
        return model.path.new_loop(link, model, reporter)
    from gpuserve_worker.execution.async_loop import (
        AsyncLoop,  # imports asyncio, which most workers never need
    )

    return AsyncLoop(link, model, reporter)


def warm_up(init: Init, model: Model, loop: WorkerLoop, reporter: Reporter) -> None:
    """Run the declared warm-ups. Log a warm-up that fails; the model is served anyway."""
    if not init.warmup:
        return
    reporter.phase("warming up")
    for warmup in warmups(init.warmup):
        try:
            for batch in batches(warmup, model.context):
                loop.run_warmup(batch)
        except Exception as error:  # the user's code may raise anything
            what = f"warm-up {warmup.name!r} of model {model.name!r} failed: {log_text(error)}"
            reporter.warning(what, log_traceback(error))


def close_model(model: Model, reporter: Reporter) -> None:
    """Call a callable's ``close``, if any, when no batch runs any more; log what it raises."""
    close = getattr(model.call, _HOOK, None)
    if not callable(close):
        return
    try:
        close()
    except Exception as error:  # the user's code may raise anything
        text = f"{_HOOK} of the inference callable of model {model.name!r} raised {log_text(error)}"
        reporter.error(text, log_traceback(error))


def ready(model: Model, load_s: float) -> Ready:
    """Return the message of a loaded or woken model."""
    hooks = [callable(getattr(model.call, one, None)) for one in (_SLEEP, _WAKE)]
    has_copies = device_copies.are_there() and not any(hooks)
    return Ready(load_s, model.slots, all(hooks) or has_copies, moves_to_host=not has_copies)


def start_sleep(model: Model, boot: Link, reporter: Reporter) -> None:
    """Let the model sleep, in a thread of its own, and reply to the supervisor."""
    _start_hook(_SLEEP, model, reporter, lambda _: boot.send(Slept()))


def start_wake(model: Model, boot: Link, reporter: Reporter) -> None:
    """Wake the model, in a thread of its own, and reply to the supervisor."""
    _start_hook(_WAKE, model, reporter, lambda took_s: boot.send(ready(model, took_s)))


def _start_hook(name: str, model: Model, reporter: Reporter, reply: Callable[[float], None]) -> None:
    """Call a method of the callable in a new thread, beside the loop, which has no batch. The process ends if
    the method raises: nobody knows the state of its weights then.
    """

    def run() -> None:
        started_s = time.monotonic()
        try:
            model.path.enter_concurrently()
            if model.rank is not None:
                model.rank.wait_idle()
            own = getattr(model.call, name, None)
            (own or (device_copies.drop if name == _SLEEP else device_copies.restore))()
            if name == _SLEEP:
                if own is not None:
                    device_copies.drop_unused()
                model.path.release_memory()
        except BaseException as error:  # the user's code may raise anything
            text = f"{name} of the inference callable of model {model.name!r} raised {log_text(error)}"
            reporter.error(text, log_traceback(error))
            leave(EXIT_FAILED)
        reply(time.monotonic() - started_s)

    threading.Thread(target=run, name=f"gpuserve-{name}", daemon=True).start()


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


def open_path(init: Init, reporter: Reporter) -> WorkerDevicePath:
    """Open the device path before user code is imported; raise ``LoadError`` if it is unusable."""
    if init.device != "cpu":
        from gpuserve_worker.cuda.cuda_path import open_cuda
        from gpuserve_worker.cuda.memory_limit import limit_torch

        if init.gpu_memory_nbytes:
            limit_torch(init.gpu_memory_nbytes, reporter.warning)
        return open_cuda(init, reporter) or HostPath()
    if init.array == "cupy":
        raise LoadError(
            f"the inputs of model {init.model!r} are to be CuPy arrays, which instance {init.instance!r} "
            "on the CPU cannot have: expected an instance on a GPU, or array torch or numpy"
        )
    return HostPath()


def is_unusable(device: str) -> bool:
    """Return whether this process cannot use the device that it was given."""
    if device == "cpu":
        return False
    from gpuserve_worker.cuda.probe import exit_status

    return exit_status() == EXIT_DEVICE
