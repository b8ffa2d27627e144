"""The main function of a worker process: connects the boot socket (to the supervisor) and the link (to the
front), loads the model and runs its loop. stdout and stderr belong to the user's code.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from gpuserve_worker.execution import lifecycle
from gpuserve_worker.execution.lifecycle import ImportWatch, Reporter, SupervisorReceiver
from gpuserve_worker.inference.callable_loading import LoadError
from gpuserve_worker.inference.failure import log_text, log_traceback
from gpuserve_worker.loading import (
    close_model,
    is_unusable,
    load_model,
    new_loop,
    ready,
    start_sleep,
    start_wake,
    warm_up,
)
from gpuserve_worker.memory.batch_tensors import OutputWriter
from gpuserve_worker.memory.weights_port import open_port
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.sealed_memory import SealedMemory, split
from gpuserve_worker.protocol.stack_signals import block_forced_signal, show_on_signal
from gpuserve_worker.protocol.wire import Init, LoadFailed

#: Threads of pools end within this time, once the process ends.
_THREADS_END_S: Final = 1.0


def run() -> int:
    """Serve a model until told to stop, by the command line's descriptors; return the exit status."""
    if len(sys.argv) < 3 or not all(argument.isdigit() for argument in sys.argv[1:]):
        sys.stderr.write("gpuserve_worker is started by the supervisor, with its descriptors\n")
        return lifecycle.EXIT_USAGE
    boot_fd, link_fd, *more_fds = map(int, sys.argv[1:])
    for fd in more_fds[:1]:
        show_on_signal(fd)
    boot, link, *followers = map(Link.from_fd, (boot_fd, link_fd, *more_fds[1:]))
    lifecycle.prepare_process()
    lifecycle.close_in_children(boot, link, *followers)
    # A forked child that answers would overwrite the worker's outputs in shared memory.
    os.register_at_fork(after_in_child=lambda: setattr(OutputWriter, "write", lifecycle.end_child))
    received = boot.receive()
    if received is None:
        return lifecycle.EXIT_FAILED
    init, fds = received
    if not isinstance(init, Init):
        return lifecycle.EXIT_FAILED
    if fds:
        source = init.source
        # Copy-on-write, because a callable may write to its own arrays.
        memory = SealedMemory(fds[0]).map_private()
        source["pickle"], *source["buffers"] = split(memory, source.pop("ranges"))
    return _serve(init, boot, link, followers)


def _serve(init: Init, boot: Link, link: Link, followers: Sequence[Link]) -> int:
    lifecycle.set_title(f"gs:{init.model}/{init.instance}")
    supervision = SupervisorReceiver(boot, may_sleep=init.may_sleep)
    supervision.start()
    open_port(supervision)
    block_forced_signal()
    reporter = Reporter(boot)
    started_s = time.monotonic()
    _place(init, reporter)
    imports = _imports(reporter) if init.reports_imports else None
    try:
        model = load_model(init, reporter, followers)
    except LoadError as error:
        if imports is not None:
            imports.report_failed(error)
        boot.send(LoadFailed(str(error), error.traceback))
        # The exception of user code does not show whether the device caused it, so the device is tested.
        return lifecycle.EXIT_DEVICE if is_unusable(init.device) else lifecycle.EXIT_FAILED
    loop = new_loop(link, model, reporter)
    pid = os.getpid()
    try:
        warm_up(init, model, loop, reporter)
        if imports is not None:
            imports.start()
        gc.freeze()  # the loaded objects stay alive, so later collections skip them
        supervision.on_stop = loop.stop
        supervision.on_sleep = partial(start_sleep, model, boot, reporter)
        supervision.on_wake = partial(start_wake, model, boot, reporter)
        boot.send(ready(model, time.monotonic() - started_s))
        loop.run()
        if model.rank is not None and not loop.device_is_lost:
            model.rank.stop_others()
    except BaseException as error:
        if os.getpid() != pid:
            lifecycle.end_child(error)
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        # Its own exit status is not passed on, because it may be one that the supervisor knows.
        reporter.error(f"the inference callable raised {log_text(error)}", log_traceback(error))
        with suppress(OSError):  # the supervisor is gone
            reporter.ending(f"its callable raised {log_text(error)}")
        return lifecycle.EXIT_FAILED
    finally:
        close_model(model, reporter)
    if loop.device_is_lost:
        lifecycle.leave(lifecycle.EXIT_DEVICE)
    timer = threading.Timer(_THREADS_END_S, _report_threads, [reporter])
    timer.daemon = True
    timer.start()
    return lifecycle.EXIT_STOPPED


def _report_threads(reporter: Reporter) -> None:
    """Name the threads that the callable left, for which Python waits at the end of a process."""
    left = [
        one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()
    ]
    if left:
        reporter.info(f"the process cannot end before threads of the inference callable: {', '.join(left)}")


def _imports(reporter: Reporter) -> ImportWatch:
    from gpuserve_worker.execution.lifecycle import ImportWatch  # most servers do not watch files

    return ImportWatch(reporter)


def _place(init: Init, reporter: Reporter) -> None:
    """Pin the process to the CPUs and the NUMA node of its GPU, if the server configures them."""
    if not init.cpus and init.numa_node < 0:
        return
    from gpuserve_worker.execution.lifecycle import bind_near_gpu  # most workers have no GPU

    for refusal in bind_near_gpu(init.cpus, init.numa_node):
        reporter.info(refusal)
