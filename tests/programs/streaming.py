"""Decoupled models: a generator under @batch, and one over requests, read as their responses come."""

import asyncio
import sys

import numpy as np
from pytriton.client import AsyncioDecoupledModelClient, DecoupledModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

URL = f"grpc://localhost:{sys.argv[2]}"


@batch
def count(limit):
    for number in range(limit.max()):
        yield {"number": np.minimum(limit, number)}


async def words(requests):
    sentences = [request["text"][0].decode().split() for request in requests]
    for position in range(max(map(len, sentences))):
        await asyncio.sleep(0)
        yield [{"word": np.array([words[position].encode()])} for words in sentences]


async def read():
    async with AsyncioDecoupledModelClient(URL, "Words") as client:
        return [one["word"].tolist() async for one in client.infer_sample(np.array([b"streams of words"]))]


with Triton() as triton:
    triton.bind(
        "Count",
        count,
        inputs=[Tensor(name="limit", dtype=np.int32, shape=(1,))],
        outputs=[Tensor(name="number", dtype=np.int32, shape=(1,))],
        config=ModelConfig(max_batch_size=8, decoupled=True),
    )
    triton.bind(
        "Words",
        words,
        inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
        outputs=[Tensor(name="word", dtype=bytes, shape=(1,))],
        config=ModelConfig(batching=False, decoupled=True),
    )
    with DecoupledModelClient(URL, "Count") as client:
        print([one["number"].tolist() for one in client.infer_sample(np.array([3], np.int32))])
        print([one["number"].tolist() for one in client.infer_batch(np.array([[1], [2]], np.int32))])
    print(asyncio.run(read()))
    with ModelClient(URL, "Count") as client:
        try:
            client.infer_sample(np.array([3], np.int32))
        except PyTritonClientInferenceServerError as error:
            print(error.message)
