"""A list of callables is as many instances of one model; the wrapper object is called itself."""

import sys
import threading

import numpy as np
from pytriton.client import FuturesModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

BOTH = threading.Barrier(2, timeout=30)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    @batch
    def __call__(self, **inputs):
        (values,) = inputs.values()
        BOTH.wait()  # only two instances at the same time get past it
        return [values * self.scale]


with Triton() as triton:
    triton.bind(
        model_name="Scaled",
        infer_func=[Scaled(10), Scaled(100)],
        inputs=[Tensor(dtype=np.float32, shape=(-1,))],
        outputs=[Tensor(dtype=np.float32, shape=(-1,))],
        config=ModelConfig(max_batch_size=1),
    )
    with FuturesModelClient(f"localhost:{sys.argv[1]}", "Scaled") as client:
        futures = [client.infer_sample(np.ones(1, np.float32)) for _ in range(2)]
        print(sorted(future.result()["OUTPUT_1"].tolist() for future in futures))
