"""A worker process, from its two sockets to its end. The boot socket leads to the supervisor, the link to the
front. Here the two are put together and nothing else is done; the life of the process is in
``running/lifecycle.py``. stdout and stderr are the user's.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING

from gpuserve_worker.calling.callable import LoadError
from gpuserve_worker.devices import is_unusable
from gpuserve_worker.loading import close_model, load_model, new_loop, warm_up
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.stacks import block_forced_signal, show_on_signal
from gpuserve_worker.protocol.wire import Init, LoadFailed, Ready
from gpuserve_worker.running import lifecycle
from gpuserve_worker.running.supervision import Reporter, Supervision

if TYPE_CHECKING:
    from gpuserve_worker.running.imports import ImportWatch


def run() -> int:
    """Serve a model until told to stop; the exit status. The command line has the descriptors."""
    if len(sys.argv) not in (3, 4) or not all(argument.isdigit() for argument in sys.argv[1:]):
        sys.stderr.write("gpuserve_worker is started by the supervisor, with its descriptors\n")
        return lifecycle.EXIT_USAGE
    boot_fd, link_fd, *stacks_fd = map(int, sys.argv[1:])
    for fd in stacks_fd:
        show_on_signal(fd)
    boot, link = Link.from_fd(boot_fd), Link.from_fd(link_fd)
    lifecycle.prepare_process()
    lifecycle.keep_from_children(boot, link)
    received = boot.receive()
    if received is None or not isinstance(received[0], Init):
        return lifecycle.EXIT_FAILED
    return _serve(received[0], boot, link)


def _serve(init: Init, boot: Link, link: Link) -> int:
    lifecycle.set_title(f"gs:{init.model}/{init.instance}")
    supervision = Supervision(boot)
    supervision.start()
    block_forced_signal()
    reporter = Reporter(boot)
    started_s = time.monotonic()
    _place(init, reporter)
    imports = _imports(reporter) if init.tells_imports else None
    try:
        model = load_model(init, reporter)
    except LoadError as error:
        if imports is not None:
            imports.tell_failed(error)
        boot.send(LoadFailed(str(error), error.traceback))
        # User code fails in words of its own: whether it was the device's fault is for the device to say.
        return lifecycle.EXIT_DEVICE if is_unusable(init.device) else lifecycle.EXIT_FAILED
    loop = new_loop(link, model, reporter)
    warm_up(init, model, loop, reporter)
    if imports is not None:
        imports.start()
    gc.freeze()  # what was loaded stays; collections need not walk it again
    supervision.on_stop = loop.stop
    boot.send(Ready(time.monotonic() - started_s, model.slots))
    try:
        loop.run()
    finally:
        close_model(model, reporter)
    if loop.device_is_lost:
        lifecycle.leave(lifecycle.EXIT_DEVICE)
    return lifecycle.EXIT_STOPPED


def _imports(reporter: Reporter) -> ImportWatch:
    from gpuserve_worker.running.imports import ImportWatch  # most servers follow no files

    return ImportWatch(reporter)


def _place(init: Init, reporter: Reporter) -> None:
    """Go beside the GPU, where there is one and the server wants it."""
    if not init.cpus and init.numa_node < 0:
        return
    from gpuserve_worker.running.placement import stay_beside_gpu  # most workers have no GPU

    for refusal in stay_beside_gpu(init.cpus, init.numa_node):
        reporter.info(refusal)
