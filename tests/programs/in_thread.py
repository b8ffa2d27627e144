"""A server that is served in a thread, and stopped by the main one; two servers in one program."""

import sys
import threading

import numpy as np
from pytriton.check.utils import find_free_port
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig

FLOATS = [Tensor(name="values", dtype=np.float32, shape=(-1,))]


@batch
def negative(values):
    return [-values]


first = Triton()
port = find_free_port()
second = Triton(config=TritonConfig(http_port=port, grpc_port=find_free_port(), allow_metrics=False))
threads = []
for triton in (first, second):
    triton.bind("Negative", negative, FLOATS, FLOATS)
    threads.append(threading.Thread(target=triton.serve, kwargs={"monitoring_period_s": 1}))
    threads[-1].start()
for url in (f"localhost:{sys.argv[1]}", f"localhost:{port}"):
    with ModelClient(url, "Negative") as client:
        print(client.infer_sample(np.ones(1, np.float32)))
print(first.stop(), second.stop())
for thread in threads:
    thread.join(30)
print([thread.is_alive() for thread in threads], first.is_alive())
