"""A server with a model of its own, and a second program that brings another one and goes again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton

URL = f"localhost:{sys.argv[1]}"
FLOATS = [Tensor(name="values", dtype=np.float32, shape=(-1,))]


@batch
def own(values):
    return [values + 1]


with Triton() as triton:
    triton.bind("Own", own, FLOATS, [Tensor(name="out", dtype=np.float32, shape=(-1,))])
    second = [sys.executable, Path(__file__).with_name("remote_service.py"), URL, triton.get_access_token()]
    with subprocess.Popen(second, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        print(service.stdout.readline().strip())
        for name in ("Own", "Remote"):
            with ModelClient(URL, name) as client:
                print(client.infer_sample(np.zeros(2, np.float32))["out"].tolist())
        service.communicate("end\n")
    print(service.returncode)
    with ModelClient(URL, "Own") as client:
        print(client.infer_sample(np.zeros(2, np.float32))["out"].tolist())
    with ModelClient(URL, "Remote", init_timeout_s=1) as client:
        try:
            client.infer_sample(np.zeros(2, np.float32))
        except PyTritonClientError as error:
            print(type(error).__name__)
