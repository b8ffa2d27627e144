"""The smallest service: two inputs, two outputs, until Ctrl-C."""

import logging

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

logging.basicConfig(level=logging.INFO)


@batch
def add_sub(**inputs: np.ndarray):
    a, b = inputs.values()
    return {"add": a + b, "sub": a - b}


with Triton() as triton:
    triton.bind(
        model_name="AddSub",
        infer_func=add_sub,
        inputs=[
            Tensor(name="a", dtype=np.float32, shape=(-1,)),
            Tensor(name="b", dtype=np.float32, shape=(-1,)),
        ],
        outputs=[
            Tensor(name="add", dtype=np.float32, shape=(-1,)),
            Tensor(name="sub", dtype=np.float32, shape=(-1,)),
        ],
        config=ModelConfig(max_batch_size=128),
        strict=True,
    )
    triton.serve()
print("served")
