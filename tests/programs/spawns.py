"""Children of the program find pytriton as well: a spawned process asks the server."""

import multiprocessing
import sys

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton

FLOATS = [Tensor(name="values", dtype=np.float32, shape=(-1,))]


@batch
def negative(values):
    return [-values]


def ask(url, answers):
    from pytriton.model_config.common import QueuePolicy

    with ModelClient(url, "Negative") as client:
        answers.put((client.infer_sample(np.ones(1, np.float32))["values"].tolist(), QueuePolicy()))


if __name__ == "__main__":
    with Triton() as triton:
        triton.bind("Negative", negative, FLOATS, FLOATS)
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        child = context.Process(target=ask, args=(f"localhost:{sys.argv[1]}", answers))
        child.start()
        print(*answers.get(timeout=60))
        child.join()
