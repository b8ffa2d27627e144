"""An open-loop load on two servers, of which one leaves: unary and streaming requests over both protocols.

The clients are what one finds in front of a Kubernetes Service. HTTP/1.1 connections are kept; a new one goes
to a server that was ready a moment ago. A gRPC channel has both addresses and asks for their health.
"""

from __future__ import annotations

import collections
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence

import grpc
from processes import wait_until
from tritonclient.grpc import service_pb2

TIMEOUT_S = 10.0
#: How late the clients hear that a server is not ready any more.
PROPAGATION_S = 0.3
_PERIOD_S = 0.02
_POLICY = json.dumps({
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "readiness"},
})  # fmt: skip
_BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]})


class Endpoints:
    """Which servers were ready a propagation time ago, by ``host:port`` of HTTP."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._ready = list(addresses)
        self._n_given = 0

    def follow(self, ended: threading.Event) -> None:
        """Ask for their readiness until it is over."""
        while not ended.wait(0.05):
            ready = [one for one in self._addresses if _is_ready(one)]
            ended.wait(PROPAGATION_S)
            self._ready = ready

    def next(self) -> str:
        """Where a new connection goes."""
        self._n_given += 1
        return self._ready[self._n_given % len(self._ready)]


def _is_ready(address: str) -> bool:
    client = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        client.request("GET", "/v2/health/ready")
        return client.getresponse().status == 200
    except OSError:
        return False
    finally:
        client.close()


class SteadyLoad:
    """Runs while it is entered; ``outcomes`` counts what became of the requests of each kind.

    Without ``by_health`` the clients send to servers that are not ready, too.
    """

    def __init__(
        self, http_addresses: Sequence[str], grpc_addresses: Sequence[str], *, by_health: bool = True
    ) -> None:
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self._endpoints = Endpoints(http_addresses)
        policy = [("grpc.service_config", _POLICY)] if by_health else []
        self._channel = grpc.insecure_channel(
            "ipv4:" + ",".join(grpc_addresses), options=[*policy, ("grpc.use_local_subchannel_pool", 1)]
        )
        call = "/inference.GRPCInferenceService/"
        self._unary = self._channel.unary_unary(call + "ModelInfer")
        self._stream = self._channel.stream_stream(call + "ModelStreamInfer")
        self._ended = threading.Event()
        #: The connections of each HTTP client.
        self._kept: list[list[http.client.HTTPConnection]] = []
        kinds = [self._http("infer"), self._http("generate_stream"), self._ask_unary, self._ask_stream]
        kinds += [self._http("infer"), self._http("generate_stream"), self._ask_unary, self._ask_stream]
        self._threads = [threading.Thread(target=self._run, args=(ask,)) for ask in kinds]
        if by_health:
            self._threads.append(threading.Thread(target=self._endpoints.follow, args=(self._ended,)))

    def __enter__(self) -> SteadyLoad:
        grpc.channel_ready_future(self._channel).result(TIMEOUT_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        self._channel.close()
        for connection in itertools.chain(*self._kept):
            connection.close()

    def n_answered(self) -> int:
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome == "ok")

    def wait_answers(self, count: int) -> None:
        """Wait until so many more requests are answered."""
        enough = self.n_answered() + count
        wait_until(lambda: self.n_answered() >= enough, f"{count} more requests are answered")

    def lost(self) -> dict[tuple[str, str], int]:
        """What was not answered, and why."""
        return {kind: count for kind, count in self.outcomes.items() if kind[1] != "ok"}

    def _run(self, ask: Callable[[], tuple[str, str]]) -> None:
        due = time.monotonic()
        while not self._ended.is_set():
            self.outcomes[ask()] += 1
            due += _PERIOD_S
            time.sleep(max(0.0, due - time.monotonic()))

    def _http(self, verb: str) -> Callable[[], tuple[str, str]]:
        kept: list[http.client.HTTPConnection] = []
        self._kept.append(kept)
        body = _BODY if verb == "infer" else json.dumps({"x": [[3.0]]})

        def ask() -> tuple[str, str]:
            connection = (
                kept.pop() if kept else http.client.HTTPConnection(self._endpoints.next(), timeout=TIMEOUT_S)
            )
            try:
                connection.request("POST", f"/v2/models/m/{verb}", body)
                response = connection.getresponse()
                text = response.read()
            except (OSError, http.client.HTTPException) as error:
                return verb, f"{type(error).__name__} {error}"
            if connection.sock is None:  # the answer said that it is the last
                connection.close()
            else:
                kept.append(connection)
            good = response.status == 200 and b"6.0" in text
            return verb, "ok" if good else f"{response.status} {text[:100]!r}"

        return ask

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._endpoints.next(), timeout=TIMEOUT_S)

    def _ask_unary(self) -> tuple[str, str]:
        try:
            answer = service_pb2.ModelInferResponse.FromString(self._unary(message(), timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            return "ModelInfer", f"{error.code()} {error.details()}"
        return "ModelInfer", "ok" if answer.raw_output_contents else "empty"

    def _ask_stream(self) -> tuple[str, str]:
        try:
            parts = list(self._stream(iter([message(), message()]), timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            return "ModelStreamInfer", f"{error.code()} {error.details()}"
        answers = [service_pb2.ModelStreamInferResponse.FromString(part) for part in parts]
        bad = [one.error_message for one in answers if one.error_message]
        return "ModelStreamInfer", "ok" if len(answers) == 2 and not bad else f"{len(answers)} {bad}"


def message() -> bytes:
    """A request for the model ``m``, serialised."""
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\0\0\x40\x40"])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    body: bytes = request.SerializeToString()
    return body
