"""From ``Init`` to a loaded ``Model``, and the worker's word to the supervisor meanwhile.

The same for a worker process and for a worker thread; what only a process owes its surroundings is in
``lifecycle.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuserve_worker.callable import LoadError, build, locate
from gpuserve_worker.context import ModelContext, enter_model
from gpuserve_worker.link import Link
from gpuserve_worker.loop import Model
from gpuserve_worker.tensor import TensorSpec
from gpuserve_worker.wire import PROTOCOL, Init, Log, Phase


def load_model(init: Init, boot: Link) -> Model:
    """Load what ``init`` names; the supervisor is told of each phase.

    Raises:
        LoadError: it cannot be loaded; nothing is told to the supervisor of that.
        OSError: the supervisor is gone.
    """
    if init.protocol != PROTOCOL:
        raise LoadError(f"the supervisor speaks protocol {init.protocol}, this worker protocol {PROTOCOL}")
    context = _context(init)
    enter_model(context)
    boot.send(Phase("importing"))
    target = locate(init.source)
    boot.send(Phase("loading"))
    made = build(target, init.source, init.device)
    return Model(context, made, init.strict, init.read_only_inputs)


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
    )


def log_to(boot: Link) -> Callable[[int, str, str], None]:
    """The supervisor's log as (level, text, traceback) -> None.

    A record is dropped rather than let inference wait for a log.
    """

    def log(level: int, text: str, traceback: str) -> None:
        boot.try_send(Log(level, text, traceback))

    return log
