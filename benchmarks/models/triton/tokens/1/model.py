"""The tokens model as plain Triton's Python backend runs it: a sender for each request of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Numbers from 0 up to count, each a response of its own."""

    def execute(self, requests: list[Any]) -> None:
        """The requests of a batch get their responses in turn."""
        counts = [pb_utils.get_input_tensor_by_name(one, "count").as_numpy() for one in requests]
        senders = [one.get_response_sender() for one in requests]
        for number in range(max(int(count.max()) for count in counts)):
            for count, sender in zip(counts, senders, strict=True):
                token = pb_utils.Tensor("token", np.full_like(count, number))
                sender.send(pb_utils.InferenceResponse(output_tensors=[token]))
        for sender in senders:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
