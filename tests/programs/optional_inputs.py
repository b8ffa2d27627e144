"""Inputs that may be left out: defaults for all rows, and one value for the whole batch."""

import sys

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch, fill_optionals, first_value
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton


@fill_optionals(offset=np.array([5], np.float32), mode=np.array([1], np.int32))
@batch
@first_value("mode")
def shifted(values, offset, mode):
    assert np.isscalar(mode)
    return {"shifted": (values + offset) * mode}


with Triton() as triton:
    triton.bind(
        "Shifted",
        shifted,
        inputs=[
            Tensor(name="values", dtype=np.float32, shape=(-1,)),
            Tensor(name="offset", dtype=np.float32, shape=(1,), optional=True),
            Tensor(name="mode", dtype=np.int32, shape=(1,), optional=True),
        ],
        outputs=[Tensor(name="shifted", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(max_batch_size=4),
    )
    values = np.array([[1, 2], [3, 4]], np.float32)
    with ModelClient(f"localhost:{sys.argv[1]}", "Shifted") as client:
        print(client.infer_batch(values)["shifted"].tolist())
        print(client.infer_batch(values, np.array([[0], [1]], np.float32))["shifted"].tolist())
        print(client.infer_sample(values=values[0], mode=np.array([10], np.int32))["shifted"].tolist())
