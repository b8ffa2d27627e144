"""What a ModelConfig and a TritonConfig can say: queues, priorities, a cache, access."""

import sys

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch, triton_context
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

URL = f"localhost:{sys.argv[1]}"


class Model:
    @batch
    @triton_context
    def infer(self, triton_context, **inputs):
        (values,) = inputs.values()
        config = triton_context.model_configs[self.infer]
        return [values + config.max_batch_size]


config = ModelConfig(
    max_batch_size=16,
    response_cache=True,
    batcher=DynamicBatcher(
        max_queue_delay_microseconds=100,
        preferred_batch_size=[2, 4],
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(TimeoutAction.REJECT, max_queue_size=100),
        priority_queue_policy={2: QueuePolicy(default_timeout_microseconds=10_000_000)},
    ),
)
options = TritonConfig(cache_config=["local,size=1048576"], allow_metrics=False, id="configured")
security = TritonSecurityConfig(access_token="secret", restricted_endpoints=["model-repository", "inference"])
with Triton(config=options, security_config=security, workspace="/nonexistent/workspace") as triton:
    tensors = [Tensor(dtype=np.float32, shape=(1,))]
    triton.bind("Configured", Model().infer, tensors, tensors, config=config, strict=True)
    with ModelClient(URL, "Configured", access_token=triton.get_access_token()) as client:
        for _ in range(2):
            print(client.infer_sample(np.ones(1, np.float32)))
        print(client.model_config.batcher)
    with ModelClient(URL, "Configured") as client:
        try:
            client.infer_sample(np.ones(1, np.float32))
        except Exception as error:
            print(type(error).__name__, error)
