"""``pytriton`` and ``python -m pytriton``: PyTriton's checks of an environment. No file is written."""

from __future__ import annotations

import argparse
import logging
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from gpuserve.client import ModelClient
from gpuserve.compat.pytriton import __version__
from gpuserve.compat.pytriton.check import find_free_port
from gpuserve.compat.pytriton.decorators import batch
from gpuserve.compat.pytriton.triton import Triton, TritonConfig
from gpuserve.core.version import VERSION
from gpuserve.model.declaration import ModelConfig, Tensor


def example_add_sub() -> None:
    """Serve a model on free ports and send one request."""
    http, grpc, metrics = (find_free_port() for _ in range(3))

    @batch
    def add_sub(a: Any, b: Any) -> dict[str, Any]:
        return {"add": a + b, "sub": a - b}

    floats = [Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in ("a", "b", "add", "sub")]
    with Triton(config=TritonConfig(http_port=http, grpc_port=grpc, metrics_port=metrics)) as triton:
        triton.bind("AddSub", add_sub, floats[:2], floats[2:], config=ModelConfig(max_batch_size=128))
        with ModelClient(f"localhost:{http}", "AddSub") as client:
            found = client.infer_sample(np.array([3], np.float32), np.array([1], np.float32))
    answers = [found[name].tolist() for name in ("add", "sub")]
    if answers != [[4], [2]]:
        raise SystemExit(f"AddSub: expected [[4], [2]], got {answers}")
    sys.stdout.write("AddSub is served, and its answers are right.\n")


def environment() -> None:
    """Print the versions and the machine that a program for PyTriton finds."""
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, gpuserve {VERSION}"
    sys.stdout.write(f"{versions}, with the API of PyTriton {__version__}\n")
    sys.stdout.flush()
    for verb in ("devices", "doctor"):
        subprocess.run([sys.executable, "-m", "gpuserve", verb], check=False)


def check_all() -> None:
    environment()
    example_add_sub()


_COMMANDS: Final[Mapping[str, tuple[Callable[[], None], str]]] = {
    "check": (check_all, "all of the others"),
    "env": (environment, "what there is: versions, GPUs, limits, ports"),
    "examples": (example_add_sub, "the same as example-add-sub"),
    "example-add-sub": (example_add_sub, "serve a model and ask it"),
    "example-add-sub-script": (example_add_sub, "the same as example-add-sub"),
}


def main() -> None:
    parser = argparse.ArgumentParser("pytriton", description="Check the environment, and run an example.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(command="check")
    commands = parser.add_subparsers(dest="command")
    for name, (_, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--workspace", "-w", help="accepted; no file is written")
        command.add_argument("--zip", action=argparse.BooleanOptionalAction, help="accepted; as above")
    chosen, _ = _COMMANDS[parser.parse_args().command]
    logging.basicConfig(level=logging.WARNING)
    chosen()


if __name__ == "__main__":
    main()
