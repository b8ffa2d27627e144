"""Who may ask for which endpoint: the one table of both protocols, and the judgement by it.

Pure. What is not in the table is refused as if it did not exist, whatever a door could do. Where the
headers and the address are taken from a request, and how a refusal is sent, is each door's.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from gpuserve.errors import PermissionDenied, RequestError, Unavailable
from gpuserve.front.doors.access.routes import Endpoint
from gpuserve.settings.access import ADMIN, TOKEN_HEADER, AccessRule

#: Before the name of a token's header over gRPC. The name alone is taken as well.
GRPC_PREFIX: Final = "triton-grpc-protocol-"
_AUTHORIZATION: Final = b"authorization"
_BEARER: Final = b"bearer "

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]


class Kind(enum.Enum):
    """What an endpoint does to the server."""

    USE = "uses it, or asks for something"
    CONTROL = "changes it, for all its clients"
    INSIGHT = "shows what is for its operators"
    EITHER = "changes it where the request says something to change"


class Access(NamedTuple):
    """A row of the table: which group of endpoints it belongs to, and what it does."""

    group: str
    kind: Kind = Kind.USE


class Verdict(enum.Enum):
    """What becomes of a request."""

    ALLOWED = "served"
    READ_ONLY = "served as long as it changes nothing"
    NO_TOKEN = "refused: its group needs a token"
    REMOTE = "refused: it is for clients on this machine"
    UNLISTED = "refused: there is no such endpoint"


ENDPOINTS: Final[Mapping[Endpoint, Access]] = {
    Endpoint.SERVER_LIVE: Access("health"),
    Endpoint.SERVER_READY: Access("health"),
    Endpoint.SERVER_STARTED: Access("health"),
    Endpoint.MODEL_READY: Access("health"),
    Endpoint.SERVER_METADATA: Access("metadata"),
    Endpoint.MODEL_METADATA: Access("metadata"),
    Endpoint.OPENAPI: Access("metadata"),
    Endpoint.DOCS: Access("metadata"),
    Endpoint.MODEL_CONFIG: Access("model-config"),
    Endpoint.MODEL_INFER: Access("inference"),
    Endpoint.MODEL_GENERATE: Access("inference"),
    Endpoint.MODEL_GENERATE_STREAM: Access("inference"),
    Endpoint.REPOSITORY_INDEX: Access("model-repository"),
    Endpoint.REPOSITORY_NAMED: Access("model-repository"),  # always answered that there is none
    Endpoint.REPOSITORY_LOAD: Access("model-repository", Kind.CONTROL),
    Endpoint.REPOSITORY_UNLOAD: Access("model-repository", Kind.CONTROL),
    Endpoint.SYSTEM_REGION_STATUS: Access("shared-memory"),
    Endpoint.SYSTEM_REGION_REGISTER: Access("shared-memory", Kind.CONTROL),
    Endpoint.SYSTEM_REGION_UNREGISTER: Access("shared-memory", Kind.CONTROL),
    Endpoint.CUDA_REGION_STATUS: Access("shared-memory"),
    Endpoint.CUDA_REGION_REGISTER: Access("shared-memory", Kind.CONTROL),
    Endpoint.CUDA_REGION_UNREGISTER: Access("shared-memory", Kind.CONTROL),
    Endpoint.TRACE_SETTING: Access("trace"),
    Endpoint.TRACE_UPDATE: Access("trace", Kind.CONTROL),
    Endpoint.LOGGING: Access("logging"),
    Endpoint.LOGGING_UPDATE: Access("logging", Kind.CONTROL),
    Endpoint.MODEL_STATISTICS: Access("statistics"),
    Endpoint.GPUS: Access("statistics"),
    Endpoint.METRICS: Access("statistics"),  # not on the metrics port, which is never restricted
    Endpoint.ADMIN_STATUS: Access(ADMIN, Kind.INSIGHT),
    Endpoint.ADMIN_DRAIN: Access(ADMIN, Kind.CONTROL),
    Endpoint.ADMIN_RELOAD: Access(ADMIN, Kind.CONTROL),
    Endpoint.ADMIN_MODEL_LOAD: Access(ADMIN, Kind.CONTROL),
    Endpoint.ADMIN_MODEL_UNLOAD: Access(ADMIN, Kind.CONTROL),
    Endpoint.ADMIN_MODEL_RELOAD: Access(ADMIN, Kind.CONTROL),
    Endpoint.ADMIN_MODEL_SCALE: Access(ADMIN, Kind.CONTROL),
}

_V2: Final = "/inference.GRPCInferenceService/"
METHODS: Final[Mapping[str, Access]] = {
    _V2 + "ServerLive": Access("health"),
    _V2 + "ServerReady": Access("health"),
    _V2 + "ModelReady": Access("health"),
    "/grpc.health.v1.Health/Check": Access("health"),
    "/grpc.health.v1.Health/Watch": Access("health"),
    _V2 + "ServerMetadata": Access("metadata"),
    _V2 + "ModelMetadata": Access("metadata"),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Access("metadata"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access("metadata"),
    _V2 + "ModelConfig": Access("model-config"),
    _V2 + "ModelInfer": Access("inference"),
    _V2 + "ModelStreamInfer": Access("inference"),
    _V2 + "RepositoryIndex": Access("model-repository"),
    _V2 + "RepositoryModelLoad": Access("model-repository", Kind.CONTROL),
    _V2 + "RepositoryModelUnload": Access("model-repository", Kind.CONTROL),
    _V2 + "SystemSharedMemoryStatus": Access("shared-memory"),
    _V2 + "SystemSharedMemoryRegister": Access("shared-memory", Kind.CONTROL),
    _V2 + "SystemSharedMemoryUnregister": Access("shared-memory", Kind.CONTROL),
    _V2 + "CudaSharedMemoryStatus": Access("shared-memory"),
    _V2 + "CudaSharedMemoryRegister": Access("shared-memory", Kind.CONTROL),
    _V2 + "CudaSharedMemoryUnregister": Access("shared-memory", Kind.CONTROL),
    _V2 + "TraceSetting": Access("trace", Kind.EITHER),
    _V2 + "LogSettings": Access("logging", Kind.EITHER),
    _V2 + "ModelStatistics": Access("statistics"),
}


class Policy:
    """The judgement of one server. ``remote_control`` are groups that need no local client."""

    def __init__(self, rules: Iterable[AccessRule] = (), remote_control: Iterable[str] = ()) -> None:
        self._rules: dict[str, list[AccessRule]] = {}
        for rule in rules:
            for group in rule.groups:
                self._rules.setdefault(group, []).append(rule)
        self._remote_control = frozenset(remote_control)

    def is_open(self, access: Access) -> bool:
        """Whether anybody may ask for it, so that nobody has to look at who does."""
        if access.group in self._rules:
            return False
        return access.kind is Kind.USE or access.group in self._remote_control

    def judge(self, access: Access | None, headers: Headers, *, is_local: bool, prefix: str = "") -> Verdict:
        """What becomes of a request for a row of the table; None is what has no row.

        Args:
            access: the row.
            headers: the request's, names in lower case.
            is_local: whether its client is on this machine.
            prefix: what the names of the headers of tokens may have before them.
        """
        if access is None:
            return Verdict.UNLISTED
        rules = self._rules.get(access.group)
        if rules is not None:
            return Verdict.ALLOWED if _shows_token(rules, headers, prefix) else Verdict.NO_TOKEN
        if is_local or self.is_open(access):
            return Verdict.ALLOWED
        return Verdict.READ_ONLY if access.kind is Kind.EITHER else Verdict.REMOTE

    def refusal(self, access: Access, verdict: Verdict, prefix: str = "") -> RequestError:
        """What a client is told that is refused; the texts of a missing token are Triton's."""
        if verdict is not Verdict.NO_TOKEN:
            return PermissionDenied(
                f"This '{access.group}' operation is only for clients on the server's own machine, without "
                "a proxy between; the setting remote_control, or a token for the group, opens it to others"
            )
        what = "protocol" if prefix else "API"
        header = prefix + self._rules[access.group][0].header.lower()
        return Unavailable(f"This {what} is restricted, expecting header '{header}'")


def token_headers(rules: Iterable[AccessRule]) -> frozenset[str]:
    """The names, in lower case, of all headers that may carry a token: they are for the server alone."""
    rules = tuple(rules)
    names = {TOKEN_HEADER} | {rule.header.lower() for rule in rules}
    bearer = {"authorization"} if rules else set()
    return frozenset(names | {GRPC_PREFIX + name for name in names} | bearer)


def _shows_token(rules: Iterable[AccessRule], headers: Headers, prefix: str) -> bool:
    """How long it takes does not tell how much of a token was right."""
    given = tuple(headers)
    for rule in rules:
        token, name = rule.token.encode(), rule.header.lower()
        names = {name.encode(), (prefix + name).encode()}
        for key, value in given:
            if key == _AUTHORIZATION and value[: len(_BEARER)].lower() == _BEARER:
                shown = value[len(_BEARER) :].strip()
            elif key in names:
                shown = value
            else:
                continue
            if hmac.compare_digest(shown, token):
                return True
    return False
