"""What PyTriton's clients refuse, wait for and leave running; and what programs read of PyTriton itself."""

import importlib.metadata
import sys
import threading

import numpy as np
from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

HTTP, GRPC = f"localhost:{sys.argv[1]}", f"grpc://localhost:{sys.argv[2]}"
X = [Tensor(name="x", dtype=np.float32, shape=(1,))]
Y = [Tensor(name="y", dtype=np.float32, shape=(1,))]
ONE = np.ones(1, np.float32)
ended = threading.Event()


def counts(requests):
    for number in range(3):
        yield [{"y": np.array([[number]], np.float32)} for _ in requests]
    ended.set()


def says_more(requests):
    return [{"more": request["x"], "y": request["x"] * 2} for request in requests]


print(importlib.metadata.version("nvidia-pytriton"))
with Triton() as triton:
    triton.bind("Counts", counts, X, Y, config=ModelConfig(decoupled=True))
    triton.run()
    triton.bind("SaysMore", says_more, X, Y, config=ModelConfig(max_batch_size=4))
    for url in (HTTP, GRPC):
        with ModelClient(url, "SaysMore", ensure_model_is_ready=False) as client:
            print(client.infer_sample(ONE))
            for name in ("timeout", "priority", "sequence_id"):
                try:
                    client.infer_sample(ONE, parameters={name: 1})
                except PyTritonClientInferenceServerError as error:
                    print(type(error).__name__, type(error).__module__.endswith("pytriton.client.exceptions"))
    with DecoupledModelClient(GRPC, "Counts") as client:
        client.infer_sample(ONE)
        print("runs to its end:", ended.wait(10))
