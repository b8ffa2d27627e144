"""A program that does something else after ``run()``, until SIGTERM."""

import signal
import time

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

FLOATS = [Tensor(name="x", dtype=np.float32, shape=(1,))]


def slow(requests):
    print("called", flush=True)
    time.sleep(0.5)
    return [{"x": -request["x"]} for request in requests]


with Triton() as triton:
    triton.bind("Slow", slow, FLOATS, FLOATS, config=ModelConfig(max_batch_size=4))
    triton.run()
    signal.pause()
