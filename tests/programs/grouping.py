"""Requests of different inputs, and rows of different values, in one batch; answers of different widths."""

import sys

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import ConstantPadder, batch, group_by_keys, group_by_values
from pytriton.model_config import Tensor
from pytriton.triton import Triton


@group_by_keys
@batch
def joined(first, second=None):
    return {"joined": first if second is None else np.char.add(first.astype("S"), second.astype("S"))}


@batch
@group_by_values("length", pad_fn=ConstantPadder(-1))
def counted(length, start):
    steps = np.arange(length[0, 0], dtype=np.int32)
    return {"counted": start + steps}


BYTES = [
    Tensor(name="first", dtype=bytes, shape=(1,)),
    Tensor(name="second", dtype=bytes, shape=(1,), optional=True),
]
INTS = [Tensor(name="length", dtype=np.int32, shape=(1,)), Tensor(name="start", dtype=np.int32, shape=(1,))]

with Triton() as triton:
    triton.bind("Joined", joined, BYTES, [Tensor(name="joined", dtype=bytes, shape=(1,))])
    triton.bind("Counted", counted, INTS, [Tensor(name="counted", dtype=np.int32, shape=(-1,))])
    url = f"localhost:{sys.argv[1]}"
    with ModelClient(url, "Joined") as client:
        print(client.infer_sample(np.array([b"a"]))["joined"].tolist())
        print(client.infer_sample(np.array([b"a"]), np.array([b"b"]))["joined"].tolist())
    with ModelClient(url, "Counted") as client:
        length, start = np.array([[3], [1], [3]], np.int32), np.array([[0], [10], [20]], np.int32)
        print(client.infer_batch(length, start)["counted"].tolist())
