"""The model that sleeps, as mosec runs it: raw bytes of any length both ways. Its command line has the port;
the seconds of a batch are in the environment.
"""

from __future__ import annotations

import os
import time

import numpy as np
from mosec import Server, Worker

_SECONDS = float(os.environ["BATCH_SECONDS"])


class Sleeping(Worker):
    """The array of each request, answered as it came, after so many seconds a batch."""

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        time.sleep(_SECONDS)
        return data

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


if __name__ == "__main__":
    server = Server()
    server.append_worker(Sleeping, num=1, max_batch_size=64, max_wait_time=1)
    server.run()
