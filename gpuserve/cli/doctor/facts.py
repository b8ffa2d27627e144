"""What is known of a machine, this Python and a configuration before any of it is judged: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Package(NamedTuple):
    """A package that gpuserve needs. ``version`` is "" where it is not installed; ``least`` is the oldest
    that will do, "" for any.
    """

    name: str
    version: str
    least: str


class Port(NamedTuple):
    """A port that the server would listen on. ``problem`` is why it cannot, "" where it can; ``holder`` is
    who has it, as far as that can be seen; ``by_server``: a gpuserve server of this user.
    """

    role: str
    address: str
    problem: str = ""
    holder: str = ""
    by_server: bool = False


class RunningServer(NamedTuple):
    """A server of this machine, by its control socket. ``pid`` is 0 where it is another user's."""

    uid: int
    address: str
    pid: int


class ConfigProblem(NamedTuple):
    """What is wrong with the configuration; ``fatal``: no server would start with it."""

    text: str
    fatal: bool


@dataclass(frozen=True)
class Facts:
    """What was found. None and "" stand for what this machine does not tell.

    ``lacking`` are things of the kernel that there are not; ``gpus`` is the headline of ``gpuserve devices``,
    and ``gpu_notes`` what is missing there. Limits are pairs, soft and hard; -1 is none.
    """

    uid: int
    python: str
    is_supported: bool
    kernel: str
    packages: tuple[Package, ...]
    lacking: tuple[str, ...]
    gpus: str
    gpu_notes: tuple[str, ...]
    has_driver: bool
    shm_nbytes: int | None
    open_files: tuple[int, int]
    locked_nbytes: tuple[int, int]
    processors: float
    machine_processors: int
    available_nbytes: int | None
    is_overcommit_strict: bool
    commit_left_nbytes: int | None
    is_clock_synchronized: bool | None
    clock_source: str
    ports: tuple[Port, ...]
    servers: tuple[RunningServer, ...]
    max_connections: int
    config: str | None = None
    config_problems: tuple[ConfigProblem, ...] = ()
