"""The echo model as LitServe runs it: a JSON object with the list ``x``, answered with one of the list ``y``.

Its command line has the port.
"""

from __future__ import annotations

import sys

import litserve
import numpy as np


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        """Do nothing, as there is nothing to load."""

    def decode_request(self, request):  # type: ignore[no-untyped-def] # a type would make it a query parameter
        return np.asarray(request["x"], np.float32)

    def batch(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Unmerged: lengths differ, and nothing would be gained."""
        return inputs

    def predict(self, x: list[np.ndarray]) -> list[np.ndarray]:
        return x

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> dict[str, list[float]]:
        return {"y": output.tolist()}


if __name__ == "__main__":
    # fast_queue is what its documentation advises for more than a hundred requests a second.
    server = litserve.LitServer(Echo(max_batch_size=64), accelerator="cpu", fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
