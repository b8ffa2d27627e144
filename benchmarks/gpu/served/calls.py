"""Single calls to a server over gRPC, with the bytes of a request as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from benchmarks.servers import RunningServer

_SERVICE: Final = "/inference.GRPCInferenceService/"
OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
TIMEOUT_S: Final = 30.0


class Caller:
    """Calls on one channel. Made by ``calling``."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def call(self, method: str, message: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """The answer's bytes.

        Raises:
            grpc.RpcError: the call failed.
        """
        answer: bytes = self._channel.unary_unary(_SERVICE + method)(message, timeout=timeout_s)
        return answer

    def infer(self, message: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """A ModelInfer."""
        return self.call("ModelInfer", message, timeout_s)

    def start(self, message: bytes, timeout_s: float = TIMEOUT_S) -> Any:
        """A ModelInfer whose answer is waited for later: a ``grpc.Future``."""
        return self._channel.unary_unary(f"{_SERVICE}ModelInfer").future(message, timeout=timeout_s)

    def failure(self, message: bytes, timeout_s: float = TIMEOUT_S) -> str | None:
        """The status and the text with which a ModelInfer fails; None where it does not."""
        try:
            self.infer(message, timeout_s)
        except grpc.RpcError as error:
            return status_text(error)
        return None


@contextmanager
def calling(one: RunningServer) -> Iterator[Caller]:
    """A channel to the server, while the context lasts."""
    with grpc.insecure_channel(f"127.0.0.1:{one.ports.grpc}", options=OPTIONS) as channel:
        yield Caller(channel)


def status_text(error: Any) -> str:
    """The status of a failed call, and what the server said."""
    return f"{error.code().name}: {error.details()}"
