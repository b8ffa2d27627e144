"""Requests as bytes, right or wrong, over one connection of each protocol, for tests of refusals.

A client's library would refuse to send most of them. No test is here, and no server is started.
"""

from __future__ import annotations

import http.client
import json
import re
import struct
from typing import Any

import grpc
import numpy as np
from operated import OperatedServer
from tritonclient.grpc import service_pb2

TIMEOUT_S = 10.0
INFER = "/inference.GRPCInferenceService/ModelInfer"
FOUR = np.arange(4, dtype=np.float32).tobytes()
DATA = [0, 1, 2, 3]


class Sender:
    """One connection of each protocol to a server, which every request of these tests goes through."""

    def __init__(self, server: OperatedServer) -> None:
        self.server = server
        self._http = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        self._channel = grpc.insecure_channel(server.addresses["gRPC"])

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def http(self, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> tuple[int, str]:
        """(status, error text or body); header names get dashes for underscores."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        self._http.request(method, path, body, named)
        answer = self._http.getresponse()
        text = answer.read().decode("utf-8", "replace")
        return answer.status, json.loads(text)["error"] if text.startswith('{"error"') else text

    def json(self, document: Any, model: str = "echo_FP32", **headers: str) -> tuple[int, str]:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.http(f"/v2/models/{model}/infer", body, **headers)

    def binary(self, entries: list[Any], raw: bytes, model: str = "echo_FP32") -> tuple[int, str]:
        head = json.dumps({"inputs": entries}).encode()
        length = str(len(head))
        return self.http(f"/v2/models/{model}/infer", head + raw, inference_header_content_length=length)

    def grpc(self, body: bytes, method: str = INFER, **options: Any) -> tuple[str, str]:
        """(status code, text)."""
        call = self._channel.unary_unary(method, lambda raw: raw, lambda raw: raw)
        try:
            call(body, timeout=TIMEOUT_S, **options)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""

    def assert_serves(self) -> None:
        """Good requests are answered."""
        assert self.grpc(message().SerializeToString()) == ("OK", "")
        assert self.json({"inputs": [entry(data=DATA)]})[0] == 200

    def batches(self) -> float:
        return self.server.metric("gpuserve_batch_size_count")


def entry(**fields: Any) -> dict[str, Any]:
    """An input of a JSON request: x, FP32, [1, 4]."""
    return {"name": "x", "datatype": "FP32", "shape": [1, 4], **fields}


def sized(nbytes: int = 16, **fields: Any) -> dict[str, Any]:
    """The same, with its data after the JSON."""
    return entry(parameters={"binary_data_size": nbytes}, **fields)


def message(name: str = "echo_FP32", *shape: int, datatype: str = "FP32", raw: bytes = FOUR) -> Any:
    made = service_pb2.ModelInferRequest(model_name=name)
    made.inputs.add(name="x", datatype=datatype, shape=shape or [1, 4])
    made.raw_input_contents.append(raw)
    return made


def frame(body: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(body)) + body


def assert_clear(text: str, named: list[str]) -> None:
    """One short sentence that names these, and nothing of the server's inside."""
    assert [word for word in named if word not in text] == []
    assert len(text) < 600
    assert not re.search(r"Traceback|\.py\b|/work|/tmp|0x[0-9a-f]{6}|\n", text)


def asking(made: Any, *outputs: str) -> Any:
    for name in outputs:
        made.outputs.add(name=name)
    return made
