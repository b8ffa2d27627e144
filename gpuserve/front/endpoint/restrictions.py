"""Which endpoints need the access token: the one table of both protocols, and the look at a token.

Pure. Where the token is taken from a request, and how one without it is refused, is in ``guards.py``. What is
no endpoint here, an unknown path or method, is refused by its door for what it is.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

from gpuserve.front.endpoint.routes import Endpoint

HTTP_HEADER: Final = "triton-access-token"
GRPC_HEADER: Final = "triton-grpc-protocol-triton-access-token"
HTTP_REFUSAL: Final = f"This API is restricted, expecting header '{HTTP_HEADER}'"
GRPC_REFUSAL: Final = f"This protocol is restricted, expecting header '{GRPC_HEADER}'"

GROUP_OF_ENDPOINT: Final[dict[Endpoint, str]] = {
    Endpoint.SERVER_LIVE: "health",
    Endpoint.SERVER_READY: "health",
    Endpoint.MODEL_READY: "health",
    Endpoint.SERVER_METADATA: "metadata",
    Endpoint.MODEL_METADATA: "metadata",
    Endpoint.MODEL_CONFIG: "model-config",
    Endpoint.MODEL_INFER: "inference",
    Endpoint.MODEL_GENERATE: "inference",
    Endpoint.MODEL_GENERATE_STREAM: "inference",
    Endpoint.REPOSITORY_INDEX: "model-repository",
    Endpoint.METRICS: "statistics",  # not on the metrics port, which is never restricted
}

_METHODS_OF_GROUP: Final[dict[str, tuple[str, ...]]] = {
    "health": ("ServerLive", "ServerReady", "ModelReady"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "model-config": ("ModelConfig",),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "shared-memory": (
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
GROUP_OF_METHOD: Final[dict[str, str]] = {
    f"/inference.GRPCInferenceService/{method}": group
    for group, methods in _METHODS_OF_GROUP.items()
    for method in methods
} | {"/grpc.health.v1.Health/Check": "health", "/grpc.health.v1.Health/Watch": "health"}


class Restrictions:
    """The restricted groups of one server, and its token. Made only where there are any."""

    def __init__(self, groups: Iterable[str], token: str) -> None:
        self._groups = frozenset(groups)
        self._token = token.encode()

    def refuses_endpoint(self, endpoint: Endpoint, given: Iterable[bytes]) -> bool:
        """Whether a request for an HTTP endpoint lacks the token. ``given``: the values of its header."""
        return GROUP_OF_ENDPOINT[endpoint] in self._groups and not self._is_known(given)

    def refuses_method(self, path: str, given: Iterable[bytes]) -> bool:
        """Whether a call of a gRPC method lacks the token. ``given``: the values of its metadata."""
        return GROUP_OF_METHOD.get(path) in self._groups and not self._is_known(given)

    def _is_known(self, given: Iterable[bytes]) -> bool:
        """How long it takes does not tell how much of the token was right."""
        return any(hmac.compare_digest(one, self._token) for one in given)


def restrictions(groups: Iterable[str], token: str | None) -> Restrictions | None:
    """The restrictions that the settings stand for; None where there are none.

    Raises:
        ValueError: restricted groups without a token, which whoever made the settings has to refuse.
    """
    closed = tuple(groups)
    if not closed:
        return None
    if token is None:
        raise ValueError("restricted endpoints without an access token")
    return Restrictions(closed, token)
