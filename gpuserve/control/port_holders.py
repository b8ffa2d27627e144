"""Who has a port of this machine, as far as the kernel lets us see it: a server of ours by its control
socket, another process of this user by its descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gpuserve.control.operator_client import running

#: In /proc/net/tcp: the state of a socket that listens, and the columns of its address, state and inode.
_LISTENS: Final = "0A"
_ADDRESS, _STATE, _INODE = 1, 3, 9


class Holder(NamedTuple):
    """A process that listens on a port; ``is_server``: it is a gpuserve server of this user, or of root's."""

    pid: int
    name: str
    is_server: bool

    def __str__(self) -> str:
        if self.is_server and self.pid == os.getpid():
            return "a server of this very program"
        kind = "the gpuserve server" if self.is_server else self.name
        return f"{kind}, process {self.pid}"


def holder_of(port: int) -> Holder | None:
    """Find the process that listens on a port; None where nobody does, or it is not ours to see."""
    for (_, pid), names in running().items():
        if any(one.port == port for one in names):
            return Holder(pid, "gpuserve", True)
    inodes = {
        inode
        for table in ("tcp", "tcp6")
        for inode in listening_inodes(_text(Path(f"/proc/net/{table}")), port)
    }
    found = _process_with(inodes) if inodes else None
    if found is None:
        return None
    return Holder(found, _text(Path(f"/proc/{found}/comm")).strip() or "a process", False)


def listening_inodes(table: str, port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port, in the text of /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        columns = line.split()
        listens = len(columns) > _INODE and columns[_STATE] == _LISTENS
        if listens and int(columns[_ADDRESS].rpartition(":")[2], 16) == port:
            yield columns[_INODE]


def _process_with(inodes: set[str]) -> int | None:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and any(one in wanted for one in _open_files(folder / "fd")):
            return int(folder.name)
    return None


def _open_files(folder: Path) -> Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:  # another user's, or it has just ended
        return
    for name in names:
        try:
            yield os.readlink(folder / name)
        except OSError:
            continue


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
