"""The model that a second program brings to a server."""

import os
import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import RemoteTriton

URL, TOKEN = sys.argv[1:3]
FLOATS = [Tensor(name="values", dtype=np.float32, shape=(-1,))]


@batch
def remote(values):
    assert os.getpid() == PID
    return [values - 1]


PID = os.getpid()
triton = RemoteTriton(url=URL, access_token=TOKEN)
states = [triton.is_connected(), triton.is_alive()]
triton.bind("Remote", remote, FLOATS, [Tensor(name="out", dtype=np.float32, shape=(-1,))])
states.append(triton.is_alive())
with triton:
    print(*states, triton.is_connected(), triton.is_alive(), flush=True)
    sys.stdin.readline()
