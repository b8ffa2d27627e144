"""What PyTriton passes on as it is given: outputs with rows of their own, casts, one yield, all lines."""

import asyncio
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch, triton_context
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonSecurityConfig

URL = f"localhost:{sys.argv[1]}"
X = [Tensor(name="x", dtype=np.float32, shape=(-1,))]
WORDS = [Tensor(name="y", dtype=bytes, shape=(-1,))]
Y = [Tensor(name="y", dtype=np.float32, shape=(-1,))]
TOKEN = "token"


def answers(value):
    return lambda requests: [{"y": value} for _ in requests]


def loss(requests):
    return [{"y": np.array([[request["x"].sum()]])} for request in requests]


def one_yield(requests):
    yield [{"y": request["x"] * 2} for request in requests]


def two_yields(requests):
    yield [{"y": request["x"]} for request in requests]
    yield [{"y": request["x"]} for request in requests]


def nothing(requests):
    return [{} for _ in requests]


def raises(requests):
    raise ValueError("first line\n  second line")


def in_event_loop(requests):
    async def double(request):
        await asyncio.sleep(0)
        return {"y": request["x"] * 2}

    loop = asyncio.get_event_loop()
    return [loop.run_until_complete(double(request)) for request in requests]


@triton_context
def configured(requests, triton_context):
    (config,) = triton_context.model_configs.values()
    return [{"y": np.array([[config.model_name.encode()]])} for _ in requests]


@batch
def too_few(x):
    return {"y": x[:1]}


class Overlap:
    """How many batches are under way at once, at most; each waits until a second one might have begun."""

    def __init__(self):
        self.under_way = 0
        self.most = 0

    async def infer(self, requests):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(20):
            await asyncio.sleep(0.001)
        self.under_way -= 1
        return [{"y": request["x"]} for request in requests]


MODELS = {
    "Loss": (loss, Y),
    "ZeroD": (answers(np.array(5, np.float32)), Y),
    "Nothing": (nothing, Y),
    "Parsed": (answers(np.array([["1.5"]])), Y),
    "Spelled": (answers(np.array([[1.5]], np.float32)), WORDS),
    "None": (answers(np.array([[b"x", None]], object)), WORDS),
    "OneYield": (one_yield, Y),
    "TwoYields": (two_yields, Y),
    "Raises": (raises, Y),
    "EventLoop": (in_event_loop, Y),
    "Configured": (configured, WORDS),
    "TooFew": (too_few, Y),
}


def ask(name, rows=64):
    with ModelClient(URL, name) as client:
        try:
            return {
                key: one.tolist() for key, one in client.infer_batch(np.ones((rows, 1), np.float32)).items()
            }
        except Exception as error:
            return error.message.partition("Message: ")[2]


def is_ready(name):
    try:
        with urllib.request.urlopen(f"http://{URL}/v2/models/{name}/ready"):
            return True
    except urllib.error.HTTPError:
        return False


overlap = Overlap()
delayed = DynamicBatcher(max_queue_delay_microseconds=200_000)
with Triton(security_config=TritonSecurityConfig(access_token=TOKEN)) as triton:
    for name, (infer, outputs) in MODELS.items():
        triton.bind(name, infer, X, outputs, config=ModelConfig(max_batch_size=64))
    triton.bind("Merged", loss, X, Y, config=ModelConfig(max_batch_size=64, batcher=delayed))
    triton.bind("Overlap", overlap.infer, X, Y, config=ModelConfig(batching=False))
    triton.bind("StrictLoss", loss, X, Y, config=ModelConfig(max_batch_size=64), strict=True)
    for name in [*MODELS, "StrictLoss"]:
        print(name, ask(name, 2 if name in ("OneYield", "EventLoop") else 64))

    merged = [None] * 2
    threads = [
        threading.Thread(target=lambda rows=rows: merged.__setitem__(rows // 63, ask("Merged", rows)))
        for rows in (1, 63)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("Merged", merged)

    def ask_overlap():
        with ModelClient(URL, "Overlap") as client:
            client.infer_sample(np.ones(1, np.float32))

    threads = [threading.Thread(target=ask_overlap) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("Overlap", overlap.most)

    with ModelClient(URL, "Loss", access_token=TOKEN) as client:
        client.unload_model()
        print("unloaded", is_ready("Loss"))
        client.load_model()
    print("loaded", ask("Loss", 2))
