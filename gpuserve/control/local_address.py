"""The addresses at which programs of the same machine reach a server by AF_UNIX: a file in
``$XDG_RUNTIME_DIR/gpuserve``, which no other user can take, and an abstract name, which other users can take
but which needs no folder.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

#: ``sun_path`` has 108 bytes, one of them for the zero byte at the end.
_MAX_PATH_NBYTES: Final = 107
_OWNER_ONLY: Final = 0o700
_OTHERS_WRITE: Final = 0o022


def local_addresses(file: str, name: bytes, *, create: bool = False) -> list[bytes]:
    """Return the addresses of this user's server in the order in which clients try them: the path of ``file``
    if the user has a runtime folder and the path is not too long, then the abstract ``name``. Servers
    ``create`` their folder.
    """
    folder = _runtime_folder(create=create)
    path = os.fsencode(os.path.join(folder, file)) if folder else b""
    return [path, name] if 0 < len(path) <= _MAX_PATH_NBYTES else [name]


def private_owner(folder: str) -> int | None:
    """Return the user who alone may enter a folder. Returns None if others may, or if the path is no folder
    but, for example, a symbolic link.
    """
    try:
        found = os.lstat(folder)
    except OSError:
        return None
    is_private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == _OWNER_ONLY
    return found.st_uid if is_private else None


def _runtime_folder(*, create: bool) -> str | None:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(base):
        return None
    folder = os.path.join(base, "gpuserve")
    try:
        found = os.stat(base)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            return None
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, _OWNER_ONLY)
    except OSError:
        return None
    return folder if private_owner(folder) == os.geteuid() else None
