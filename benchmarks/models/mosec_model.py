"""The echo model as mosec runs it, without v2: raw bytes both ways at one path, and at another JSON, as its
own workers read and write it. Its command line has the port.
"""

from __future__ import annotations

import numpy as np
from mosec import Runtime, Server, Worker


class Echo(Worker):
    """The array of each request, answered as it came."""

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        return data

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


class EchoJson(Worker):
    """The list ``x`` of each request as an array, answered as the list ``y``."""

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.asarray(super().deserialize(data)["x"], np.float32)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        return data

    def serialize(self, data: np.ndarray) -> bytes:
        return super().serialize({"y": data.tolist()})


def runtime(worker: type[Worker]) -> Runtime:
    return Runtime(worker, num=1, max_batch_size=64, max_wait_time=1)


if __name__ == "__main__":
    server = Server()
    server.register_runtime({"/inference": [runtime(Echo)], "/predict": [runtime(EchoJson)]})
    server.run()
