"""A model that cannot go on ends the server, and the program with it."""

import numpy as np
from pytriton.decorators import batch
from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.model_config import Tensor
from pytriton.triton import Triton


@batch
def breaks(values):
    try:
        raise ValueError("the other nodes are gone")
    except ValueError as error:
        raise PyTritonUnrecoverableError("Weights are lost, no further inferences possible.") from error


with Triton() as triton:
    triton.bind(
        "Breaks",
        breaks,
        [Tensor(name="values", dtype=np.float32, shape=(1,))],
        [Tensor(name="out", dtype=np.float32, shape=(1,))],
    )
    triton.serve()
