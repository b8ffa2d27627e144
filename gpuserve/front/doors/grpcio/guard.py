"""The guard before the grpc.aio door: it finds the methods of calls, but only those that the policy allows.

A token is looked at before anything of the request is read; the peer is known only to a method that runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from gpuserve.errors import RequestError
from gpuserve.front.doors.access.endpoints import METHODS, Access
from gpuserve.front.doors.access.peers import grpc_address, is_local
from gpuserve.front.doors.access.restrictions import GRPC_PREFIX, Policy, Verdict
from gpuserve.front.doors.grpc.rpcs import CHANGES
from gpuserve.front.doors.grpcio.status import abort, as_status

Unary: TypeAlias = Callable[[bytes, Any], Awaitable[bytes]]
Metadata: TypeAlias = list[tuple[bytes, bytes]]


class Guard(grpc.GenericRpcHandler):  # type: ignore[misc]
    """In place of the door's own methods."""

    def __init__(self, methods: grpc.GenericRpcHandler, policy: Policy) -> None:
        self._methods = methods
        self._policy = policy
        self._open = frozenset(path for path, access in METHODS.items() if policy.is_open(access))

    def service(self, handler_call_details: Any) -> Any:
        """The method of a call; None, for what is not listed as well, is answered with UNIMPLEMENTED."""
        path = handler_call_details.method
        if path in self._open:
            return self._methods.service(handler_call_details)
        access, metadata = METHODS.get(path), _encoded(handler_call_details.invocation_metadata)
        if access is None:
            return None
        verdict = self._policy.judge(access, metadata, is_local=False, prefix=GRPC_PREFIX)
        if verdict is Verdict.NO_TOKEN:
            return _refuse(self._policy.refusal(access, verdict, GRPC_PREFIX))
        method = self._methods.service(handler_call_details)
        if verdict is Verdict.ALLOWED or method is None:
            return method
        # Every method that changes the server is unary.
        unary = self._for_local_peers(path, access, metadata, method.unary_unary)
        return grpc.unary_unary_rpc_method_handler(unary)

    def _for_local_peers(self, path: str, access: Access, metadata: Metadata, unary: Unary) -> Unary:
        async def checked(body: bytes, context: Any) -> bytes:
            local = is_local(grpc_address(context.peer()), metadata)
            async with as_status(context):
                verdict = self._policy.judge(access, metadata, is_local=local, prefix=GRPC_PREFIX)
                if verdict is Verdict.REMOTE or (verdict is Verdict.READ_ONLY and CHANGES[path](body)):
                    raise self._policy.refusal(access, Verdict.REMOTE, GRPC_PREFIX)
            return await unary(body, context)

        return checked


def _encoded(metadata: Any) -> Metadata:
    """As the headers that carried it; binary values are in no header that is looked at."""
    return [(name.encode(), value.encode()) for name, value in metadata or () if isinstance(value, str)]


def _refuse(error: RequestError) -> Any:
    """Of whatever kind the method is: no message goes either way."""

    async def refuse(_requests: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
