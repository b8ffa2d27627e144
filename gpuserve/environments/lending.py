"""What an environment lacks of what a worker needs, and may have of ours: gpuserve itself, and numpy and
msgpack where they fit its Python. They are linked into a folder of their own, so that nothing else of ours
is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from gpuserve.environments.cache import made_once
from gpuserve.environments.problem import EnvironmentProblem

_LEAST: Final = (3, 11)
#: Without these no worker runs.
_NEEDED: Final = ("numpy", "msgpack")
_OURS: Final = ("gpuserve", "gpuserve_worker")
#: Libraries of a wheel, beside its package.
_BESIDE: Final = ".libs"
_PROBE: Final = """
import json, sys
from importlib.util import find_spec
missing = [name for name in %r if find_spec(name) is None]
print(json.dumps([sys.version_info[:2], sys.implementation.cache_tag, missing]))
"""
_TIMEOUT_S: Final = 60.0


class Found(NamedTuple):
    """What an interpreter says of itself. ``tag`` tells for which Python compiled modules must be made."""

    version: tuple[int, ...]
    tag: str
    missing: tuple[str, ...]


def lent_path(interpreter: str) -> str:
    """The folder to put before all else on an interpreter's path.

    Raises:
        EnvironmentProblem: the interpreter cannot run a worker, not even with what we can lend it.
    """
    found = probed(interpreter)
    check(interpreter, found, sys.implementation.cache_tag)
    sources = [source for name in (*_OURS, *found.missing) for source in _sources(name)]

    def link(folder: Path) -> None:
        for source in sources:
            (folder / source.name).symlink_to(source)

    return str(made_once("lent", sources, link))


def probed(interpreter: str) -> Found:
    """Ask an interpreter what it is."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _PROBE % (_NEEDED,)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        version, tag, missing = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"the interpreter {interpreter} cannot be run: {error}") from error
    except (ValueError, TypeError) as error:
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        raise EnvironmentProblem(f"the interpreter {interpreter} is no Python that runs: {last}") from error
    return Found(tuple(version), tag, tuple(missing))


def check(interpreter: str, found: Found, own_tag: str | None) -> None:
    """Raise ``EnvironmentProblem`` where no worker can run there."""
    version = ".".join(map(str, found.version))
    if found.version < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise EnvironmentProblem(
            f"{interpreter} is Python {version}, and workers need {least} or later: make the environment "
            f"anew with one of those, and with {' and '.join(_NEEDED)}"
        )
    if found.missing and found.tag != own_tag:
        command = f"{interpreter} -m pip install {' '.join(found.missing)}"
        raise EnvironmentProblem(
            f"{interpreter} has no {' and no '.join(found.missing)}, and those of the server, which is "
            f"another Python, do not fit: install them there ({command})"
        )


def environment_of(interpreter: str, lent: str) -> dict[str, str]:
    """The variables that a process of an interpreter has in place of ours."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    path = [lent, *filter(None, [kept.get("PYTHONPATH")])]
    programs = [os.path.dirname(interpreter), *filter(None, [kept.get("PATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PATH": os.pathsep.join(programs)}


def _sources(package: str) -> list[Path]:
    """The folders of ours that make a package."""
    spec = find_spec(package)
    assert spec is not None  # the server itself runs with it
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    beside = folder.with_name(folder.name + _BESIDE)
    return [folder, *([beside] if beside.is_dir() else [])]
