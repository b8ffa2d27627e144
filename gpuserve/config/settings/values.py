"""Values and readers of single settings: URLs, access rules, the number of ingress processes."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from gpuserve.devices.placement import n_processors
from gpuserve.model.options import option, required

#: Text in place of a value that must not reach a terminal or a log.
MASK: Final = "********"
_USERINFO: Final = re.compile(r"""(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/?#"'<>]*@""")


def mask_userinfo(text: str) -> str:
    """Return a text with the user name and the password of each URL masked."""
    return _USERINFO.sub(rf"\1{MASK}@", text) if "://" in text else text


ADMIN: Final = "admin"
DASHBOARD: Final = "dashboard"
#: Groups of endpoints that can be restricted. All but two are Triton's.
EndpointGroup: TypeAlias = Literal[
    "admin", "dashboard", "health", "inference", "logging", "metadata", "model-config", "model-repository",
    "shared-memory", "statistics", "trace",
]  # fmt: skip
ENDPOINT_GROUPS: Final[tuple[str, ...]] = get_args(EndpointGroup)
#: The groups whose operations change the server, or show data for its operators. Without a token only clients
#: on the same machine may use them.
ControlGroup: TypeAlias = Literal["admin", "logging", "model-repository", "shared-memory", "trace"]
CONTROL_GROUPS: Final[tuple[str, ...]] = get_args(ControlGroup)
NO_TOKEN: Final = "restricted_endpoints need an access_token: without a token nobody can use them"
TOKEN_HEADER: Final = "triton-access-token"
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CASE_COUNTS: Final = "(?-i)"


def header_pattern(text: str) -> re.Pattern[str]:
    """Return a pattern that ignores case unless it begins with ``(?-i)``; raise ValueError if it is none."""
    try:
        if text.startswith(_CASE_COUNTS):
            return re.compile(text.removeprefix(_CASE_COUNTS))
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"expected a regular expression, given {text!r}: {error}") from None


def read_pattern(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected a regular expression, given {text!r:.200}")
    header_pattern(text)
    return text


def read_token(token: Any) -> str:
    """Return an access token; raise ValueError if no header can carry it. No message shows the token."""
    if not isinstance(token, str) or not token:
        raise ValueError("expected a string that is not empty")
    if not token.isascii() or not token.isprintable() or token != token.strip():
        raise ValueError("expected printable ASCII without spaces at its ends, because a header carries it")
    return token


def read_header(header: Any) -> str:
    if not isinstance(header, str) or _HEADER_NAME.fullmatch(header) is None:
        raise ValueError(f"expected a header's name of letters, digits, '.', '_' and '-', given {header!r}")
    if header.lower() == "authorization" or header.lower().endswith("-bin"):
        why = "Authorization carries 'Bearer' tokens, '-bin' marks binary metadata"
        raise ValueError(f"the header cannot be {header!r}: {why}")
    return header


@dataclass(frozen=True, slots=True)
class AccessRule:
    """An access token, and the groups of endpoints that need it. Clients send the token as ``Authorization:
    Bearer …`` or as the value of ``header``, which over gRPC has the prefix "triton-grpc-protocol-".
    """

    groups: tuple[str, ...] = required(
        "Groups of endpoints that need the token.", words=ENDPOINT_GROUPS, some=True
    )
    token: str = required("The access token.", read=read_token, secret=True)
    header: str = option(
        TOKEN_HEADER, "Header that carries the token, besides Authorization.", read=read_header
    )


AUTO: Final = "auto"
#: One ingress process for this many processors keeps a scheduler busy; more than eight brought no gain.
_PROCESSORS_OF_INGRESS: Final = 4
_MOST_BY_ITSELF: Final = 8
#: File descriptors in the front for each ingress process: IPC channel, process, shared memory.
DESCRIPTORS_PER_INGRESS: Final = 64


def read_ingress_processes(value: Any) -> Any:
    """Return the number that ``auto`` stands for on this machine; return any other value unchanged."""
    return auto_ingress_processes(n_processors()) if value == AUTO else value


def auto_ingress_processes(processors: float) -> int:
    return max(1, min(_MOST_BY_ITSELF, int(processors // _PROCESSORS_OF_INGRESS)))


def ingress_processes_problem(processes: Any, transport: Any) -> str | None:
    """Return why a server cannot have this many ingress processes, or None."""
    processes = read_ingress_processes(processes)
    if not isinstance(processes, int) or processes <= 1:
        return None
    if transport == "grpcio":
        return f"ingress_processes: transport grpcio has none, expected 1, got {processes}"
    _, most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, most_descriptors // DESCRIPTORS_PER_INGRESS)
    if most_descriptors != resource.RLIM_INFINITY and processes > most:
        return (
            f"ingress_processes: a process may have {most_descriptors} open files (RLIMIT_NOFILE), of which "
            f"each ingress process takes {DESCRIPTORS_PER_INGRESS}: expected at most {most}, got {processes}"
        )
    return None
