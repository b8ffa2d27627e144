"""The same with PyTriton: one batch of a coroutine at once, protected endpoints, metrics, warm-ups."""

import asyncio
import os
import sys
import urllib.error
import urllib.request

import numpy as np
from pytriton.client import FuturesModelClient, ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import Triton, TritonSecurityConfig

URL = f"http://localhost:{sys.argv[1]}"
METRICS = f"http://localhost:{os.environ['PYTRITON_TRITON_CONFIG_METRICS_PORT']}/metrics"
TOKEN = "secret"
OPEN = ("/v2/health/ready", "/v2/models/Count", "/v2/models/Count/config")
PROTECTED = ("/v2/models/stats", "/v2/trace/setting", "/v2/logging", "/v2/systemsharedmemory/status")
COUNTERS = (
    "request_success", "request_failure", "count", "exec_count", "request_duration_us", "queue_duration_us",
    "compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us",
)  # fmt: skip

running = most = 0


async def count(requests):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.02)
    running -= 1
    return [{"most": np.full((1, 1), most, np.int32)} for _ in requests]


WARM = []


@batch
def warm(x):
    WARM.append(x.tolist())
    return {"y": x}


def status(path, headers):
    try:
        with urllib.request.urlopen(
            urllib.request.Request(URL + path, headers=headers), timeout=20
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


with Triton(security_config=TritonSecurityConfig(access_token=TOKEN)) as triton:
    triton.bind(
        "Count",
        count,
        inputs=[Tensor(name="x", dtype=np.float32, shape=(1,))],
        outputs=[Tensor(name="most", dtype=np.int32, shape=(1,))],
        config=ModelConfig(max_batch_size=1),
    )
    triton.bind(
        "Warm",
        warm,
        inputs=[Tensor(name="x", dtype=np.float32, shape=(1,))],
        outputs=[Tensor(name="y", dtype=np.float32, shape=(1,))],
        config=ModelConfig(
            model_warmup=[
                ModelWarmup(
                    "w", batch_size=2, inputs={"x": WarmupInput(np.float32, (1,), zero_data=True)}, count=2
                )
            ]
        ),
    )
    with FuturesModelClient(URL, "Count", max_workers=4) as client:
        futures = [client.infer_sample(np.zeros(1, np.float32)) for _ in range(8)]
        print(max(future.result()["most"].item() for future in futures))
    for paths, headers in ((OPEN, {}), (PROTECTED, {}), (PROTECTED, {"triton-access-token": TOKEN})):
        print([status(path, headers) for path in paths])
    with urllib.request.urlopen(METRICS, timeout=20) as page:
        lines = page.read().decode().splitlines()
    found = {line.partition("{")[0] for line in lines if 'model="Count"' in line}
    print([name for name in COUNTERS if f"nv_inference_{name}" not in found])
    print([line for line in lines if line.startswith('nv_inference_request_success{model="Count"')])
    with ModelClient(URL, "Count", access_token=TOKEN) as client:
        client.unload_model()
        print(status("/v2/models/Count/ready", {}) == 200)
    with ModelClient(URL, "Warm") as client:
        client.infer_sample(np.ones(1, np.float32))
    print(WARM)
