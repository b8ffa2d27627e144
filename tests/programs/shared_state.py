"""One object behind two models: what one learns the other knows. It holds a lock, so it cannot be pickled."""

import sys
import threading

import numpy as np
from pytriton.client import FuturesModelClient, ModelClient
from pytriton.decorators import batch, sample
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

URL = f"localhost:{sys.argv[1]}"


class Average:
    def __init__(self):
        self.lock = threading.Lock()
        self.seen = []

    @batch
    def learn(self, value):
        with self.lock:
            self.seen.extend(value[:, 0].tolist())
            count = len(self.seen)
        return [np.full_like(value, count, dtype=np.int64)]

    @sample
    def tell(self, scale):
        with self.lock:
            return {"average": np.array([np.mean(self.seen)], np.float32) * scale}


average = Average()
triton = Triton()
triton.bind(
    "Learn",
    average.learn,
    inputs=[Tensor(name="value", dtype=np.float32, shape=(1,))],
    outputs=[Tensor(name="count", dtype=np.int64, shape=(1,))],
    config=ModelConfig(max_batch_size=8),
)
triton.bind(
    "Tell",
    average.tell,
    inputs=[Tensor(name="scale", dtype=np.float32, shape=(1,))],
    outputs=[Tensor(name="average", dtype=np.float32, shape=(1,))],
    config=ModelConfig(batching=False),
)
print(triton.is_alive(), triton.is_connected())
triton.run()
print(triton.is_alive(), triton.is_connected())
with ModelClient(URL, "Learn") as client:
    client.infer_batch(np.array([[1], [2]], np.float32))
    print(client.infer_sample(value=np.array([6], np.float32)))
with FuturesModelClient(URL, "Tell", max_workers=2) as client:
    futures = [client.infer_sample(np.array([scale], np.float32)) for scale in (1, 10)]
    print([future.result()["average"].tolist() for future in futures])
print(len(average.seen))
print(triton.stop(), triton.stop())
print(triton.is_alive(), triton.is_connected())
