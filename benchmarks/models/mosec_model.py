"""The echo model as mosec runs it: raw bytes both ways, no v2. Its command line has the port."""

from __future__ import annotations

import numpy as np
from mosec import Server, Worker


class Echo(Worker):
    """The array of each request, answered as it came."""

    def deserialize(self, data: bytes) -> np.ndarray:
        """The FP32 array of one request."""
        return np.frombuffer(data, np.float32)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        """A batch: the array of each request."""
        return data

    def serialize(self, data: np.ndarray) -> bytes:
        """The body of one response."""
        return data.tobytes()


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1, max_batch_size=64, max_wait_time=1)
    server.run()
