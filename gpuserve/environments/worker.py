"""``python -m gpuserve.environments.worker ENVIRONMENT BOOT_FD LINK_FD``: a worker process in an
environment. Why there can be none is told to the supervisor as any other failure to load.
"""

from __future__ import annotations

import sys

from gpuserve.environments.becoming import become
from gpuserve.environments.problem import EnvironmentProblem
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import LoadFailed
from gpuserve_worker.running.lifecycle import EXIT_FAILED


def main() -> int:
    environment, *fds = sys.argv[1:]
    try:
        become(environment, "gpuserve_worker", fds)
    except EnvironmentProblem as problem:
        Link.from_fd(int(fds[0])).send(LoadFailed(str(problem), ""))
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
