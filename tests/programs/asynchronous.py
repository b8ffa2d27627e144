"""Coroutines as inference callables, asked with asyncio clients over both protocols."""

import asyncio
import sys

import numpy as np
from pytriton.client import AsyncioModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

HTTP, GRPC = sys.argv[1:3]


@batch
async def double(values):
    await asyncio.sleep(0)
    return {"doubled": 2 * values}


async def one_by_one(requests):
    await asyncio.sleep(0)
    return [{"doubled": 2 * request["values"]} for request in requests]


async def ask():
    for url in (f"http://localhost:{HTTP}", f"grpc://localhost:{GRPC}"):
        for model in ("Double", "OneByOne"):
            async with AsyncioModelClient(url, model, lazy_init=False) as client:
                config = await client.model_config
                inputs = [np.full(2, number, np.int32) for number in range(3)]
                answers = await asyncio.gather(*map(client.infer_sample, inputs))
                print(config.model_name, [one["doubled"].tolist() for one in answers])


with Triton() as triton:
    for name, function in {"Double": double, "OneByOne": one_by_one}.items():
        triton.bind(
            model_name=name,
            infer_func=function,
            inputs=[Tensor(name="values", dtype=np.int32, shape=(-1,))],
            outputs=[Tensor(name="doubled", dtype=np.int32, shape=(-1,))],
            config=ModelConfig(max_batch_size=4),
        )
    asyncio.run(ask())
