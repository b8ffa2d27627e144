"""How the other servers are installed: PyTriton, mosec, MLServer and LitServe from PyPI, each into an
environment of its own, plain Triton out of PyTriton's wheel. Everything goes into one cache folder and is
made once. Nothing is started here.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PYTRITON = "nvidia-pytriton==0.7.0"
MOSEC = "mosec==0.9.8"
MLSERVER = "mlserver==1.7.1"
LITSERVE = "litserve==0.2.19"
_REQUIREMENTS = {
    "pytriton": (PYTRITON,),
    "mosec": (MOSEC, "numpy"),
    # From 0.22 on uvloop makes no event loop unasked, without which this MLServer's worker does not start.
    "mlserver": (MLSERVER, "uvloop<0.22"),
    "litserve": (LITSERVE, "numpy"),
}
_INSTALLED = "installed.txt"


class ServerMissing(Exception):
    """A server cannot be had on this machine; the text says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class PeerCache:
    """The folder where the peers live.

    ``python`` makes their environments. PyTriton's statically linked stub must fit that interpreter's
    standard library: Debian's and Ubuntu's own python3 do, a later patch release of 3.11 does not.
    """

    folder: Path
    python: Path = Path("/usr/bin/python3")

    @property
    def venv(self) -> Path:
        return self.folder / "pytriton"

    @property
    def triton(self) -> Path:
        """Plain Triton: ``bin/tritonserver`` and ``backends/python``."""
        return self.folder / "triton"

    @property
    def site_packages(self) -> Path:
        """The environment's packages, PyTriton and Triton's shared libraries among them."""
        return next((self.venv / "lib").glob("python3.*")) / "site-packages"

    def install(self, name: str) -> Path:
        """Make the virtual environment of a peer unless it exists; return its folder. Raises ServerMissing:
        the interpreter does not exist, or pip could not install the packages.
        """
        requirement, *others = _REQUIREMENTS[name]
        venv = self.folder / name
        stamp = venv / _INSTALLED
        if stamp.exists() and stamp.read_text() == requirement:
            return venv
        if not self.python.exists():
            raise ServerMissing(f"{self.python} does not exist: name another interpreter with --peer-python")
        _run("make its environment (python3-venv missing?)", self.python, "-m", "venv", "--clear", venv)
        install = ("install", "--quiet", "--disable-pip-version-check")
        _run(f"install {requirement}", venv / "bin/pip", *install, requirement, *others)
        stamp.write_text(requirement)
        return venv

    def install_triton(self) -> None:
        """Copy plain Triton out of PyTriton's wheel unless that was done. Raises ServerMissing: PyTriton
        cannot be had, or has no stub for the interpreter.
        """
        self.install("pytriton")
        stamp = self.triton / _INSTALLED
        if stamp.exists() and stamp.read_text() == PYTRITON:
            return
        source = self.site_packages / "pytriton/tritonserver"
        version = self.site_packages.parent.name.removeprefix("python")
        stub = source / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            raise ServerMissing(f"{PYTRITON} has no Python backend stub for Python {version}")
        shutil.rmtree(self.triton, ignore_errors=True)
        shutil.copytree(source, self.triton, ignore=shutil.ignore_patterns("python_backend_stubs"))
        shutil.copy2(stub, self.triton / "backends/python")
        stamp.write_text(PYTRITON)


def _run(what: str, *command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise ServerMissing(f"could not {what}: {last}")
