"""PyTriton's questions to a server by a tritonclient of one's own, over both protocols."""

import asyncio
import sys

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from pytriton.client.asyncio_utils import (
    asyncio_get_model_config,
    asyncio_get_model_state,
    asyncio_wait_for_model_ready,
    asyncio_wait_for_model_status_loaded,
    asyncio_wait_for_server_ready,
)
from pytriton.client.exceptions import PyTritonClientTimeoutError
from pytriton.client.utils import (
    TritonUrl,
    create_client_from_url,
    get_model_config,
    get_model_state,
    wait_for_model_ready,
    wait_for_server_ready,
)
from pytriton.decorators import sample
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonLifecyclePolicy, TritonSecurityConfig

URLS = [TritonUrl.from_url(url) for url in (f"localhost:{sys.argv[1]}", f"grpc://localhost:{sys.argv[2]}")]
AIO = {"http": tritonclient.http.aio, "grpc": tritonclient.grpc.aio}
FLOATS = [Tensor(name="values", dtype=np.float32, shape=(2,))]


@sample
def negative(values):
    return [-values]


async def ask(url):
    async with AIO[url.scheme].InferenceServerClient(url.without_scheme) as client:
        await asyncio_wait_for_server_ready(client, 10)
        await asyncio_wait_for_model_ready(client, "Negative", timeout_s=10)
        await asyncio_wait_for_model_status_loaded(client, "Negative", 0.1)
        print(await asyncio_get_model_state(client, "Negative"))
        print((await asyncio_get_model_config(client, "Negative")).outputs[0].shape)
        try:
            await asyncio_wait_for_model_ready(client, "Other", timeout_s=0.1)
        except PyTritonClientTimeoutError as error:
            print(error.message)


policy = TritonLifecyclePolicy(launch_triton_on_startup=False)
security = TritonSecurityConfig(restricted_endpoints=[])
with Triton(triton_lifecycle_policy=policy, security_config=security) as triton:
    print(triton.is_connected(), triton.get_access_token())
    triton.bind("Negative", negative, FLOATS, FLOATS, config=ModelConfig(batching=False))
    triton.run()
    triton.connect()
    print(triton.is_connected())
    for url in URLS:
        with create_client_from_url(url.with_scheme, network_timeout_s=5) as client:
            wait_for_server_ready(client, 10)
            wait_for_model_ready(client, "Negative", timeout_s=10)
            print(get_model_state(client, "Negative"), get_model_state(client, "Other"))
            print(get_model_config(client, "Negative").inputs[0])
            try:
                wait_for_model_ready(client, "Other", timeout_s=0.1)
            except PyTritonClientTimeoutError as error:
                print(error.message)
        asyncio.run(ask(url))
