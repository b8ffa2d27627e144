"""Parameters of a request, and forwarded headers, in an undecorated callable that calls a decorated one."""

import sys

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig

CONFIG = TritonConfig(http_header_forward_pattern="header.*", grpc_header_forward_pattern="header.*")
NAMES = ["flag", "Header-Two", "header_one", "name", "other", "scale"]


@batch
def scaled(values, scale):
    return {"OUTPUT_1": values * scale}


class ByParameters:
    def __call__(self, requests):
        answers = []
        for request in requests:
            print([(name, request.parameters.get(name)) for name in NAMES])
            (answer,) = scale_one(request)
            answers.append(answer)
        return answers


def scale_one(request):
    scale = np.full_like(request["values"], request.parameters.get("scale", 1))
    request["scale"] = scale
    return scaled([request])


with Triton(config=CONFIG) as triton:
    triton.bind(
        "ByParameters",
        ByParameters(),
        inputs=[Tensor(name="values", dtype=np.float32, shape=(1,))],
        outputs=[Tensor(name="OUTPUT_1", dtype=np.float32, shape=(1,))],
    )
    for url in (f"localhost:{sys.argv[1]}", f"grpc://localhost:{sys.argv[2]}"):
        with ModelClient(url, "ByParameters") as client:
            parameters = {"scale": 3, "name": "x", "flag": True}
            headers = {"header_one": "1", "other": "2"} | ({} if "grpc" in url else {"Header-Two": "3"})
            print(client.infer_sample(np.ones(1, np.float32), parameters=parameters, headers=headers))
