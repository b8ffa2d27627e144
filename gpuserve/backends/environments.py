"""Python environments of models: find or unpack an interpreter, make gpuserve importable in it, and run a
process in it.

``python -m gpuserve.backends.environments ENVIRONMENT BOOT_FD LINK_FD`` is a worker process in an
environment. The process replaces itself (``execve``), so it keeps its process id and its file descriptors,
and the supervisor waits neither for the unpacking nor for the interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

_EXPECTED: Final = "an interpreter, a folder with bin/python in it, or a .tar.gz of such a folder"
_IN_FOLDER: Final = "bin/python"
_MIN_VERSION: Final = (3, 11)
#: A worker does not run without these packages.
_REQUIRED: Final = ("numpy", "msgpack")
_OWN_PACKAGES: Final = ("gpuserve", "gpuserve_worker")
#: Suffix of the folder in which a wheel keeps its shared libraries, beside its package.
_LIBRARIES: Final = ".libs"
_PROBE: Final = """
import json, sys
from importlib.util import find_spec
missing = [name for name in %r if find_spec(name) is None]
print(json.dumps([sys.version_info[:2], sys.implementation.cache_tag, missing]))
"""
_PROBE_TIMEOUT_S: Final = 60.0


class EnvironmentProblem(Exception):
    """The reason why no worker can run in an environment. The text is one sentence that says what to do."""


class InterpreterInfo(NamedTuple):
    """An interpreter's version, the cache tag of its compiled modules, and the required packages it lacks."""

    version: tuple[int, ...]
    tag: str
    missing: tuple[str, ...]


def exec_in_environment(environment: str, module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``python -m module`` in an environment; raise EnvironmentProblem."""
    interpreter = find_interpreter(environment)
    variables = environment_variables(interpreter, link_packages(interpreter))
    try:
        os.execve(interpreter, [interpreter, "-P", "-m", module, *arguments], variables)
    except OSError as error:
        raise EnvironmentProblem(f"the interpreter {interpreter} cannot be run: {error.strerror}") from error


def main() -> int:
    """Become a worker in an environment. Report to the supervisor as a failed load if that is impossible."""
    environment, *fds = sys.argv[1:]
    try:
        exec_in_environment(environment, "gpuserve_worker", fds)
    except EnvironmentProblem as problem:
        from gpuserve_worker.execution.lifecycle import EXIT_FAILED
        from gpuserve_worker.protocol.link import Link  # only now: the import would delay every worker
        from gpuserve_worker.protocol.wire import LoadFailed

        Link.from_fd(int(fds[0])).send(LoadFailed(str(problem), ""))
        return EXIT_FAILED


def find_interpreter(path: str) -> str:
    """Return the interpreter of an environment: an interpreter itself, a folder, or a packed folder, which is
    unpacked once. Raise EnvironmentProblem if there is no interpreter.
    """
    place = Path(os.path.abspath(path))
    if not place.is_dir():
        if not place.is_file():
            raise EnvironmentProblem(f"the Python environment {path!r} does not exist: expected {_EXPECTED}")
        if os.access(place, os.X_OK) and not tarfile.is_tarfile(place):
            return str(place)
        place = _unpacked_archive(place)
    interpreter = place / _IN_FOLDER
    if not os.access(interpreter, os.X_OK):
        raise EnvironmentProblem(
            f"the Python environment {path!r} has no {_IN_FOLDER} that can be run: expected {_EXPECTED}"
        )
    return str(interpreter)


def _unpacked_archive(archive: Path) -> Path:
    """Return the cached folder of an archive. A changed archive gets another folder."""
    status = archive.stat()

    def unpack(folder: Path) -> None:
        # An environment contains links that lead out of it, to the interpreter that created it.
        as_tar: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        try:
            with tarfile.open(archive) as opened:
                # The archive is an interpreter that the operator names: the server runs it anyway.
                opened.extractall(folder, **as_tar)  # nosec B202
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise EnvironmentProblem(
                f"the Python environment {str(archive)!r} cannot be unpacked ({error}): expected {_EXPECTED}"
            ) from error

    return cached_folder("unpacked", (str(archive), status.st_mtime_ns, status.st_size), unpack)


def probe_interpreter(interpreter: str) -> InterpreterInfo:
    """Return the version, cache tag and missing packages of an interpreter; raise EnvironmentProblem."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _PROBE % (_REQUIRED,)],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        version, tag, missing = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"the interpreter {interpreter} cannot be run: {error}") from error
    except (ValueError, TypeError) as error:
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        raise EnvironmentProblem(f"the interpreter {interpreter} does not run as Python: {last}") from error
    return InterpreterInfo(tuple(version), tag, tuple(missing))


def check_interpreter(interpreter: str, found: InterpreterInfo, own_tag: str | None) -> None:
    """Raise EnvironmentProblem if the interpreter is too old, or lacks packages that ours cannot lend."""
    version = ".".join(map(str, found.version))
    if found.version < _MIN_VERSION:
        least = ".".join(map(str, _MIN_VERSION))
        raise EnvironmentProblem(
            f"{interpreter} is Python {version}, and workers need {least} or later: make the environment "
            f"anew with one of those, and with {' and '.join(_REQUIRED)}"
        )
    if found.missing and found.tag != own_tag:
        command = f"{interpreter} -m pip install {' '.join(found.missing)}"
        raise EnvironmentProblem(
            f"{interpreter} has no {' and no '.join(found.missing)}, and those of the server, which is "
            f"another Python, do not fit: install them there ({command})"
        )


def link_packages(interpreter: str) -> str:
    """Return a folder for the front of an interpreter's import path.

    The folder has links to gpuserve's packages, and to numpy and msgpack if the environment lacks them and
    ours fit its Python. Nothing else of the server's environment is importable through the folder. Raise
    EnvironmentProblem if the interpreter cannot run a worker, even with these packages.
    """
    found = probe_interpreter(interpreter)
    check_interpreter(interpreter, found, sys.implementation.cache_tag)
    sources = [source for name in (*_OWN_PACKAGES, *found.missing) for source in _package_folders(name)]

    def link(folder: Path) -> None:
        for source in sources:
            (folder / source.name).symlink_to(source)

    return str(cached_folder("linked", sources, link))


def environment_variables(interpreter: str, packages: str) -> dict[str, str]:
    """Return our environment variables with PATH and PYTHONPATH changed for an interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    path = [packages, *filter(None, [kept.get("PYTHONPATH")])]
    programs = [os.path.dirname(interpreter), *filter(None, [kept.get("PATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PATH": os.pathsep.join(programs)}


def _package_folders(package: str) -> list[Path]:
    """Return the folders of a server's package and of its shared libraries, if there are any."""
    spec = find_spec(package)
    assert spec is not None  # the server itself runs with it
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    libraries = folder.with_name(folder.name + _LIBRARIES)
    return [folder, *([libraries] if libraries.is_dir() else [])]


def cached_folder(kind: str, identity: Any, fill: Callable[[Path], None]) -> Path:
    """Return the folder of ``identity``, filled by ``fill`` if new; raise EnvironmentProblem or its error."""
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuserve" / "environments"
    folder = cache / kind / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock if the process dies
            if not folder.is_dir():
                _fill(folder, fill)
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder.parent} cannot be used as a cache ({error.strerror}): "
            "set XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary folder and rename it, so that no process sees a folder that is half full."""
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        fill(new)
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
