"""``python -m gpuserve.describe.elsewhere ENVIRONMENT``: the process of ``child.py`` in another Python
environment.
"""

from __future__ import annotations

import sys

import msgpack

from gpuserve.environments.becoming import become
from gpuserve.environments.problem import EnvironmentProblem


def main() -> None:
    try:
        become(sys.argv[1], "gpuserve.describe.child", ())
    except EnvironmentProblem as problem:
        sys.stdout.buffer.write(msgpack.packb({"error": str(problem)}))


if __name__ == "__main__":
    main()
