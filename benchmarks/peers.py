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
#: From 0.22 on uvloop makes no event loop unasked, and the inference worker of this MLServer does not start.
_MLSERVER_UVLOOP = "uvloop<0.22"
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
        """The virtual environment of PyTriton."""
        return self.folder / "pytriton"

    @property
    def mosec(self) -> Path:
        """The virtual environment of mosec."""
        return self.folder / "mosec"

    @property
    def mlserver(self) -> Path:
        """The virtual environment of MLServer."""
        return self.folder / "mlserver"

    @property
    def litserve(self) -> Path:
        """The virtual environment of LitServe."""
        return self.folder / "litserve"

    @property
    def triton(self) -> Path:
        """Plain Triton: ``bin/tritonserver`` and ``backends/python``."""
        return self.folder / "triton"

    @property
    def site_packages(self) -> Path:
        """The environment's packages, PyTriton and Triton's shared libraries among them."""
        return next((self.venv / "lib").glob("python3.*")) / "site-packages"

    def install_pytriton(self) -> None:
        """Make the environment unless it is there.

        Raises:
            ServerMissing: the interpreter is not there, or pip could not install the wheel.
        """
        self._install(self.venv, PYTRITON)

    def install_mosec(self) -> None:
        """Make the environment unless it is there.

        Raises:
            ServerMissing: as above.
        """
        self._install(self.mosec, MOSEC, "numpy")

    def install_mlserver(self) -> None:
        """Make the environment unless it is there. MLServer has no release for Python 3.13 or later.

        Raises:
            ServerMissing: as above.
        """
        self._install(self.mlserver, MLSERVER, _MLSERVER_UVLOOP)

    def add_to_mlserver(self, package: str) -> None:
        """Put what a model of its needs into the environment of MLServer.

        Raises:
            ServerMissing: pip could not install it.
        """
        pip = self.mlserver / "bin/pip"
        _run(f"install {package}", pip, "install", "--quiet", "--disable-pip-version-check", package)

    def install_litserve(self) -> None:
        """Make the environment unless it is there.

        Raises:
            ServerMissing: as above.
        """
        self._install(self.litserve, LITSERVE, "numpy")

    def _install(self, venv: Path, requirement: str, *others: str) -> None:
        stamp = venv / _INSTALLED
        if stamp.exists() and stamp.read_text() == requirement:
            return
        if not self.python.exists():
            raise ServerMissing(f"{self.python} does not exist: name another interpreter with --peer-python")
        _run("make its environment (python3-venv missing?)", self.python, "-m", "venv", "--clear", venv)
        install = ("install", "--quiet", "--disable-pip-version-check")
        _run(f"install {requirement}", venv / "bin/pip", *install, requirement, *others)
        stamp.write_text(requirement)

    def install_triton(self) -> None:
        """Copy plain Triton out of PyTriton's wheel unless that was done.

        Raises:
            ServerMissing: PyTriton cannot be had, or has no stub for the interpreter.
        """
        self.install_pytriton()
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
