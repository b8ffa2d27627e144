"""An environment made of what an interpreter has, for machines without a network.

``PYTHON -m benchmarks.gpu.running.environment FOLDER [WHEELS]`` makes FOLDER and prints its interpreter.
It sees this checkout, the packages of PYTHON, and those of the wheels in the folder WHEELS. Nothing is
written to PYTHON's own folders, and nothing is fetched.
"""

from __future__ import annotations

import re
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Final

from benchmarks.gpu import ROOT

_LOOK: Final = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
"""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class EnvironmentMissing(Exception):
    """The environment cannot be made; the text says what is missing."""


def make(folder: Path, wheels: Path | None) -> Path:
    """The interpreter of a new environment in this folder. Raises EnvironmentMissing: the server needs a
    package that is in none of its places.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(folder)
    places = [_install(wheels, folder / "wheels")] if wheels is not None else []
    user = [Path(site.getusersitepackages())] if site.ENABLE_USER_SITE else []
    places += [*map(Path, site.getsitepackages()), *user, ROOT]
    bases = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", scheme="venv", vars=bases))
    # cuda-pathfinder looks for CUDA's libraries in the places of ``site`` alone, not in all of ``sys.path``.
    lines = [f"import site; site.PREFIXES.append({sys.prefix!r})"]
    # By addsitedir, because a .pth file of those places would not be read otherwise.
    lines += [f"import site; site.addsitedir({str(place)!r})" for place in places]
    (own / "gpu_check.pth").write_text("\n".join(lines) + "\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # A checkout has no metadata, and ``gpuserve version`` asks for it.
    version = project["version"]
    metadata = own / f"gpuserve-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: gpuserve\nVersion: {version}\n")
    python, command = folder / "bin/python", folder / "bin/gpuserve"
    command.write_text(f"#!{python}\nfrom gpuserve.cli import main\n\nmain()\n")
    command.chmod(0o755)
    names = [match[0] for one in project["dependencies"] if (match := _NAME.match(one))]
    look = [str(python), "-c", _LOOK, *names]
    if missing := subprocess.run(look, capture_output=True, text=True, check=True).stdout.split():
        raise EnvironmentMissing(
            f"{sys.executable} lacks {', '.join(missing)}: expected them there, or as wheels in --wheels DIR"
        )
    return python


def _install(wheels: Path, target: Path) -> Path:
    """Each package once, as the wheel that fits: the folder may have those of several Pythons."""
    names = sorted({file.name.partition("-")[0] for file in wheels.glob("*.whl")})
    if not names:
        raise EnvironmentMissing(f"there are no wheels in {wheels}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    places = ["--find-links", str(wheels), "--target", str(target)]
    done = subprocess.run([*pip, *places, *names], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentMissing(f"the wheels cannot be installed: {done.stderr.strip()[-500:]}")
    return target


def main(folder: str, wheels: str | None = None) -> int:
    try:
        print(make(Path(folder).absolute(), None if wheels is None else Path(wheels)))
    except EnvironmentMissing as error:
        print(f"scripts/gpu_check: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
