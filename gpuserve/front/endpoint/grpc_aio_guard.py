"""The guard before the grpc.aio door: an interceptor, which only a server with restricted endpoints has."""

from __future__ import annotations

from typing import Any, Final

import grpc

from gpuserve.front.endpoint.restrictions import GRPC_HEADER, GRPC_REFUSAL, HTTP_HEADER, Restrictions

_NAMES: Final = frozenset({GRPC_HEADER, HTTP_HEADER})


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets through the calls that carry the access token, or need none."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's own handler, or one that refuses the call."""
        metadata = handler_call_details.invocation_metadata or ()
        given = [value.encode() for name, value in metadata if name in _NAMES and isinstance(value, str)]
        if self._restrictions.refuses_method(handler_call_details.method, given):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_requests: Any, context: Any) -> None:
    """Of whatever kind the method is: no message goes either way."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, GRPC_REFUSAL)
