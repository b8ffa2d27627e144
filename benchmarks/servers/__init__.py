"""The servers that are compared: how each is had, started, asked and stopped.

Who knows what::

    server.py       what a server is, its options, and how it can be asked     ours.py    this server
    running.py      starts one, waits until it is ready, ends all of it        others.py  the peers
    certificate.py  what servers with TLS show
    floors.py       what the parts of a server cost by themselves
"""

from benchmarks.servers.floors import Nghttpd
from benchmarks.servers.others import LitServe, MLServer, Mosec, PlainTriton, PyTriton
from benchmarks.servers.ours import GpuServe
from benchmarks.servers.running import RunningServer, ServerFailed, running
from benchmarks.servers.server import (
    CHAIN,
    ECHO,
    ECHO_BYTES,
    ECHO_READ_ONLY,
    ECHO_UNBATCHED,
    EIGHT_INPUTS,
    MODELS,
    TOKENS,
    Api,
    Kind,
    Option,
    Ports,
    Server,
)

#: By name, in the order of the columns.
SERVERS: dict[str, type[Server]] = {
    one.name: one for one in (GpuServe, PyTriton, PlainTriton, Mosec, MLServer, LitServe, Nghttpd)
}

__all__ = [
    "CHAIN",
    "ECHO",
    "ECHO_BYTES",
    "ECHO_READ_ONLY",
    "ECHO_UNBATCHED",
    "EIGHT_INPUTS",
    "MODELS",
    "SERVERS",
    "TOKENS",
    "Api",
    "GpuServe",
    "Kind",
    "LitServe",
    "MLServer",
    "Mosec",
    "Nghttpd",
    "Option",
    "PlainTriton",
    "Ports",
    "PyTriton",
    "RunningServer",
    "Server",
    "ServerFailed",
    "running",
]
