"""A worker process: ``python -m gpuserve_worker BOOT_FD LINK_FD``, both inherited from the supervisor.

The boot socket leads to the supervisor: what to load comes in, how it went and log records go out. The
link leads to the front: batches. Here the two are put together and nothing else is done; the life of
the process is in ``lifecycle.py``, the loading in ``loading.py``, the work in ``loop.py``. stdout and
stderr are the user's.
"""

from __future__ import annotations

import gc
import sys
import time

from gpuserve_worker import lifecycle
from gpuserve_worker.callable import LoadError
from gpuserve_worker.link import Link
from gpuserve_worker.loading import load_model, new_loop, warm_up
from gpuserve_worker.reporting import Report
from gpuserve_worker.wire import Init, LoadFailed, Ready


def main() -> int:
    """Run the worker; the exit status."""
    if len(sys.argv) != 3 or not all(argument.isdigit() for argument in sys.argv[1:]):
        sys.stderr.write("gpuserve_worker is started by the supervisor, with two descriptors\n")
        return lifecycle.EXIT_USAGE
    boot, link = (Link.from_fd(int(argument)) for argument in sys.argv[1:])
    lifecycle.prepare_process()
    lifecycle.keep_from_children(boot, link)
    received = boot.receive()
    if received is None or not isinstance(received[0], Init):
        return lifecycle.EXIT_FAILED
    return _serve(received[0], boot, link)


def _serve(init: Init, boot: Link, link: Link) -> int:
    lifecycle.set_title(f"gs:{init.model}/{init.instance}")
    supervision = lifecycle.Supervision(boot)
    supervision.start()
    report = Report(boot)
    started_s = time.monotonic()
    _place(init, report)
    try:
        model = load_model(init, report)
    except LoadError as error:
        boot.send(LoadFailed(str(error), error.traceback))
        return _status_of_failed_load(init)
    loop = new_loop(link, model, report)
    warm_up(init, model, loop, report)
    gc.freeze()  # what was loaded stays; collections need not walk it again
    supervision.on_stop = loop.stop
    boot.send(Ready(time.monotonic() - started_s, model.slots))
    loop.run()
    if loop.device_is_lost:
        lifecycle.leave(lifecycle.EXIT_DEVICE)
    return lifecycle.EXIT_STOPPED


def _status_of_failed_load(init: Init) -> int:
    """Whether it was the device's fault is for the device to say: user code fails in words of its own."""
    if init.device == "cpu":
        return lifecycle.EXIT_FAILED
    from gpuserve_worker.cuda.probe import Usability, usability  # most workers have no GPU

    return lifecycle.EXIT_DEVICE if usability() is Usability.UNUSABLE else lifecycle.EXIT_FAILED


def _place(init: Init, report: Report) -> None:
    """Go beside the GPU, where there is one and the server wants it."""
    if not init.cpus and init.numa_node < 0:
        return
    from gpuserve_worker.placement import stay_beside_gpu  # most workers have no GPU

    for refusal in stay_beside_gpu(init.cpus, init.numa_node):
        report.info(refusal)


if __name__ == "__main__":
    sys.exit(main())
