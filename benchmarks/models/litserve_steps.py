"""The steps of ``steps.py`` in LitServe's continuous batching loop. Its command line has the port."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import litserve
from litserve.loops.continuous_batching_loop import ContinuousBatchingLoop, Output
from litserve.utils import LitAPIStatus

_PR_SET_TIMERSLACK = 29
_MOST_ACTIVE = 64


class Steps(litserve.LitAPI):
    def setup(self, device: str) -> None:
        #: How many responses each request still gets.
        self.left: dict[str, int] = {}

    def add_request(self, uid: str, request: Any) -> None:
        self.left[uid] = int(request["n"])

    def has_capacity(self) -> bool:
        return len(self.left) < _MOST_ACTIVE

    def has_active_requests(self) -> bool:
        return bool(self.left)

    def step(self, previous: Any) -> list[Output]:
        rows = len(self.left)
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        time.sleep(2e-3 + 20e-6 * rows)
        outputs = []
        for uid in list(self.left)[:rows]:
            self.left[uid] -= 1
            outputs.append(Output(uid, {"left": self.left[uid]}, LitAPIStatus.OK))
            if not self.left[uid]:
                del self.left[uid]
                outputs.append(Output(uid, "", LitAPIStatus.FINISH_STREAMING))
        return outputs

    def encode_response(self, output: Any) -> Any:
        return output


if __name__ == "__main__":
    api = Steps(max_batch_size=_MOST_ACTIVE, stream=True, loop=ContinuousBatchingLoop())
    server = litserve.LitServer(api, accelerator="cpu", fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
